"""Pixels on one host: a client's shared-memory file of recycled slots.

Mapped once and used again and again: page faults, not copies, are what shared memory costs. The
client alone writes; workers read with `pread`, so a file that is cut short is a short read and
never a fault. A slot's generation is odd while it is written; a reader compares it after reading
and so never takes the next request's pixels for those it was sent for.

The owner holds a lock on the file for as long as it lives. Whoever opens an arena removes the
files whose owner is gone (`sweep`), however it went.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import re
import secrets
import threading
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vla_platform.errors import PixelsLostError, PixelsUnreachableError

SHARED_MEMORY = Path("/dev/shm")
_log = logging.getLogger(__name__)
_PREFIX = "vla-infer-"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}")
_ALIGNMENT = 4096
"""Of slots; the page before a slot holds its generation, the first one also the stride."""
ARENA_BYTES = 48 << 20
SMALLEST_SLOT = 64 << 10
MAX_SIZES = 16
MAX_BUFFER_BYTES = 32 << 20  # kept of each size


class Arena:
    """The writing end: one client's slots of `slot_bytes` each. Thread-safe."""

    def __init__(self, *, slot_bytes: int, num_slots: int, folder: Path = SHARED_MEMORY) -> None:
        self.slot_bytes = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_slots = num_slots
        self.name = f"{_PREFIX}{secrets.token_hex(16)}"
        self._stride = self.slot_bytes + _ALIGNMENT
        self._path = folder / self.name
        sweep(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # a sweeper may hold it for a moment
            # Reserved now: a full /dev/shm is an error here, not a SIGBUS at the first write.
            os.posix_fallocate(self._file, 0, self._stride * num_slots)
            self._map = mmap.mmap(self._file, self._stride * num_slots)
        except OSError:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            raise
        os.pwrite(self._file, self._stride.to_bytes(8, "little"), 8)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._generations = [0] * num_slots
        self._free = list(range(num_slots))
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """A free slot, the one used last first; None: all are in use."""
        with self._lock:
            return self._free.pop() if self._free else None

    def write(self, slot: int, parts: list[npt.NDArray[np.uint8]]) -> int:
        """Copy flat arrays one after the other into a taken slot; returns its generation."""
        start = slot * self._stride
        generation = self._generations[slot] + 2
        self._mark(start, generation - 1)
        at = start + _ALIGNMENT
        for part in parts:
            self._bytes[at : at + part.size] = part
            at += part.size
        self._mark(start, generation)
        self._generations[slot] = generation
        return generation

    def give_back(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)

    def close(self) -> None:
        """Remove the file. Workers that still read it keep reading until they close theirs."""
        self._path.unlink(missing_ok=True)
        del self._bytes
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._file)

    def _mark(self, start: int, generation: int) -> None:
        self._map[start : start + 8] = generation.to_bytes(8, "little")


class Arenas:
    """A client's arenas, one per size of slot, made when first needed. `put` belongs to one
    thread. Where there is no shared memory, nothing is ever put."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._by_size: dict[int, Arena] = {}

    def put(self, parts: list[npt.NDArray[np.uint8]]) -> tuple[Arena, int, int] | None:
        """Arena, slot and generation; None where there is no room now."""
        arena = self._fitting(sum(part.size for part in parts)) if self._enabled else None
        slot = None if arena is None else arena.take()
        if arena is None or slot is None:
            return None
        return arena, slot, arena.write(slot, parts)

    def close(self) -> None:
        for arena in self._by_size.values():
            arena.close()

    def _fitting(self, size_bytes: int) -> Arena | None:
        slot_bytes = max(SMALLEST_SLOT, 1 << (size_bytes - 1).bit_length())
        if slot_bytes // 4 * 3 >= size_bytes:
            slot_bytes = slot_bytes // 4 * 3
        found = self._by_size.get(slot_bytes)
        if found is None:
            num_slots = max(8, min(256, ARENA_BYTES // slot_bytes))
            try:
                found = self._by_size[slot_bytes] = Arena(
                    slot_bytes=slot_bytes, num_slots=num_slots
                )
            except OSError as error:
                _log.warning("action=no_shared_memory reason=%s", error)
                self._enabled = False
        return found


class ArenaReader:
    """The reading end of all clients' arenas on this host. `read` belongs to one thread.

    Buffers are used again once they are given back, for the reason that slots are.
    """

    def __init__(self, *, folder: Path = SHARED_MEMORY, max_open: int = 256) -> None:
        self._folder = folder
        self._max_open = max_open
        self._open: OrderedDict[str, tuple[int, int]] = OrderedDict()  # file, stride
        self._buffers: dict[int, deque[npt.NDArray[np.uint8]]] = {}

    def read(self, name: str, slot: int, generation: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        """A slot's bytes. Raises `PixelsUnreachableError` where the file is not here (another
        host) and `PixelsLostError` where the slot holds something else by now."""
        file, stride = self._file(name)
        start = slot * stride
        if not 0 <= slot < 1 << 20 or size_bytes > stride - _ALIGNMENT:
            raise PixelsLostError("a request points outside its arena")
        data = self._buffer(size_bytes)
        found = os.preadv(file, [data.data], start + _ALIGNMENT)
        after = int.from_bytes(os.pread(file, 8, start), "little")
        if found != size_bytes or after != generation:
            raise PixelsLostError("the pixels of a request are gone: its sender gave it up")
        return data

    def give_back(self, data: npt.NDArray[np.uint8]) -> None:
        """Nobody looks at what `read` gave any more. Any thread."""
        buffers = self._buffers.get(len(data))
        if buffers is not None:
            buffers.append(data)

    def _buffer(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        buffers = self._buffers.get(size_bytes)
        if buffers is None:
            if len(self._buffers) >= MAX_SIZES:
                self._buffers.pop(next(iter(self._buffers)))
            count = max(1, MAX_BUFFER_BYTES // max(1, size_bytes))
            buffers = self._buffers[size_bytes] = deque(maxlen=min(128, count))
        try:
            return buffers.pop()
        except IndexError:
            return np.empty(size_bytes, np.uint8)

    def close(self) -> None:
        for file, _ in self._open.values():
            os.close(file)
        self._open.clear()

    def _file(self, name: str) -> tuple[int, int]:
        found = self._open.get(name)
        if found is not None:
            self._open.move_to_end(name)
            return found
        if not _NAME.fullmatch(name):
            raise PixelsUnreachableError("not the name of an arena")
        try:
            file = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise PixelsUnreachableError(f"no arena {name} on this host") from error
        stride = int.from_bytes(os.pread(file, 8, 8), "little")
        if stride <= _ALIGNMENT:
            os.close(file)
            raise PixelsUnreachableError(f"{name} is not an arena")
        self._open[name] = (file, stride)
        while len(self._open) > self._max_open:
            _, (oldest, _) = self._open.popitem(last=False)
            os.close(oldest)
        return file, stride

    def forget_closed(self) -> int:
        """Close the files whose owner has removed them; returns how many."""
        gone = [name for name, (file, _) in self._open.items() if os.fstat(file).st_nlink == 0]
        for name in gone:
            os.close(self._open.pop(name)[0])
        return len(gone)


def sweep(folder: Path = SHARED_MEMORY) -> int:
    """Remove the arenas of owners that are gone; returns how many."""
    removed = 0
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or removed meanwhile
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # An owner that has not taken its lock yet has not given the file its size either.
            if os.fstat(file).st_size:
                path.unlink(missing_ok=True)
                removed += 1
        except OSError:
            pass  # its owner lives
        finally:
            os.close(file)
    return removed
