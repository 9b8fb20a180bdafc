"""The header of a segment: what one `put` wrote, described without its bytes.

A segment's body holds the rows of its columns back to back, each column from a multiple of
`ALIGNMENT` on. The headers of a partition, in order, are all there is to know of it: who owns
it, which rows have which columns, their shapes and digests, and where the bytes lie.

Headers come out of a store that a tenant may write to, so nothing in one is believed before
`decode` has checked it, and no address is taken from it that is not checked against the owner.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from vla_storage.errors import InvalidKeyError, PayloadCorruptError
from vla_storage.names import check_id, check_name
from vla_storage.payloads.columns import PAYLOAD_VERSION, Kind
from vla_storage.tensors import Array

ALIGNMENT = 64
CELL_DIGEST = 16  # hex digits of a row's digest
FRAME_DIGEST = 32  # hex digits of a frame's name
KINDS = "biuf"  # of dtypes: plain numbers
SEGMENT_ID = re.compile(r"[0-9a-f]{32}")
_MAX_RANK = 16

Place = dict[str, Any]
"""Where a body lies: `{"tier": name, ...}`; only the tier reads the rest."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Key:
    """A partition's address. Both parts are in every key, slot and digest."""

    tenant_id: str
    partition_id: str

    @classmethod
    def checked(cls, partition_id: str, tenant_id: str) -> Key:
        """Raises `InvalidKeyError`."""
        return cls(check_name("tenant", tenant_id), check_id("partition", partition_id))

    def __str__(self) -> str:
        return f"{self.tenant_id}/{self.partition_id}"

    @functools.cached_property
    def seed(self) -> int:
        """What binds the digests of rows to their owner: the bytes of another never fit."""
        return int(xxhash.xxh3_64_intdigest(str(self).encode()))

    def cell_digests(self, raw: Array, starts: Sequence[int]) -> str:
        """Those of consecutive rows, concatenated; `starts` as in a block, not from 0 on."""
        data, seed, base = raw.data, self.seed, starts[0]
        return "".join(
            [
                xxhash.xxh3_64_hexdigest(data[begin - base : end - base], seed)
                for begin, end in itertools.pairwise(starts)
            ]
        )

    def text_digest(self, text: bytes) -> bytes:
        return str(xxhash.xxh3_64_hexdigest(text, self.seed)).encode()


def frame_digest(dtype: str, shape: Shape, raw: Array) -> str:
    """A frame's name within its partition: dtype, shape and pixels."""
    state = xxhash.xxh3_128(f"{dtype}{shape}".encode())
    state.update(raw.data)
    return str(state.hexdigest())


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows of one column inside a segment, or the frames that a column of frames shows.

    `ids` are row numbers, or the digests of frames (`is_pool`); `shapes` has one entry where all
    are alike. `digests` concatenates the rows' digests; frames are their own.
    """

    name: str
    kind: Kind
    dtype: str
    ids: Sequence[Any]
    shapes: tuple[Shape, ...]
    offset: int  # of the first row in the body, bytes
    digests: str = ""
    is_pool: bool = False

    @functools.cached_property
    def starts(self) -> Sequence[int]:
        """Bytes from the block's offset to each of the B rows, and to the end."""
        itemsize = self.cell_itemsize
        if len(self.shapes) == 1:
            size = math.prod(self.shapes[0]) * itemsize
            return [size * number for number in range(len(self.ids) + 1)]
        sizes = (math.prod(shape) * itemsize for shape in self.shapes)
        return list(itertools.accumulate(sizes, initial=0))

    @property
    def cell_itemsize(self) -> int:
        # The rows of a column of frames are lists of digests, in raw bytes.
        refers = self.kind is Kind.FRAMES and not self.is_pool
        return FRAME_DIGEST // 2 if refers else np.dtype(self.dtype).itemsize

    @property
    def size_bytes(self) -> int:
        return self.starts[-1]

    def shape(self, index: int) -> Shape:
        return self.shapes[0] if len(self.shapes) == 1 else self.shapes[index]

    def digest(self, index: int) -> str:
        if self.is_pool:
            return str(self.ids[index])
        return self.digests[index * CELL_DIGEST : (index + 1) * CELL_DIGEST]

    def to_json(self) -> dict[str, Any]:
        rows = list(self.ids)
        # A run of numbers is written as its ends.
        is_run = not self.is_pool and all(b - a == 1 for a, b in itertools.pairwise(rows))
        return {
            "name": self.name,
            "kind": self.kind,
            "dtype": self.dtype,
            "ids": {"from": rows[0], "to": rows[-1]} if is_run else rows,
            "shapes": self.shapes,
            "offset": self.offset,
            "digests": self.digests,
            "pool": self.is_pool,
        }


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One put."""

    segment_id: str
    size_bytes: int
    place: Place
    blocks: tuple[Block, ...]

    @property
    def tier(self) -> str:
        return str(self.place.get("tier"))


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def encode(key: Key, segment: Segment) -> bytes:
    header = {
        "version": PAYLOAD_VERSION,
        "tenant": key.tenant_id,
        "partition": key.partition_id,
        "segment": segment.segment_id,
        "size": segment.size_bytes,
        "place": segment.place,
        "blocks": [block.to_json() for block in segment.blocks],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    return key.text_digest(text) + text


@functools.lru_cache(maxsize=512)
def decode(key: Key, header: bytes) -> Segment:
    """The same bytes are checked once: epochs read the same partition again.

    Raises `PayloadCorruptError` for a header that is damaged or belongs to somebody else."""
    where = {"tenant_id": key.tenant_id, "partition_id": key.partition_id}
    digest, text = header[:CELL_DIGEST], header[CELL_DIGEST:]
    if key.text_digest(text) != digest:
        raise PayloadCorruptError(f"{key}: a header is damaged or of another owner", **where)
    try:
        raw = json.loads(text)
        if (raw["tenant"], raw["partition"]) != (key.tenant_id, key.partition_id):
            raise PayloadCorruptError(f"{key}: a header belongs to another partition", **where)
        if raw["version"] != PAYLOAD_VERSION:
            raise PayloadCorruptError(f"{key}: written by another release", **where)
        blocks = tuple(_block(item, int(raw["size"])) for item in raw["blocks"])
        place = raw["place"]
        if not SEGMENT_ID.fullmatch(raw["segment"]) or type(place) is not dict:
            raise ValueError("malformed address")
        return Segment(
            segment_id=raw["segment"], size_bytes=int(raw["size"]), place=place, blocks=blocks
        )
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        InvalidKeyError,
    ) as error:
        raise PayloadCorruptError(f"{key}: a header is unreadable: {error}", **where) from error


def _block(raw: dict[str, Any], size: int) -> Block:
    ids = raw["ids"]
    if isinstance(ids, dict):
        ids = range(int(ids["from"]), int(ids["to"]) + 1)
    shapes = tuple(tuple(shape) for shape in raw["shapes"])
    naturals = all(type(n) is int and n >= 0 for shape in shapes for n in shape)
    if not naturals or len(shapes) not in (1, len(ids)) or max(map(len, shapes)) > _MAX_RANK:
        raise ValueError("malformed shapes")
    block = Block(
        name=check_id("column", raw["name"]),
        kind=Kind(raw["kind"]),
        dtype=str(raw["dtype"]),
        ids=ids,
        shapes=shapes,
        offset=int(raw["offset"]),
        digests=str(raw["digests"]),
        is_pool=bool(raw["pool"]),
    )
    if np.dtype(block.dtype).kind not in KINDS or len(ids) == 0:
        raise ValueError("malformed column")
    if not block.is_pool and len(block.digests) != CELL_DIGEST * len(ids):
        raise ValueError("malformed digests")
    if not all(type(item) is (str if block.is_pool else int) for item in ids[:1]):
        raise ValueError("malformed ids")
    if not 0 <= block.offset <= block.offset + block.size_bytes <= size:
        raise ValueError("a column ends outside the body")
    return block
