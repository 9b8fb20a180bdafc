"""What producers put into a partition and what consumers get out: rows are samples, columns fields.

A column is one of three kinds. Arrays are read-only where they come out, because they may be views
of memory that other processes read too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import numpy as np

from vla_storage.tensors import Array

PAYLOAD_VERSION = 2


class Kind(StrEnum):
    """How the rows of a column lie together."""

    DENSE = "dense"
    """Rows of one shape, back to back: one array with leading B."""
    RAGGED = "ragged"
    """Rows of different shapes and one dtype, unpadded: a list of arrays."""
    FRAMES = "frames"
    """Rows that show frames; every frame of the partition is stored once, by its content."""


@dataclass(frozen=True)
class Frames:
    """A column of frames to put: for each row the frames it shows, N of them, N may differ.

    Shape: (B, N, H, W, C), or B rows of N arrays (H, W, C).
    """

    rows: Array | Sequence[Sequence[Array] | Array]


@dataclass(frozen=True)
class FrameColumn:
    """A column of frames as it was got: which row shows which frames, and each frame once."""

    digests: tuple[tuple[str, ...], ...]  # per row, XXH3-128 of the pixels, hex
    frames: Mapping[str, Array]  # by digest; Shape: (H, W, C)

    def __len__(self) -> int:
        return len(self.digests)

    def row(self, index: int) -> list[Array]:
        """The frames of one row, without a copy."""
        return [self.frames[digest] for digest in self.digests[index]]

    def stack(self) -> Array:
        """One copied array where every row shows equally many frames of one shape.

        Shape: (B, N, H, W, C). Raises `ValueError` otherwise.
        """
        return np.stack([np.stack(self.row(index)) for index in range(len(self))])


ColumnData: TypeAlias = Array | Sequence[Array] | Frames
"""What `put` takes: an array with leading B, B arrays of one dtype, or frames."""
Column: TypeAlias = Array | list[Array] | FrameColumn
"""What `get` gives, by kind."""


@dataclass(frozen=True, kw_only=True)
class ColumnInfo:
    """One column without its data: enough to filter, pack and assign rows to ranks."""

    tenant_id: str
    partition_id: str
    name: str
    kind: Kind
    dtype: str
    rows: tuple[int, ...]  # ascending
    shapes: tuple[tuple[int, ...], ...]  # of each row; (N,) frames for `Kind.FRAMES`
    digests: tuple[str, ...]  # of each row's bytes, bound to tenant and partition, hex
    size_bytes: int  # without the frames that a row shows
    tiers: tuple[str, ...]  # where its bytes lie
    num_frames: int = 0  # different frames of the column
    frame_bytes: int = 0  # what they take together
    version: int = PAYLOAD_VERSION

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a dense column with leading B. Raises `ValueError` for rows that differ."""
        shapes = set(self.shapes)
        if len(shapes) != 1:
            raise ValueError(f"the rows of column {self.name} have {len(shapes)} shapes")
        return (len(self.rows), *shapes.pop())
