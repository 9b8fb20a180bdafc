"""Where a policy's versions come from when they are first asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod

from vla_platform.errors import NotFoundError
from vla_platform.gpu_workers.weights import Weights

Wanted = int | str | None
"""A policy version, a checkpoint id, or the current version."""


class ModuleSource(ABC):
    """May be slow: called from loading threads only. Thread-safe."""

    @abstractmethod
    def current(self, policy_key: str) -> int | str:
        """What `None` stands for now. Raises `NotFoundError` for an unknown policy."""

    @abstractmethod
    def load(self, policy_key: str, wanted: int | str) -> Weights:
        """Raises `NotFoundError`, `ModuleLoadError` or a `StorageError`."""


class MemoryModuleSource(ModuleSource):
    """Versions put by hand, for tests and benchmarks."""

    def __init__(self) -> None:
        self.versions: dict[tuple[str, int | str], Weights] = {}

    def put(self, policy_key: str, weights: Weights) -> None:
        self.versions[policy_key, weights.version] = weights

    def current(self, policy_key: str) -> int | str:
        numbers = [
            version
            for key, version in self.versions
            if key == policy_key and isinstance(version, int)
        ]
        if not numbers:
            raise NotFoundError(f"no policy {policy_key}", policy_key=policy_key)
        return max(numbers)

    def load(self, policy_key: str, wanted: int | str) -> Weights:
        found = self.versions.get((policy_key, wanted))
        if found is None:
            raise NotFoundError(f"{policy_key} has no version {wanted}", policy_key=policy_key)
        return found
