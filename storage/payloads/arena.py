"""Bodies in shared memory, for producers and consumers on one host.

A place names a slot and its generation, and the slot names its owner: a reader that comes after
the slot was recycled gets `PayloadNotFoundError`, never somebody else's bytes. Small reads are
copied and checked again afterwards; large ones are views, and a pin keeps their extent from being
used anew until the last view is gone or its process is dead.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from vla_storage.errors import PayloadFullError, PayloadNotFoundError
from vla_storage.payloads.arena_file import NUM_SLOTS, ArenaFile, SlotState
from vla_storage.payloads.base import Pieces, Spans, Tier, Want
from vla_storage.payloads.segments import Key, Place, Segment, aligned
from vla_storage.tensors import Array

_COPIED_BYTES = 128 << 10  # below, a copy is cheaper than a pin
_SHARED_WORK_BYTES = 8 << 20
_HELPERS = 1  # more lose more to each other than they win


class ArenaTier(Tier):
    """Raises `StoreUnfitError` where `path` is no arena (see `create_arena`).

    `verify`: hash large reads too. Without it they rest on owner, generation and pin, which are
    always checked: nothing but this platform's own processes writes here, and hashing costs more
    than all the rest of a read.
    """

    name = "arena"

    def __init__(self, path: Path, *, verify: bool = False) -> None:
        self._file = ArenaFile(path)
        self._id = self._file.inode
        self._verify = verify
        self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix="arena")

    def allocate(self, key: Key, segment_id: str, spans: Spans, *, ttl_s: float) -> Place:
        body = max(offset + size for offset, size in spans)
        size = max(aligned(body), aligned(1))
        file, slots = self._file, self._file.slots
        with file.locked():
            self._recycle()
            free = np.flatnonzero(slots["state"] == SlotState.FREE)
            offset = self._gap(size)
            if offset is None or free.size == 0:
                raise PayloadFullError(
                    "the arena is full", reason="tier", tier=self.name,
                    partition_id=key.partition_id,
                )  # fmt: skip
            number = int(free[0])
            now = time.monotonic()
            slots["generation"][number] += 1
            slots["writer"][number] = file.participant
            slots["offset"][number], slots["size"][number] = offset, size
            slots["created"][number], slots["expires"][number] = now, now + ttl_s
            slots["owner"][number] = str(key).encode()
            slots["state"][number] = SlotState.WRITING  # last: who dies before leaves a free slot
            generation = int(slots["generation"][number])
        return {
            "tier": self.name, "arena": self._id, "slot": number, "generation": generation,
        }  # fmt: skip

    def write(self, key: Key, segment_id: str, place: Place, pieces: Pieces) -> None:
        slot = self._slot(key, place)
        begin = int(self._file.slots["offset"][slot])
        body = self._file.heap[begin : begin + int(self._file.slots["size"][slot])]
        source = pieces()
        lock = threading.Lock()

        def fill() -> None:
            while True:
                with lock:
                    piece = next(source, None)
                if piece is None:
                    return
                body[piece.offset : piece.offset + piece.data.size] = piece.data
                piece.digest()

        # Copying and hashing leave the interpreter to others: a second thread halves the time.
        large = body.size >= _SHARED_WORK_BYTES
        helpers = [self._helpers.submit(fill) for _ in range(_HELPERS if large else 0)]
        try:
            fill()
        finally:
            for helper in helpers:
                if not helper.cancel():
                    helper.result()

    def seal(self, key: Key, segment_id: str, place: Place) -> None:
        with self._file.locked():
            slot = self._find(key, place)
            if slot is not None:
                self._file.slots["state"][slot] = SlotState.SEALED

    def read(self, key: Key, wants: Sequence[Want], *, copy: bool) -> list[Array]:
        held: dict[str, _Pinned | None] = {}
        found = []
        for want in wants:
            if copy or want.size_bytes < _COPIED_BYTES:
                found.append(self._copied(key, want))
                continue
            segment = want.segment
            if segment.segment_id not in held:
                held[segment.segment_id] = self._pin(key, segment)
            pinned = held[segment.segment_id]
            if pinned is None:
                found.append(self._copied(key, want))
            else:
                found.append(np.asarray(pinned)[want.offset : want.offset + want.size_bytes])
        return found

    def is_trusted(self, size_bytes: int) -> bool:
        return not self._verify and size_bytes >= _COPIED_BYTES

    def free(self, key: Key, segment_id: str, place: Place) -> None:
        with self._file.locked():
            slot = self._find(key, place)
            if slot is not None:
                self._file.slots["state"][slot] = SlotState.CLEARED
                self._recycle()

    def reclaim(self, key: Key, segment_id: str, place: Place) -> None:
        return None  # the writer frees it, or dies: its extent must not be another's before

    def extend(self, key: Key, segments: Sequence[Segment], *, ttl_s: float) -> None:
        until = time.monotonic() + ttl_s
        with self._file.locked():
            for segment in segments:
                slot = self._find(key, segment.place)
                if slot is not None:
                    expires = self._file.slots["expires"]
                    expires[slot] = max(float(expires[slot]), until)

    def sweep(self, known: Collection[Key], *, grace_s: float) -> int:
        owners = {str(key).encode() for key in known}
        slots, removed = self._file.slots, 0
        with self._file.locked():
            old = slots["created"] <= time.monotonic() - grace_s
            for number in np.flatnonzero((slots["state"] == SlotState.SEALED) & old):
                if bytes(slots["owner"][number]) not in owners:
                    slots["state"][number] = SlotState.CLEARED
                    removed += 1
            self._recycle()
        return removed

    def close(self) -> None:
        self._helpers.shutdown()
        del self._file  # views that are out keep the mapping, and this process a participant

    def _slot(self, key: Key, place: Place) -> int:
        slot = self._find(key, place)
        if slot is None:
            raise PayloadNotFoundError(
                f"{key} is gone", partition_id=key.partition_id, columns=[], tier=self.name
            )
        return slot

    def _find(self, key: Key, place: Place) -> int | None:
        """The slot's number, if it still is what `place` says and belongs to `key`."""
        number = place.get("slot")
        slots = self._file.slots
        if place.get("arena") != self._id or type(number) is not int or not 0 <= number < NUM_SLOTS:
            return None
        state = int(slots["state"][number])
        if (
            int(slots["generation"][number]) != place.get("generation")
            or state not in (SlotState.WRITING, SlotState.SEALED)
            or bytes(slots["owner"][number]) != str(key).encode()
            or (state == SlotState.SEALED and float(slots["expires"][number]) <= time.monotonic())
        ):
            return None
        return number

    def _extent(self, key: Key, want: Want) -> tuple[int, int]:
        slot = self._slot(key, want.segment.place)
        begin = int(self._file.slots["offset"][slot]) + want.offset
        if want.offset + want.size_bytes > int(self._file.slots["size"][slot]):
            raise PayloadNotFoundError(f"{key} is gone", partition_id=key.partition_id, columns=[])
        return begin, begin + want.size_bytes

    def _copied(self, key: Key, want: Want) -> Array:
        begin, end = self._extent(key, want)
        copied = self._file.heap[begin:end].copy()
        self._slot(key, want.segment.place)  # recycled meanwhile: then what was copied is not ours
        return copied

    def _pin(self, key: Key, segment: Segment) -> _Pinned | None:
        """None where no entry is left: then the caller copies."""
        file = self._file
        with file.locked():
            slot = self._slot(key, segment.place)
            if segment.size_bytes > int(file.slots["size"][slot]):
                raise PayloadNotFoundError(
                    f"{key} is gone", partition_id=key.partition_id, columns=[]
                )
            free = np.flatnonzero(file.pins["participant"] == 0)
            if free.size == 0:
                return None
            pin = int(free[0])
            file.pins["slot"][pin] = slot
            file.pins["generation"][pin] = segment.place["generation"]
            file.pins["participant"][pin] = file.participant + 1
            return _Pinned(file, pin, int(file.slots["offset"][slot]), segment.size_bytes)

    def _recycle(self) -> None:
        """Free what is cleared, expired or was being written by the dead. Call it `locked`."""
        file, slots = self._file, self._file.slots
        states = slots["state"]
        writing = np.flatnonzero(states == SlotState.WRITING)
        for number in writing:
            if not file.is_alive(int(slots["writer"][number])):
                states[number] = SlotState.CLEARED
        expired = (states == SlotState.SEALED) & (slots["expires"] <= time.monotonic())
        states[expired] = SlotState.CLEARED
        cleared = np.flatnonzero(states == SlotState.CLEARED)
        if cleared.size == 0:
            return
        pinned = self._pinned()
        for number in cleared:
            if int(number) not in pinned:
                states[number] = SlotState.FREE

    def _pinned(self) -> set[int]:
        """Slots whose readers live; entries of dead readers are freed."""
        file, pins = self._file, self._file.pins
        taken = np.flatnonzero(pins["participant"])
        alive: dict[int, bool] = {}
        found = set()
        for number in taken:
            participant = int(pins["participant"][number]) - 1
            if participant < 0:
                continue  # unpinned since: that takes no lock
            if participant not in alive:
                alive[participant] = file.is_alive(participant)
            if not alive[participant]:
                pins["participant"][number] = 0
            elif pins["generation"][number] == file.slots["generation"][pins["slot"][number]]:
                found.add(int(pins["slot"][number]))
        return found

    def _gap(self, size: int) -> int | None:
        """The first gap of the heap that is large enough: low addresses are warm."""
        slots = self._file.slots
        used = np.flatnonzero(slots["state"] != SlotState.FREE)
        begins = slots["offset"][used].astype(np.int64)
        order = np.argsort(begins)
        begins = begins[order]
        ends = begins + slots["size"][used[order]].astype(np.int64)
        gaps_at = np.concatenate([[0], ends])
        gaps_end = np.concatenate([begins, [self._file.heap.size]])
        fits = np.flatnonzero(gaps_end - gaps_at >= size)
        return int(gaps_at[fits[0]]) if fits.size else None


class _Pinned:
    """A read-only extent of the heap; its pin lives as long as the arrays made of it."""

    def __init__(self, file: ArenaFile, pin: int, offset: int, size_bytes: int) -> None:
        self._file = file  # keeps the mapping
        self._heap = file.heap
        self.__array_interface__ = {
            "version": 3,
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (file.heap_address + offset, True),
        }
        # Without the lock: the collector may run in a thread that holds it, and only the owner
        # writes a live entry.
        weakref.finalize(self, _unpin, file.pins["participant"], pin, os.getpid()).atexit = False


def _unpin(participants: Array, pin: int, pid: int) -> None:
    if os.getpid() == pid:  # a fork has the object, but not the pin
        participants[pin] = 0
