"""Pixels on one host: a client's shared-memory file of recycled slots.

Mapped once and used again and again: page faults, not copies, are what shared memory costs. The
client alone writes. A slot's generation is odd while it is written; a reader compares it when it is
done with the pixels, and so never takes the next request's for those it was sent for.

A file that is cut short while it is mapped ends its reader. So a worker maps the files of its own
user only, and reads those of others (which root can) with `pread`, which comes back short:
processes that do not trust each other must not run as one user.

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
import stat
import threading
from collections import OrderedDict
from dataclasses import dataclass
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
_POPULATED_BYTES = 64 << 20  # at once; the interpreter stands still meanwhile, 4 ms for 48 MB
SMALLEST_SLOT = 64 << 10


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


@dataclass(frozen=True)
class SlotBytes:
    """A request's bytes, flat: a copy, or a view of its slot. Any thread."""

    data: npt.NDArray[np.uint8]
    _mark: memoryview | None = None  # of a view: where the slot's generation is
    _generation: int = 0

    def check(self) -> None:
        """Raises `PixelsLostError` where the slot went to another request: what was seen since the
        last check may be that one's."""
        if self._mark is not None and int.from_bytes(self._mark, "little") != self._generation:
            raise _lost()

    def copied(self) -> SlotBytes:
        """The same, for as long as one likes. Raises `PixelsLostError`."""
        if self._mark is None:
            return self
        data = self.data.copy()
        self.check()
        return SlotBytes(data)


@dataclass(frozen=True)
class _Opened:
    file: int
    stride: int
    map: memoryview | None


class ArenaReader:
    """The reading end of all clients' arenas on this host. For one thread at a time."""

    def __init__(self, *, folder: Path = SHARED_MEMORY, max_open: int = 128) -> None:
        """`max_open`: two descriptors each."""
        self._folder = folder
        self._max_open = max_open
        self._open: OrderedDict[str, _Opened] = OrderedDict()

    def read(self, name: str, slot: int, generation: int, size_bytes: int) -> SlotBytes:
        """A copy of a slot's bytes. Raises `PixelsUnreachableError` where the file is not here
        (another host) and `PixelsLostError` where the slot holds something else by now."""
        opened, start = self._place(name, slot, size_bytes)
        data = np.empty(size_bytes, np.uint8)
        found = os.preadv(opened.file, [data.data], start + _ALIGNMENT)
        after = int.from_bytes(os.pread(opened.file, 8, start), "little")
        if found != size_bytes or after != generation:
            raise _lost()
        return SlotBytes(data)

    def view(self, name: str, slot: int, generation: int, size_bytes: int) -> SlotBytes:
        """The slot itself, read-only, where that is safe, else a copy; raises as `read` does.

        The sender may give the slot to another request at any time: check again after use.
        """
        opened, start = self._place(name, slot, size_bytes)
        if opened.map is None or start + _ALIGNMENT + size_bytes > len(opened.map):
            return self.read(name, slot, generation, size_bytes)
        data = np.frombuffer(opened.map, np.uint8, size_bytes, start + _ALIGNMENT)
        seen = SlotBytes(data, opened.map[start : start + 8], generation)
        seen.check()
        return seen

    def forget_closed(self) -> int:
        """Close the files whose owner has removed them; returns how many."""
        gone = [name for name, one in self._open.items() if os.fstat(one.file).st_nlink == 0]
        for name in gone:
            os.close(self._open.pop(name).file)
        return len(gone)

    def close(self) -> None:
        for opened in self._open.values():
            os.close(opened.file)
        self._open.clear()

    def _place(self, name: str, slot: int, size_bytes: int) -> tuple[_Opened, int]:
        opened = self._opened(name)
        if not 0 <= slot < 1 << 20 or size_bytes > opened.stride - _ALIGNMENT:
            raise PixelsLostError("a request points outside its arena")
        return opened, slot * opened.stride

    def _opened(self, name: str) -> _Opened:
        found = self._open.get(name)
        if found is not None:
            self._open.move_to_end(name)
            return found
        if not _NAME.fullmatch(name):
            raise PixelsUnreachableError("not the name of an arena")
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait
            file = os.open(self._folder / name, flags)
        except OSError as error:
            raise PixelsUnreachableError(f"no arena {name} on this host") from error
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise PixelsUnreachableError(f"{name} is not an arena")
        stride = int.from_bytes(os.pread(file, 8, 8), "little")
        if stride <= _ALIGNMENT:
            os.close(file)
            raise PixelsUnreachableError(f"{name} is not an arena")
        self._open[name] = _Opened(file, stride, _mapped(file))
        while len(self._open) > self._max_open:
            _, oldest = self._open.popitem(last=False)
            os.close(oldest.file)
        return self._open[name]


def _mapped(file: int) -> memoryview | None:
    """The file's bytes; they stay as long as somebody looks at them. None: not to be mapped."""
    status = os.fstat(file)
    if status.st_uid != os.geteuid():
        return None
    flags = mmap.MAP_SHARED
    if status.st_size <= _POPULATED_BYTES:
        flags |= getattr(mmap, "MAP_POPULATE", 0)
    try:
        return memoryview(mmap.mmap(file, status.st_size, flags=flags, prot=mmap.PROT_READ))
    except (OSError, ValueError) as error:  # no descriptors or mappings left, or it is empty by now
        _log.warning("action=arena_not_mapped reason=%s", error)
        return None


def _lost() -> PixelsLostError:
    return PixelsLostError("the pixels of a request are gone: its slot holds another one's")


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
