"""The policy of a put: which rows are new, where they lie in the body, what may not change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_storage.errors import PayloadError, PayloadExistsError
from vla_storage.names import check_id
from vla_storage.payloads.columns import ColumnData, Frames, Kind
from vla_storage.payloads.segments import KINDS, Block, Key, Segment, Shape, aligned, frame_digest
from vla_storage.tensors import Array

_PIECE_BYTES = 1 << 20  # stays in a core's cache between being copied and being hashed


@dataclass(frozen=True)
class NewBlock:
    """A block with its bytes. `block.digests` is empty until they are written."""

    block: Block
    cells: Sequence[Array] | Array  # per row, or all rows of one shape; C order, little-endian

    def bytes_of(self, first: int, last: int) -> Array:
        """The rows from `first` until `last`, flat. Ragged blocks are taken one at a time."""
        cell = self.cells[first:last] if isinstance(self.cells, np.ndarray) else self.cells[first]
        return cell.reshape(-1).view(np.uint8)

    def take(self, chosen: list[int]) -> NewBlock:
        block = self.block
        shapes = block.shapes
        if len(shapes) > 1:
            shapes = tuple(shapes[index] for index in chosen)
        cells: Sequence[Array] | Array
        if isinstance(self.cells, np.ndarray):
            cells = np.ascontiguousarray(self.cells[chosen])
        else:
            cells = [self.cells[index] for index in chosen]
        ids = [block.ids[index] for index in chosen]
        return NewBlock(replace(block, ids=ids, shapes=shapes), cells)


def plan(columns: Mapping[str, ColumnData], rows: Sequence[int] | None) -> list[NewBlock]:
    """The columns as blocks. Raises `PayloadError` for what cannot be stored."""
    ids = None if rows is None else check_rows(rows)
    planned: list[NewBlock] = []
    for name, data in columns.items():
        check_id("column", name)
        values = data.rows if isinstance(data, Frames) else data
        if isinstance(values, np.ndarray) and values.ndim == 0:
            raise PayloadError(f"column {name} has no rows", column=name)
        if ids is None:
            ids = list(range(len(values)))
        if len(values) != len(ids) or not ids:
            raise PayloadError(
                f"column {name} has {len(values)} rows, expected {len(ids)}, at least one",
                column=name,
            )
        if isinstance(data, Frames):
            planned += _frames(name, data, ids)
        elif isinstance(data, np.ndarray):
            planned.append(_dense(name, Kind.DENSE, data, ids))
        else:
            planned.append(_ragged(name, list(data), ids))
    if not planned:
        raise PayloadError("there are no columns to put")
    return planned


def check_columns(columns: Mapping[str, ColumnData]) -> None:
    """Raise `PayloadError` for columns that no `put` takes, whoever's partition it is."""
    plan(columns, None)


def check_rows(rows: Sequence[int]) -> list[int]:
    """Different numbers, none negative. Raises `PayloadError`."""
    found = [int(row) for row in rows]
    if len(set(found)) != len(found) or any(not 0 <= row < 2**53 for row in found):
        raise PayloadError("row numbers are different and not negative")
    return found


def place_blocks(planned: Sequence[NewBlock]) -> tuple[list[NewBlock], int]:
    """Give every block its offset; returns them with the size of the body in bytes.

    Small blocks come first: they then share a part of the body that is cheap to read.
    """
    ordered = sorted(planned, key=lambda new: new.block.size_bytes)
    placed, end = [], 0
    for new in ordered:
        block = replace(new.block, offset=aligned(end))
        placed.append(NewBlock(block, new.cells))
        end = block.offset + block.size_bytes
    return placed, end


@dataclass
class BodyPiece:
    """See `Piece`; `digests` of its rows is filled by `digest`."""

    offset: int
    data: Array
    key: Key
    block: int
    starts: Sequence[int] | None  # of its rows; None: frames are their own digests
    digests: str = ""

    def digest(self) -> None:
        if self.starts is not None:
            self.digests = self.key.cell_digests(self.data, self.starts)


def pieces(key: Key, placed: Sequence[NewBlock]) -> Iterator[BodyPiece]:
    """The body, piece by piece."""
    for number, new in enumerate(placed):
        block = new.block
        starts = block.starts
        first = 0
        while first < len(block.ids):
            last = first + 1
            if isinstance(new.cells, np.ndarray):
                rows = _PIECE_BYTES // max(1, starts[last] - starts[first])
                last = min(first + max(1, rows), len(block.ids))
            yield BodyPiece(
                offset=block.offset + starts[first],
                data=new.bytes_of(first, last),
                key=key,
                block=number,
                starts=None if block.is_pool else starts[first : last + 1],
            )
            first = last


def cells_of(
    segments: Sequence[Segment], name: str, *, is_pool: bool = False
) -> dict[Any, tuple[Segment, Block, int]]:
    """Where each row of a column lies; what was written first counts."""
    found: dict[Any, tuple[Segment, Block, int]] = {}
    for segment in segments:
        for block in segment.blocks:
            if block.name == name and block.is_pool == is_pool:
                for index, row in enumerate(block.ids):
                    found.setdefault(row, (segment, block, index))
    return found


def remaining(key: Key, planned: Sequence[NewBlock], segments: Sequence[Segment]) -> list[NewBlock]:
    """What of it is not stored yet.

    Raises `PayloadExistsError` where a row holds other content, `PayloadError` where a column
    would become one of two kinds, dtypes or row shapes.
    """
    if not segments:
        return list(planned)
    left = []
    for new in planned:
        block = new.block
        known = cells_of(segments, block.name, is_pool=block.is_pool)
        if known:
            _check_same_column(key, block, next(iter(known.values()))[1])
        absent = [index for index, row in enumerate(block.ids) if row not in known]
        if not block.is_pool:
            for index, row in enumerate(block.ids):
                if row in known:
                    _, other, at = known[row]
                    raw = new.bytes_of(index, index + 1)
                    digest = key.cell_digests(raw, [0, raw.size])
                    if other.digest(at) != digest or other.shape(at) != block.shape(index):
                        raise PayloadExistsError(
                            f"row {row} of column {block.name} holds other content",
                            column=block.name, row=row, partition_id=key.partition_id,
                        )  # fmt: skip
        if len(absent) == len(block.ids):
            left.append(new)
        elif absent:
            left.append(new.take(absent))
    return left


def _check_same_column(key: Key, block: Block, other: Block) -> None:
    differs = block.kind != other.kind or (block.dtype != other.dtype and not block.is_pool)
    if not differs and block.kind is Kind.DENSE:
        differs = block.shapes[0] != other.shapes[0]
    if differs:
        raise PayloadExistsError(
            f"column {block.name} is {other.kind}, {other.dtype}, rows of {other.shapes[0]}",
            column=block.name,
            partition_id=key.partition_id,
        )


def _plain(name: str, array: Array) -> Array:
    if not isinstance(array, np.ndarray) or array.dtype.kind not in KINDS:
        found = getattr(array, "dtype", type(array).__name__)
        raise PayloadError(f"column {name}: {found} cannot be stored", column=name)
    dense: Array = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    return dense


def _dense(name: str, kind: Kind, array: Array, ids: list[int]) -> NewBlock:
    plain = _plain(name, array)
    block = Block(
        name=name, kind=kind, dtype=plain.dtype.str, ids=ids, shapes=(plain.shape[1:],), offset=0
    )
    return NewBlock(block, plain)


def _ragged(name: str, arrays: list[Any], ids: list[int]) -> NewBlock:
    cells = [_plain(name, array) for array in arrays]
    if len({cell.dtype for cell in cells}) > 1:
        raise PayloadError(f"column {name}: the rows have several dtypes", column=name)
    shapes: tuple[Shape, ...] = tuple(cell.shape for cell in cells)
    block = Block(
        name=name, kind=Kind.RAGGED, dtype=cells[0].dtype.str, ids=ids, shapes=shapes, offset=0
    )
    return NewBlock(block, cells)


def _frames(name: str, data: Frames, ids: list[int]) -> list[NewBlock]:
    unique: dict[str, Array] = {}
    refs: list[Array] = []
    for row in data.rows:
        shown = []
        for frame in row:
            plain = _plain(name, frame)
            digest = frame_digest(plain.dtype.str, plain.shape, plain.reshape(-1).view(np.uint8))
            unique.setdefault(digest, plain)
            shown.append(digest)
        refs.append(np.frombuffer(bytes.fromhex("".join(shown)), np.uint8))
    dtypes = {frame.dtype.str for frame in unique.values()} or {"|u1"}
    if len(dtypes) > 1:
        raise PayloadError(f"column {name}: the frames have several dtypes", column=name)
    dtype = dtypes.pop()
    block = Block(
        name=name, kind=Kind.FRAMES, dtype=dtype, ids=ids, offset=0,
        shapes=tuple((ref.size // 16,) for ref in refs),
    )  # fmt: skip
    if not unique:
        return [NewBlock(block, refs)]
    pool = replace(
        block,
        ids=list(unique),
        shapes=tuple(frame.shape for frame in unique.values()),
        is_pool=True,
    )
    return [NewBlock(block, refs), NewBlock(pool, list(unique.values()))]
