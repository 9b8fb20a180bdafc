"""The file behind a shared-memory arena: its table of slots and pins, its locks, its mapping.

Every process maps the file once and faults its pages in at the start; bodies are then copied into
pages that are there. Layout, each part from a page border on:

    header   magic, version, sizes
    slots    one entry per body: generation, state, who writes, extent, expiry, owner
    pins     one entry per reader that holds views: participant, slot, generation
    heap     the bodies

Byte-range locks on the file (open file description locks) are freed by the kernel when a process
dies, however it dies, and work across PID namespaces: byte 0 guards table changes, byte 1 + n is
held by participant n for its life. So a participant whose byte is free is dead, and what it was
writing or reading is anybody's.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import numpy as np

from vla_storage.errors import StorageUnavailableError, StoreUnfitError
from vla_storage.tensors import Array

NUM_SLOTS = 4096
NUM_PINS = 4096
MAX_PARTICIPANTS = 512
MIN_BYTES = 1 << 20
_MAGIC = b"vla-arena-2\0"
_PAGE = mmap.PAGESIZE
_LOCK_WAIT_S = 5.0

# One record of arrays: what is searched lies together.
SLOTS = np.dtype(
    [
        ("state", "<u4", (NUM_SLOTS,)),
        ("writer", "<u4", (NUM_SLOTS,)),  # participant
        ("generation", "<u8", (NUM_SLOTS,)),  # rises whenever the slot is used anew
        ("offset", "<u8", (NUM_SLOTS,)),  # in the heap
        ("size", "<u8", (NUM_SLOTS,)),
        # CLOCK_MONOTONIC, the same in all processes of the host
        ("expires", "<f8", (NUM_SLOTS,)),
        ("created", "<f8", (NUM_SLOTS,)),
        ("owner", "S208", (NUM_SLOTS,)),  # tenant/partition
    ]
)
PINS = np.dtype(
    [
        ("participant", "<u4", (NUM_PINS,)),  # one more than its number; 0: a free entry
        ("slot", "<u4", (NUM_PINS,)),
        ("generation", "<u8", (NUM_PINS,)),
    ]
)


class SlotState(IntEnum):
    FREE = 0
    WRITING = 1
    """Its writer's; dies with it."""
    SEALED = 2
    """Its partition's."""
    CLEARED = 3
    """Nobody finds it any more, but a reader still holds views: its extent waits for them."""


class ArenaFile:
    """One process's mapping of an arena. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Map an existing arena. Raises `StoreUnfitError`."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise StoreUnfitError(f"arena {path}: {error.strerror}", path=str(path)) from error
        try:
            size = _checked_size(self._fd, path)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            mapped = mmap.mmap(self._fd, size, flags=flags)
        except BaseException:
            os.close(self._fd)
            raise
        # Pins of views that are out count for as long as this file is open.
        weakref.finalize(self, os.close, self._fd).atexit = False
        self.path = path
        self._mutex = threading.Lock()
        self.slots = np.frombuffer(mapped, SLOTS, 1, _SLOTS_AT)[0]
        self.pins = np.frombuffer(mapped, PINS, 1, _PINS_AT)[0]
        self.heap: Array = np.frombuffer(mapped, np.uint8, size - _HEAP_AT, _HEAP_AT)
        self.heap_address = self.heap.__array_interface__["data"][0]
        with self.locked():
            self.participant = self._join()

    @property
    def inode(self) -> int:
        """Tells this arena from a later one of the same name."""
        return os.fstat(self._fd).st_ino

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Change the table. Held for microseconds; raises `StorageUnavailableError` where its
        holder is stopped."""
        if not self._mutex.acquire(timeout=_LOCK_WAIT_S):
            raise StorageUnavailableError("the arena is locked", path=str(self.path))
        try:
            deadline = time.monotonic() + _LOCK_WAIT_S
            pause = 20e-6
            while not self._try_lock(0):
                if time.monotonic() > deadline:
                    raise StorageUnavailableError("the arena is locked", path=str(self.path))
                time.sleep(pause)
                pause = min(2e-3, pause * 1.5)
            try:
                yield
            finally:
                self._lock(fcntl.F_UNLCK, 0)
        finally:
            self._mutex.release()

    def is_alive(self, participant: int) -> bool:
        """Whether that participant's process still runs. Call it `locked`."""
        if participant == self.participant:
            return True
        if not self._try_lock(1 + participant):
            return True
        self._lock(fcntl.F_UNLCK, 1 + participant)
        return False

    def _join(self) -> int:
        for number in range(MAX_PARTICIPANTS):
            if self._try_lock(1 + number):
                # What a dead predecessor of this number left must not become ours.
                dead = (self.slots["state"] == SlotState.WRITING) & (self.slots["writer"] == number)
                self.slots["state"][dead] = SlotState.CLEARED
                self.pins["participant"][self.pins["participant"] == number + 1] = 0
                return number
        raise StorageUnavailableError(f"arena {self.path}: too many processes")

    def _try_lock(self, byte: int) -> bool:
        try:
            self._lock(fcntl.F_WRLCK, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _lock(self, kind: int, byte: int) -> None:
        # struct flock of 64-bit Linux: type, whence, start, length, pid.
        fcntl.fcntl(self._fd, _F_OFD_SETLK, struct.pack("hhqqi4x", kind, 0, byte, 1, 0))


_F_OFD_SETLK = 37
_SLOTS_AT = _PAGE
_PINS_AT = _SLOTS_AT + -(-SLOTS.itemsize // _PAGE) * _PAGE
_HEAP_AT = _PINS_AT + -(-PINS.itemsize // _PAGE) * _PAGE


def create_arena(path: Path, size_bytes: int) -> None:
    """Make an arena with a heap of `size_bytes` and give it its memory now, not at first use.

    An arena of that size that is there stays as it is; another is replaced, and whoever has it
    mapped keeps the old one. Raises `StoreUnfitError` where the memory is not to be had.
    """
    size_bytes = max(MIN_BYTES, -(-size_bytes // _PAGE) * _PAGE)
    total = _HEAP_AT + size_bytes
    with contextlib.suppress(OSError, StoreUnfitError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if _checked_size(fd, path) == total:
                return
        finally:
            os.close(fd)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fresh.unlink(missing_ok=True)
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, total)
            os.pwrite(fd, _MAGIC + struct.pack("<Q", total), 0)
        finally:
            os.close(fd)
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise StoreUnfitError(
            f"arena {path}: {error.strerror} ({total >> 20} MB)", path=str(path)
        ) from error


def _checked_size(fd: int, path: Path) -> int:
    status = os.fstat(fd)
    head = os.pread(fd, len(_MAGIC) + 8, 0)
    size = struct.unpack("<Q", head[len(_MAGIC) :])[0] if len(head) == len(_MAGIC) + 8 else 0
    if (
        not stat.S_ISREG(status.st_mode)
        or status.st_uid != os.getuid()
        or not head.startswith(_MAGIC)
        or size != status.st_size
        or size <= _HEAP_AT
    ):
        raise StoreUnfitError(f"{path} is no arena of this user and release", path=str(path))
    return int(size)
