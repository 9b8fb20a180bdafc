"""The policy of a get: which ranges of which bodies make up the columns that are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_storage.errors import PayloadCorruptError, PayloadNotFoundError
from vla_storage.payloads.base import Want
from vla_storage.payloads.columns import Column, ColumnInfo, FrameColumn, Kind
from vla_storage.payloads.segments import (
    CELL_DIGEST,
    FRAME_DIGEST,
    Block,
    Key,
    Segment,
    frame_digest,
)
from vla_storage.payloads.writing import cells_of
from vla_storage.tensors import Array

Cell = tuple[Segment, Block, int]


@dataclass(frozen=True)
class Run:
    """Consecutive rows of one block: one range of one body."""

    segment: Segment
    block: Block
    first: int
    last: int

    @property
    def want(self) -> Want:
        begin, end = self.block.starts[self.first], self.block.starts[self.last]
        return Want(segment=self.segment, offset=self.block.offset + begin, size_bytes=end - begin)

    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Of each row."""
        if len(self.block.shapes) == 1:
            return self.block.shapes * (self.last - self.first)
        return self.block.shapes[self.first : self.last]

    def digests(self) -> list[str]:
        """Of each row; not for frames, which have their own."""
        text, size = self.block.digests, CELL_DIGEST
        return [text[at * size : (at + 1) * size] for at in range(self.first, self.last)]

    def cells(self, raw: Array) -> Iterator[tuple[int, Array]]:
        """Index in the block and bytes of each row."""
        starts, base = self.block.starts, self.block.starts[self.first]
        for index in range(self.first, self.last):
            yield index, raw[starts[index] - base : starts[index + 1] - base]


@dataclass(frozen=True)
class ColumnPlan:
    name: str
    kind: Kind
    runs: list[Run]
    num_rows: int


def choose(
    key: Key,
    segments: Sequence[Segment],
    columns: Sequence[str] | None,
    rows: Sequence[int] | None,
) -> list[ColumnPlan]:
    """The runs of each column, in the order of `rows`; all rows without it.

    Raises `PayloadNotFoundError` naming `columns` that lack a row.
    """
    if rows is None and len(segments) == 1:
        plans = _whole(segments[0], columns)
        if plans is not None:
            return plans
    known = names_of(segments)
    names = known if columns is None else list(dict.fromkeys(columns))
    cells = {name: cells_of(segments, name) for name in names}
    if rows is None:
        wanted = sorted({row for found in cells.values() for row in found})
    else:
        wanted = list(rows)
    absent = [
        name for name in names if name not in known or any(row not in cells[name] for row in wanted)
    ]
    if absent or not names:
        raise PayloadNotFoundError(
            f"partition {key.partition_id} has no {', '.join(absent) or 'columns'}"
            + ("" if rows is None else f" for {len(wanted)} rows"),
            partition_id=key.partition_id,
            columns=absent,
        )
    return [_column(name, [cells[name][row] for row in wanted], cells[name]) for name in names]


def _whole(segment: Segment, columns: Sequence[str] | None) -> list[ColumnPlan] | None:
    """The usual case, without a look at each row: one put, all of its rows, in ascending order."""
    blocks = {block.name: block for block in segment.blocks if not block.is_pool}
    chosen = list(blocks) if columns is None else list(dict.fromkeys(columns))
    if not chosen or not blocks.keys() >= set(chosen):
        return None
    ids = blocks[chosen[0]].ids
    if not isinstance(ids, range) or any(blocks[name].ids != ids for name in chosen):
        return None
    return [
        ColumnPlan(name, blocks[name].kind, [Run(segment, blocks[name], 0, len(ids))], len(ids))
        for name in chosen
    ]


def frame_runs(key: Key, segments: Sequence[Segment], name: str, digests: set[str]) -> list[Run]:
    """Where the frames with these digests lie. Raises `PayloadCorruptError` for a missing one."""
    pool = cells_of(segments, name, is_pool=True)
    missing = digests - pool.keys()
    if missing:
        raise PayloadCorruptError(
            f"column {name} shows frames that are not stored",
            partition_id=key.partition_id, tenant_id=key.tenant_id, column=name,
        )  # fmt: skip
    return runs_of([cell for digest, cell in pool.items() if digest in digests])


def runs_of(cells: Sequence[Cell]) -> list[Run]:
    runs: list[Run] = []
    first, last = 0, 0
    while last < len(cells):
        segment, block, at = cells[first]
        last += 1
        while last < len(cells) and cells[last][1] is block and cells[last][2] == at + last - first:
            last += 1
        runs.append(Run(segment, block, at, at + last - first))
        first = last
    return runs


def names_of(segments: Sequence[Segment]) -> list[str]:
    """The columns of a partition, in the order they came."""
    return list(dict.fromkeys(b.name for s in segments for b in s.blocks if not b.is_pool))


def verify(key: Key, run: Run, raw: Array) -> None:
    """Raise `PayloadCorruptError` unless every row is what its owner wrote."""
    block = run.block
    fits = raw.size == run.want.size_bytes
    if fits and block.is_pool:
        fits = all(
            frame_digest(block.dtype, block.shape(index), cell) == block.ids[index]
            for index, cell in run.cells(raw)
        )
    elif fits:
        found = key.cell_digests(raw, block.starts[run.first : run.last + 1])
        fits = found == block.digests[run.first * CELL_DIGEST : run.last * CELL_DIGEST]
    if not fits:
        raise PayloadCorruptError(
            f"column {block.name} of {key} does not match its digest",
            tenant_id=key.tenant_id, partition_id=key.partition_id, column=block.name,
        )  # fmt: skip


def assemble(plan: ColumnPlan, raws: Sequence[Array], *, copy: bool) -> Array | list[Array]:
    """The rows of a dense or ragged column from the bytes of its runs."""
    if plan.kind is Kind.DENSE:
        block = plan.runs[0].block if plan.runs else None
        if block is None:
            return np.empty(0)
        dtype, shape = np.dtype(block.dtype), block.shapes[0]
        if len(raws) == 1:
            dense = raws[0].view(dtype).reshape(plan.num_rows, *shape)
            return dense.copy() if copy and not dense.flags.writeable else _frozen(dense, copy)
        joined = np.concatenate(list(raws)).view(dtype).reshape(plan.num_rows, *shape)
        return _frozen(joined, copy)
    found: list[Array] = []
    for run, raw in zip(plan.runs, raws, strict=True):
        dtype = np.dtype(run.block.dtype)
        for index, cell in run.cells(raw):
            array = cell.view(dtype).reshape(run.block.shape(index))
            found.append(array.copy() if copy and not array.flags.writeable else array)
    return found if copy else [_frozen(array, copy) for array in found]


def references(plan: ColumnPlan, raws: Sequence[Array]) -> tuple[tuple[str, ...], ...]:
    """The digests of the frames that each row of a column of frames shows."""
    rows = []
    for run, raw in zip(plan.runs, raws, strict=True):
        for _, cell in run.cells(raw):
            text = cell.tobytes().hex()
            rows.append(
                tuple(text[at : at + FRAME_DIGEST] for at in range(0, len(text), FRAME_DIGEST))
            )
    return tuple(rows)


def frame_column(
    rows: tuple[tuple[str, ...], ...], runs: Sequence[Run], raws: Sequence[Array], *, copy: bool
) -> FrameColumn:
    frames: dict[str, Array] = {}
    for run, raw in zip(runs, raws, strict=True):
        dtype = np.dtype(run.block.dtype)
        for index, cell in run.cells(raw):
            frame = cell.view(dtype).reshape(run.block.shape(index))
            if copy and not frame.flags.writeable:
                frame = frame.copy()
            frames[str(run.block.ids[index])] = _frozen(frame, copy)
    return FrameColumn(rows, frames)


def describe(
    key: Key, segments: Sequence[Segment], names: Iterable[str] | None = None
) -> dict[str, ColumnInfo]:
    """The named columns, or all, without their data."""
    chosen = names_of(segments) if names is None else names
    return {name: _info(key, segments, name) for name in chosen}


def _info(key: Key, segments: Sequence[Segment], name: str) -> ColumnInfo:
    cells = cells_of(segments, name)
    pool = cells_of(segments, name, is_pool=True)
    rows = sorted(cells)
    ordered = [cells[row] for row in rows]
    block = ordered[0][1]
    runs, pool_runs = runs_of(ordered), runs_of(list(pool.values()))
    return ColumnInfo(
        tenant_id=key.tenant_id,
        partition_id=key.partition_id,
        name=name,
        kind=block.kind,
        dtype=block.dtype,
        rows=tuple(rows),
        shapes=tuple(shape for run in runs for shape in run.shapes()),
        digests=tuple(digest for run in runs for digest in run.digests()),
        size_bytes=sum(run.want.size_bytes for run in runs),
        tiers=tuple(sorted({run.segment.tier for run in (*runs, *pool_runs)})),
        num_frames=len(pool),
        frame_bytes=sum(run.want.size_bytes for run in pool_runs),
    )


def _column(name: str, cells: list[Cell], known: dict[Any, Cell]) -> ColumnPlan:
    kind = next(iter(known.values()))[1].kind
    return ColumnPlan(name, kind, runs_of(cells), len(cells))


def _frozen(array: Array, copy: bool) -> Array:
    if not copy and array.flags.writeable:
        array.flags.writeable = False
    return array


__all__ = [
    "Column",
    "ColumnPlan",
    "Run",
    "assemble",
    "choose",
    "describe",
    "frame_column",
    "frame_runs",
    "names_of",
    "references",
    "runs_of",
    "verify",
]
