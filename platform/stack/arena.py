"""The stack's shared memory: one arena for the samples that its own processes hand each other."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from vla_platform.errors import ConfigurationError
from vla_storage.errors import StoreUnfitError
from vla_storage.payloads.arena_file import create_arena

SHARED_MEMORY = Path("/dev/shm")
DEFAULT_BYTES = 256 << 20
_LEAST_BYTES = 16 << 20  # below it is not worth the room
_log = logging.getLogger(__name__)


def arena_path(var: Path) -> Path:
    """Its name follows from the stack's folder: a later start finds what a killed one left."""
    return SHARED_MEMORY / f"vla-{hashlib.sha256(str(var.resolve()).encode()).hexdigest()[:16]}"


def prepare_arena(var: Path, environment: Mapping[str, str]) -> Path | None:
    """Create the arena, of `VLA_ARENA_BYTES` (0: none) but at most half of the room there is.

    None where this machine has no room for one: samples then go through the payload Redis. Raises
    `ConfigurationError` for a size that is none.
    """
    wanted = environment.get("VLA_ARENA_BYTES", str(DEFAULT_BYTES))
    if not wanted.isdecimal():
        raise ConfigurationError(f"VLA_ARENA_BYTES is {wanted!r}: give a number of bytes")
    if int(wanted) == 0 or not SHARED_MEMORY.is_dir():
        return None
    size = min(int(wanted), shutil.disk_usage(SHARED_MEMORY).free // 2)
    if size < min(_LEAST_BYTES, int(wanted)):
        _log.warning("action=arena_left_out free_bytes=%d", 2 * size)
        return None
    path = arena_path(var)
    try:
        create_arena(path, size)
    except StoreUnfitError as error:
        _log.warning("action=arena_left_out reason=%s", error)
        return None
    return path
