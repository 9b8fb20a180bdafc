"""Index and tier in memory, for unit tests and for a worker that samples for itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vla_storage.errors import PayloadFullError, PayloadNotFoundError
from vla_storage.payloads.base import (
    Append,
    PartitionUse,
    PayloadIndex,
    Pieces,
    Spans,
    Tier,
    Want,
)
from vla_storage.payloads.segments import Key, Place, Segment
from vla_storage.payloads.store import DEFAULT_QUOTA_BYTES, PayloadStore
from vla_storage.tensors import Array


@dataclass
class _Partition:
    owner: str
    created: float
    expires: float = 0.0
    headers: list[bytes] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, Place] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    consumed: dict[str, set[int]] = field(default_factory=dict)


class MemoryIndex(PayloadIndex):
    def __init__(self) -> None:
        self._partitions: dict[Key, _Partition] = {}
        self._lock = threading.Lock()

    def begin(
        self, key: Key, segment_id: str, place: Place, *, size_bytes: int, ttl_s: float,
        quota_bytes: int, owner: str,
    ) -> list[bytes]:  # fmt: skip
        with self._lock:
            self._expire()
            used = sum(
                sum(one.sizes.values())
                for other, one in self._partitions.items()
                if other.tenant_id == key.tenant_id
            )
            if used + size_bytes > quota_bytes:
                raise PayloadFullError(
                    f"tenant {key.tenant_id} holds {used} of {quota_bytes} bytes",
                    reason="quota", tenant_id=key.tenant_id,
                )  # fmt: skip
            now = time.monotonic()
            partition = self._partitions.setdefault(key, _Partition(owner, now))
            partition.expires = max(partition.expires, now + ttl_s)
            partition.sizes[segment_id] = size_bytes
            partition.drafts[segment_id] = place
            return list(partition.headers)

    def append(self, key: Key, segment_id: str, header: bytes, *, seq: int) -> Append:
        with self._lock:
            self._expire()
            partition = self._partitions.get(key)
            if partition is None or segment_id not in partition.drafts:
                return Append.GONE
            if len(partition.headers) != seq:
                return Append.BEHIND
            partition.headers.append(header)
            del partition.drafts[segment_id]
            return Append.DONE

    def abandon(self, key: Key, segment_id: str) -> None:
        with self._lock:
            partition = self._partitions.get(key)
            if partition is not None and partition.drafts.pop(segment_id, None) is not None:
                del partition.sizes[segment_id]
                if not partition.headers and not partition.drafts:
                    del self._partitions[key]

    def read(self, key: Key) -> list[bytes]:
        with self._lock:
            self._expire()
            partition = self._partitions.get(key)
            return list(partition.headers) if partition else []

    def clear(self, key: Key) -> tuple[list[bytes], dict[str, Place]]:
        with self._lock:
            partition = self._partitions.pop(key, None)
            return (partition.headers, partition.drafts) if partition else ([], {})

    def mark(self, key: Key, consumer: str, rows: Sequence[int]) -> list[int]:
        with self._lock:
            self._expire()
            partition = self._partitions.get(key)
            if partition is None:
                raise PayloadNotFoundError(
                    f"no partition {key.partition_id}", partition_id=key.partition_id, columns=[]
                )
            marked = partition.consumed.setdefault(consumer, set())
            fresh = [row for row in rows if row not in marked]
            marked.update(fresh)
            return fresh

    def consumed(self, key: Key, consumer: str) -> set[int]:
        with self._lock:
            partition = self._partitions.get(key)
            return set(partition.consumed.get(consumer, ())) if partition else set()

    def partitions(self) -> Iterator[PartitionUse]:
        with self._lock:
            self._expire()
            now = time.monotonic()
            found = [
                PartitionUse(
                    key=key, size_bytes=sum(one.sizes.values()), age_s=now - one.created,
                    owner=one.owner,
                )
                for key, one in self._partitions.items()
            ]  # fmt: skip
        yield from found

    def _expire(self) -> None:
        now = time.monotonic()
        for key in [key for key, one in self._partitions.items() if one.expires <= now]:
            del self._partitions[key]


@dataclass
class _Body:
    created: float
    expires: float
    data: Array


class MemoryTier(Tier):
    """Bodies of one process, up to `capacity_bytes`."""

    name = "memory"

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self._capacity_bytes = capacity_bytes
        self._bodies: dict[tuple[Key, str], _Body] = {}
        self._lock = threading.Lock()

    def allocate(self, key: Key, segment_id: str, spans: Spans, *, ttl_s: float) -> Place:
        size = max(offset + size for offset, size in spans)
        now = time.monotonic()
        with self._lock:
            for old in [one for one, body in self._bodies.items() if body.expires <= now]:
                del self._bodies[old]
            used = sum(body.data.size for body in self._bodies.values())
            if used + size > self._capacity_bytes:
                raise PayloadFullError("memory is full", reason="tier", tier=self.name)
            self._bodies[key, segment_id] = _Body(now, now + ttl_s, np.empty(size, np.uint8))
        return {"tier": self.name}

    def write(self, key: Key, segment_id: str, place: Place, pieces: Pieces) -> None:
        body = self._body(key, segment_id)
        for piece in pieces():
            body[piece.offset : piece.offset + piece.data.size] = piece.data
            piece.digest()

    def read(self, key: Key, wants: Sequence[Want], *, copy: bool) -> list[Array]:
        found = []
        for want in wants:
            body = self._body(key, want.segment.segment_id)
            part = body[want.offset : want.offset + want.size_bytes]
            found.append(part.copy() if copy else part)
        return found

    def free(self, key: Key, segment_id: str, place: Place) -> None:
        with self._lock:
            self._bodies.pop((key, segment_id), None)

    def extend(self, key: Key, segments: Sequence[Segment], *, ttl_s: float) -> None:
        until = time.monotonic() + ttl_s
        with self._lock:
            for (owner, _), body in self._bodies.items():
                if owner == key:
                    body.expires = max(body.expires, until)

    def sweep(self, known: Collection[Key], *, grace_s: float) -> int:
        before = time.monotonic() - grace_s
        with self._lock:
            lost = [
                one
                for one, body in self._bodies.items()
                if one[0] not in known and body.created <= before
            ]
            for one in lost:
                del self._bodies[one]
        return len(lost)

    def _body(self, key: Key, segment_id: str) -> Array:
        with self._lock:
            found = self._bodies.get((key, segment_id))
        if found is None:
            raise PayloadNotFoundError(
                f"{key} was cleared", partition_id=key.partition_id, columns=[]
            )
        return found.data


class MemoryPayloadStore(PayloadStore):
    """A store of one process."""

    def __init__(
        self, *, quota_bytes: int = DEFAULT_QUOTA_BYTES, capacity_bytes: int = 1 << 40
    ) -> None:
        super().__init__(MemoryIndex(), [MemoryTier(capacity_bytes)], quota_bytes=quota_bytes)
