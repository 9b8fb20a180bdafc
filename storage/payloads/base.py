"""What a payload store is put together from: one index, and tiers that hold the bytes.

The index knows every partition: the headers of its segments in order, its size, owner and time to
live. Tiers (memory, a shared-memory arena, Redis, an object store) hold bodies. A segment is
written in this order, and whoever dies between two steps leaves nothing that a reader could take
for data:

    tier.allocate    room, or `PayloadFullError`
    index.begin      the tenant's quota is charged; a clear from here on ends the put
    tier.write       the bytes
    index.append     the header: from here on readers see it, whole
    tier.seal        the room is the partition's, no longer the writer's
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from vla_storage.payloads.segments import Key, Place, Segment
from vla_storage.tensors import Array


class Piece(Protocol):
    """Some consecutive bytes of a body, about as much as a core's cache holds."""

    offset: int
    data: Array

    def digest(self) -> None:
        """Hash it. Called once it was taken over, while it is in the cache, by any thread."""


Pieces = Callable[[], Iterator[Piece]]
"""A body in order; gaps between pieces are padding. Called again to repeat a write."""
Spans = Sequence[tuple[int, int]]
"""Offset and size in bytes of each column in a body, ascending."""


@dataclass(frozen=True, kw_only=True)
class Want:
    """One range of one body."""

    segment: Segment
    offset: int
    size_bytes: int


class Tier(ABC):
    """Where bodies lie. Thread-safe. Every method may raise `StorageUnavailableError`."""

    name: str

    @abstractmethod
    def allocate(self, key: Key, segment_id: str, spans: Spans, *, ttl_s: float) -> Place:
        """Room for a body. Raises `PayloadFullError`; never waits."""

    @abstractmethod
    def write(self, key: Key, segment_id: str, place: Place, pieces: Pieces) -> None:
        """Fill an allocated place."""

    @abstractmethod
    def read(self, key: Key, wants: Sequence[Want], *, copy: bool) -> list[Array]:
        """The bytes of each range, flat uint8, all of them asked for in one go.

        Without `copy` they may be read-only views of shared memory, which stays what it is for
        as long as a view lives. Raises `PayloadNotFoundError` where the bytes are gone.
        """

    def is_trusted(self, size_bytes: int) -> bool:
        """Whether a range of that size needs no digest: owner and bytes are known otherwise."""
        return False

    @abstractmethod
    def free(self, key: Key, segment_id: str, place: Place) -> None:
        """Give the room back; fine where that happened before."""

    def reclaim(self, key: Key, segment_id: str, place: Place) -> None:
        """The partition was cleared while this body was being written, by somebody who may still
        write: if so, the writer gives the room back when it finds out."""
        self.free(key, segment_id, place)

    def seal(self, key: Key, segment_id: str, place: Place) -> None:
        """The header is in the index: the writer's death takes the body no longer."""
        return None

    def extend(self, key: Key, segments: Sequence[Segment], *, ttl_s: float) -> None:
        """Keep bodies for `ttl_s` more."""
        return None

    def reset(self) -> None:
        """Distrust whatever connections are open: a reply did not fit its request."""
        return None

    def sweep(self, known: Collection[Key], *, grace_s: float) -> int:
        """Free bodies of partitions that no index knows, if older than `grace_s`; how many."""
        return 0

    def close(self) -> None:
        """Release connections and mappings."""
        return None


class Append(StrEnum):
    """What became of a header."""

    DONE = "done"
    BEHIND = "behind"
    """Others appended meanwhile: read theirs first."""
    GONE = "gone"
    """The partition was cleared or expired since the put began."""


@dataclass(frozen=True, kw_only=True)
class PartitionUse:
    """A partition as collectors and operators see it."""

    key: Key
    size_bytes: int
    age_s: float
    owner: str


class PayloadIndex(ABC):
    """What lies where. Every method is atomic, on the index's own clock."""

    @abstractmethod
    def begin(
        self, key: Key, segment_id: str, place: Place, *, size_bytes: int, ttl_s: float,
        quota_bytes: int, owner: str,
    ) -> list[bytes]:  # fmt: skip
        """Charge the tenant for a segment and return the headers there are.

        Raises `PayloadFullError` where the tenant would hold more than `quota_bytes`.
        """

    @abstractmethod
    def append(self, key: Key, segment_id: str, header: bytes, *, seq: int) -> Append:
        """Add the header as number `seq`."""

    @abstractmethod
    def abandon(self, key: Key, segment_id: str) -> None:
        """End a segment that was begun and not appended."""

    @abstractmethod
    def read(self, key: Key) -> list[bytes]:
        """The headers in order; empty where there is no such partition."""

    @abstractmethod
    def clear(self, key: Key) -> tuple[list[bytes], dict[str, Place]]:
        """Forget a partition; returns its headers, and the places of segments under way."""

    @abstractmethod
    def mark(self, key: Key, consumer: str, rows: Sequence[int]) -> list[int]:
        """Note rows as consumed; returns those that were not before. Raises
        `PayloadNotFoundError` where there is no such partition."""

    @abstractmethod
    def consumed(self, key: Key, consumer: str) -> set[int]:
        """Rows marked so far."""

    @abstractmethod
    def partitions(self) -> Iterator[PartitionUse]:
        """All partitions of all tenants."""

    def reset(self) -> None:
        """Distrust whatever connections are open."""
        return None

    def close(self) -> None:
        """Release connections."""
        return None
