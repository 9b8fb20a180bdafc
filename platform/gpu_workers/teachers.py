"""Teachers of on-policy distillation, loaded by reference as inference loads what it serves."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from vla_platform.control.services import Services
from vla_platform.errors import UnavailableError
from vla_platform.gpu_workers.action_modules.base import ActionModule
from vla_platform.gpu_workers.backbone import Backbone
from vla_platform.gpu_workers.published_modules import published_versions
from vla_platform.specs import TeacherSpec

WAIT_S = 2.0
"""For a teacher that loads: others' training stands still meanwhile, and the job comes again."""


class Teachers:
    """Those of one base model; idle ones are evicted as inference evicts its own."""

    def __init__(self, services: Services, backbone: Backbone) -> None:
        self._versions = published_versions(services, backbone)

    @contextmanager
    def get(self, tenant: str, teacher: TeacherSpec) -> Iterator[ActionModule]:
        """Raises `NotFoundError` where that version is gone, `ModuleLoadError`, and
        `UnavailableError` while it is being loaded."""
        key = f"{tenant}/{teacher.policy}"
        found = self._versions.acquire(key, teacher.version)
        while isinstance(found, Future):
            try:
                found.result(WAIT_S)
            except TimeoutError as error:
                raise UnavailableError(f"teacher {key} is still being loaded") from error
            found = self._versions.acquire(key, teacher.version)
        try:
            yield found.module
        finally:
            self._versions.release(found)

    def close(self) -> None:
        self._versions.close()
