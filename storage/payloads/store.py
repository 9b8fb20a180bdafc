"""The payload store: the samples of training jobs, once, under tenant and partition.

Control messages carry keys and metadata only; the arrays live here until the job ends. Rows are
samples, columns are fields; a cell is written once, and late columns (advantages, log-probs,
features) join the rows that are there, from any process.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from vla_storage.errors import (
    PayloadCorruptError,
    PayloadError,
    PayloadFullError,
    PayloadNotFoundError,
    StorageError,
)
from vla_storage.names import check_id
from vla_storage.payloads import reading, writing
from vla_storage.payloads.base import Append, PartitionUse, PayloadIndex, Tier, Want
from vla_storage.payloads.columns import Column, ColumnData, ColumnInfo, Kind
from vla_storage.payloads.reading import Run
from vla_storage.payloads.segments import Key, Place, Segment, decode, encode
from vla_storage.payloads.writing import NewBlock, check_rows
from vla_storage.tensors import Array

DEFAULT_QUOTA_BYTES = 4 << 30
JOB = "job"
"""Owner of partitions that the ledger knows; the collector removes those it knows no longer."""
_POLL_S = 0.02
_log = logging.getLogger(__name__)
_TRIES = 16


class PayloadStore:
    """One index and its tiers, best first. Thread-safe. `AsyncPayloadStore` is its asyncio twin.

    A body goes to the first tier with room. Every method may raise `StorageUnavailableError`
    (retry helps). Readers and clears never wait for room.
    """

    def __init__(
        self, index: PayloadIndex, tiers: Sequence[Tier], *, quota_bytes: int = DEFAULT_QUOTA_BYTES
    ) -> None:
        self._index = index
        self._tiers = {tier.name: tier for tier in tiers}
        self._quota_bytes = quota_bytes

    def put(
        self, partition_id: str, tenant_id: str, columns: Mapping[str, ColumnData],
        rows: Sequence[int] | None = None, *, ttl_s: float, wait_s: float = 0.0, owner: str = JOB,
    ) -> dict[str, ColumnInfo]:  # fmt: skip
        """Write columns of some rows (0 to B-1 without `rows`); returns what was asked to be put.

        All of it becomes visible at once. The partition is kept for `ttl_s` from now. A cell with
        the same content again is fine (a retry); other content raises `PayloadExistsError`, and
        the first one stays. Raises `PayloadFullError` (retryable) where the tenant's quota or all
        tiers are full for `wait_s`, and `PayloadNotFoundError` where the partition was cleared
        meanwhile.
        """
        key = Key.checked(partition_id, tenant_id)
        planned = writing.plan(columns, rows)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                segments = self._put(key, planned, ttl_s=ttl_s, owner=check_id("owner", owner))
            except PayloadFullError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
                time.sleep(min(_POLL_S, left))
            else:
                return reading.describe(key, segments, columns)

    def get(
        self, partition_id: str, tenant_id: str, columns: Iterable[str] | None = None,
        rows: Sequence[int] | None = None, *, copy: bool = False,
    ) -> dict[str, Column]:  # fmt: skip
        """Read the named columns (or all) of the given rows (or all, ascending), nothing else.

        Arrays are read-only and may be views of shared memory, which stays untouched for as long
        as one of them lives; with `copy` they are the caller's own. Raises `PayloadNotFoundError`
        where a column lacks a row (`columns` names it), `PayloadCorruptError` where bytes, digest
        or owner do not fit.
        """
        key = Key.checked(partition_id, tenant_id)
        names = None if columns is None else list(columns)
        wanted = None if rows is None else check_rows(rows)
        try:
            return self._get(key, names, wanted, copy=copy)
        except PayloadCorruptError:
            # A connection may be one reply behind (redis/redis-py#2624): drop all, ask once more.
            self._index.reset()
            for tier in self._tiers.values():
                tier.reset()
            return self._get(key, names, wanted, copy=copy)

    def arrays(
        self, partition_id: str, tenant_id: str, columns: Iterable[str] | None = None,
        rows: Sequence[int] | None = None, *, copy: bool = False,
    ) -> dict[str, Array]:  # fmt: skip
        """`get` where all columns are dense. Raises `PayloadError` where one is not."""
        found = self.get(partition_id, tenant_id, columns, rows, copy=copy)
        arrays = {name: column for name, column in found.items() if isinstance(column, np.ndarray)}
        if len(arrays) != len(found):
            odd = sorted(found.keys() - arrays.keys())
            raise PayloadError(f"columns {', '.join(odd)} are not dense", columns=odd)
        return arrays

    def metadata(self, partition_id: str, tenant_id: str) -> dict[str, ColumnInfo]:
        """What is stored, without reading it. Empty where there is nothing."""
        key = Key.checked(partition_id, tenant_id)
        return reading.describe(key, self._segments(key))

    def ready_rows(
        self, partition_id: str, tenant_id: str, columns: Iterable[str], *, consumer: str = ""
    ) -> list[int]:
        """Rows that have all of these columns, ascending; with `consumer`, those it has not
        consumed."""
        key = Key.checked(partition_id, tenant_id)
        segments = self._segments(key)
        having = [set(writing.cells_of(segments, name)) for name in columns]
        ready = set.intersection(*having) if having else set()
        if consumer and ready:
            ready -= self._index.consumed(key, check_id("consumer", consumer))
        return sorted(ready)

    def mark_consumed(
        self, partition_id: str, tenant_id: str, consumer: str, rows: Sequence[int]
    ) -> list[int]:
        """Note rows as consumed by one consumer task; returns those that were not before.

        Of several that mark the same row, one gets it; rows whose answer is lost on the way count
        as consumed, as they do when a consumer dies. Raises `PayloadNotFoundError`.
        """
        key = Key.checked(partition_id, tenant_id)
        return self._index.mark(key, check_id("consumer", consumer), check_rows(rows))

    def consumed(self, partition_id: str, tenant_id: str, consumer: str) -> list[int]:
        """Rows that this consumer has marked."""
        key = Key.checked(partition_id, tenant_id)
        return sorted(self._index.consumed(key, check_id("consumer", consumer)))

    def clear(self, partition_id: str, tenant_id: str) -> bool:
        """Delete the whole partition, whatever of it exists; whether there was anything."""
        key = Key.checked(partition_id, tenant_id)
        headers, drafts = self._index.clear(key)
        for header in headers:
            with contextlib.suppress(PayloadCorruptError):
                segment = decode(key, header)
                # A tier that is not ours is another host's arena, which sweeps for itself.
                if segment.tier in self._tiers:
                    self._tiers[segment.tier].free(key, segment.segment_id, segment.place)
        for segment_id, place in drafts.items():
            tier = self._tiers.get(str(place.get("tier")))
            if tier is not None:
                tier.reclaim(key, segment_id, place)
        return bool(headers or drafts)

    def partitions(self) -> list[PartitionUse]:
        """Every partition of every tenant; for operators and collectors."""
        return list(self._index.partitions())

    def collect(self, live: Collection[tuple[str, str]], *, grace_s: float = 60.0) -> int:
        """Remove orphans: partitions of jobs, older than `grace_s`, that are not among the `live`
        (`(partition_id, tenant_id)`), and bodies that no partition owns. Returns how many."""
        known = {Key(tenant_id, partition_id) for partition_id, tenant_id in live}
        kept, removed = set(known), 0
        for use in self._index.partitions():
            if use.owner == JOB and use.key not in known and use.age_s >= grace_s:
                try:
                    removed += self.clear(use.key.partition_id, use.key.tenant_id)
                except PayloadError as error:  # whatever a tenant did to its own is its own
                    _log.warning("action=orphan_not_cleared partition=%s reason=%s", use.key, error)
            else:
                kept.add(use.key)
        return removed + sum(t.sweep(kept, grace_s=grace_s) for t in self._tiers.values())

    def close(self) -> None:
        """Release connections and mappings."""
        self._index.close()
        for tier in self._tiers.values():
            tier.close()

    # --- put ---

    def _put(
        self, key: Key, planned: Sequence[NewBlock], *, ttl_s: float, owner: str
    ) -> list[Segment]:
        seen: list[Segment] = []
        for _ in range(_TRIES):
            todo = writing.remaining(key, planned, seen)
            if not todo:
                return seen
            try:
                draft = _Draft.of(key, todo)
                tier, place = self._allocate(key, draft, ttl_s)
            except PayloadFullError:
                seen = self._reread(key, planned)
                continue
            try:
                headers = self._begin(key, draft, place, ttl_s=ttl_s, owner=owner)
            except PayloadFullError:
                tier.free(key, draft.segment_id, place)
                seen = self._reread(key, planned)
                continue
            except BaseException:
                self._undo(key, draft, tier, place)
                raise
            try:
                seen = [decode(key, header) for header in headers]
                if writing.remaining(key, todo, seen) == todo:
                    done = self._commit(key, draft, tier, place, seen)
                    for other in self._tiers.values():
                        mine = [segment for segment in seen if segment.tier == other.name]
                        if mine:
                            other.extend(key, mine, ttl_s=ttl_s)
                    return done
            except BaseException:
                self._undo(key, draft, tier, place)
                raise
            self._undo(key, draft, tier, place)  # some of it is there: write the rest only
        raise PayloadError(f"{key} changes faster than it can be written")

    def _reread(self, key: Key, planned: Sequence[NewBlock]) -> list[Segment]:
        """Full: but a retry may find that its first try had arrived."""
        seen = self._segments(key)
        if writing.remaining(key, planned, seen):
            raise
        return seen

    def _allocate(self, key: Key, draft: _Draft, ttl_s: float) -> tuple[Tier, Place]:
        spans = [(new.block.offset, new.block.size_bytes) for new in draft.blocks]
        full: PayloadFullError | None = None
        for tier in self._tiers.values():
            try:
                return tier, tier.allocate(key, draft.segment_id, spans, ttl_s=ttl_s)
            except PayloadFullError as error:
                full = error
        raise full or PayloadError("the store has no tiers")

    def _begin(
        self, key: Key, draft: _Draft, place: Place, *, ttl_s: float, owner: str
    ) -> list[bytes]:
        return self._index.begin(
            key, draft.segment_id, place, size_bytes=draft.size_bytes, ttl_s=ttl_s,
            quota_bytes=self._quota_bytes, owner=owner,
        )  # fmt: skip

    def _commit(
        self, key: Key, draft: _Draft, tier: Tier, place: Place, seen: list[Segment]
    ) -> list[Segment]:
        written: list[writing.BodyPiece] = []

        def pieces() -> Iterator[writing.BodyPiece]:
            written.clear()
            for piece in writing.pieces(key, draft.blocks):
                written.append(piece)
                yield piece

        tier.write(key, draft.segment_id, place, pieces)
        digests = [""] * len(draft.blocks)
        for piece in written:
            digests[piece.block] += piece.digests
        blocks = tuple(
            replace(new.block, digests=digest)
            for new, digest in zip(draft.blocks, digests, strict=True)
        )
        segment = Segment(
            segment_id=draft.segment_id, size_bytes=draft.size_bytes, place=place, blocks=blocks
        )
        header = encode(key, segment)
        while True:
            match self._index.append(key, draft.segment_id, header, seq=len(seen)):
                case Append.DONE:
                    tier.seal(key, draft.segment_id, place)
                    return [*seen, segment]
                case Append.GONE:
                    raise PayloadNotFoundError(
                        f"partition {key.partition_id} was cleared while it was written",
                        partition_id=key.partition_id, columns=[],
                    )  # fmt: skip
                case Append.BEHIND:
                    seen[:] = self._segments(key)
                    writing.remaining(key, draft.blocks, seen)  # raises where contents differ

    def _undo(self, key: Key, draft: _Draft, tier: Tier, place: Place) -> None:
        # What cannot be undone now goes with the partition, or when its time is over.
        with contextlib.suppress(StorageError):
            self._index.abandon(key, draft.segment_id)
        with contextlib.suppress(StorageError):
            tier.free(key, draft.segment_id, place)

    # --- get ---

    def _segments(self, key: Key) -> list[Segment]:
        return [decode(key, header) for header in self._index.read(key)]

    def _get(
        self, key: Key, names: list[str] | None, rows: list[int] | None, *, copy: bool
    ) -> dict[str, Column]:
        segments = self._segments(key)
        plans = reading.choose(key, segments, names, rows)
        raws = iter(self._read(key, [run for plan in plans for run in plan.runs], copy=copy))
        found: dict[str, Column] = {}
        shown: dict[str, tuple[tuple[str, ...], ...]] = {}
        for plan in plans:
            mine = [next(raws) for _ in plan.runs]
            if plan.kind is Kind.FRAMES:
                shown[plan.name] = reading.references(plan, mine)
                found[plan.name] = []  # keeps the order of the columns
            else:
                found[plan.name] = reading.assemble(plan, mine, copy=copy)
        if shown:
            self._add_frames(key, segments, shown, found, copy=copy)
        return found

    def _add_frames(
        self, key: Key, segments: list[Segment], shown: dict[str, tuple[tuple[str, ...], ...]],
        found: dict[str, Column], *, copy: bool,
    ) -> None:  # fmt: skip
        runs = {
            name: reading.frame_runs(key, segments, name, {d for row in rows for d in row})
            for name, rows in shown.items()
        }
        raws = iter(self._read(key, [run for mine in runs.values() for run in mine], copy=copy))
        for name, rows in shown.items():
            mine = [next(raws) for _ in runs[name]]
            found[name] = reading.frame_column(rows, runs[name], mine, copy=copy)

    def _read(self, key: Key, runs: list[Run], *, copy: bool) -> list[Array]:
        """The bytes of every run, verified; one request per tier."""
        wants = [run.want for run in runs]
        raws: dict[int, Array] = {}
        by_tier: dict[str, list[int]] = {}
        for number, want in enumerate(wants):
            if want.size_bytes == 0:
                raws[number] = np.empty(0, np.uint8)
            else:
                by_tier.setdefault(want.segment.tier, []).append(number)
        for name, numbers in by_tier.items():
            tier = self._tiers.get(name)
            if tier is None:
                raise PayloadNotFoundError(
                    f"{key} lies in {name}, which this process does not reach",
                    partition_id=key.partition_id, columns=[], tier=name,
                )  # fmt: skip
            asked: list[Want] = [wants[number] for number in numbers]
            for number, raw in zip(numbers, tier.read(key, asked, copy=copy), strict=True):
                raws[number] = raw
        ordered = [raws[number] for number in range(len(runs))]
        for run, want, raw in zip(runs, wants, ordered, strict=True):
            tier = self._tiers.get(want.segment.tier)
            if tier is None or not tier.is_trusted(want.size_bytes):
                reading.verify(key, run, raw)
        return ordered


class _Draft:
    """A segment that is being written."""

    def __init__(self, blocks: list[NewBlock], size_bytes: int) -> None:
        self.segment_id = uuid.uuid4().hex
        self.blocks = blocks
        self.size_bytes = size_bytes

    @classmethod
    def of(cls, key: Key, planned: Sequence[NewBlock]) -> _Draft:
        return cls(*writing.place_blocks(planned))


__all__ = ["DEFAULT_QUOTA_BYTES", "JOB", "PayloadStore"]
