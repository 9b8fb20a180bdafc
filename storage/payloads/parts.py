"""How a body is cut into parts that are stored apart: strings on Redis, objects in S3.

Cuts lie at the borders of columns, so that a whole column is one part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from vla_storage.errors import PayloadCorruptError
from vla_storage.payloads.base import Piece, Spans
from vla_storage.payloads.segments import Key, Place, Segment
from vla_storage.tensors import Array

_SMALL_BYTES = 64 << 10  # columns below share a part
_MOST_BYTES = 256 << 20  # of one part; Redis takes 512 MB
_MOST_PARTS = 10_000


def cuts(spans: Spans) -> list[int]:
    """The first byte of each part, and the end of the last."""
    borders = [0]
    for offset, size in spans:
        if size >= _SMALL_BYTES and offset > borders[-1]:
            borders.append(offset)
        while offset + size - borders[-1] > _MOST_BYTES:
            borders.append(borders[-1] + _MOST_BYTES)
    end = max(offset + size for offset, size in spans)
    return [*borders, end] if end > borders[-1] else borders


def ranges_of(parts: list[int], begin: int, end: int) -> Iterator[tuple[int, int, int, bool]]:
    """Number, first and last byte, and whether it is all, of each part under a range."""
    for number, (first, last) in enumerate(itertools.pairwise(parts)):
        low, high = max(begin, first), min(end, last)
        if low < high:
            yield number, low - first, high - first, (low, high) == (first, last)


def contiguous(pieces: Iterator[Piece], parts: list[int]) -> Iterator[tuple[int, Array]]:
    """A body without gaps: `(part, bytes)` in order, cut at the parts' borders; each piece is
    hashed after it was handed out."""
    part, position = 0, 0
    for piece in pieces:
        chunks = [piece.data]
        if piece.offset > position:
            chunks.insert(0, np.zeros(piece.offset - position, np.uint8))
        for chunk in chunks:
            rest = chunk
            while rest.size:
                while position >= parts[part + 1]:
                    part += 1
                taken = rest[: parts[part + 1] - position]
                yield part, taken
                position, rest = position + taken.size, rest[taken.size :]
        piece.digest()


def checked_cuts(key: Key, segment: Segment) -> list[int]:
    parts = segment.place.get("cuts")
    if (
        not isinstance(parts, list)
        or not all(type(part) is int for part in parts)
        or parts != sorted(parts)
        or parts[0] != 0
        or parts[-1] != segment.size_bytes
    ):
        raise PayloadCorruptError(
            f"{key}: a header names no place",
            tenant_id=key.tenant_id, partition_id=key.partition_id,
        )  # fmt: skip
    return parts


def num_parts(place: Place) -> int:
    """How many parts a place names; believed only as far as it could be true."""
    parts = place.get("cuts")
    return min(len(parts) - 1, _MOST_PARTS) if isinstance(parts, list) and parts else 0
