"""The payload store: the samples of one training job, once, under tenant and partition.

Control messages carry keys and metadata only; the arrays live here until the job ends. A column is
written once. Every stored column carries tenant, partition, name, dtype, shape and digest in front
of its bytes, and readers check all of them: a reply that belongs to somebody else (a pooled
connection one reply behind, redis/redis-py#2624) is never taken for one's own.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vla_storage.errors import PayloadCorruptError, PayloadError
from vla_storage.names import check_id, check_name
from vla_storage.tensors import Array

PAYLOAD_VERSION = 1
_LENGTH = 4  # bytes of the little-endian header length
_KINDS = "biuf"


@dataclass(frozen=True, kw_only=True)
class ColumnInfo:
    """One column, without its data. Shape: leading B, the rows of the partition."""

    tenant_id: str
    partition_id: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str  # BLAKE2b-128 of the bytes, hex
    version: int = PAYLOAD_VERSION

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class PayloadStore(ABC):
    """Thread-safe. Every method may raise `StorageUnavailableError` (retry helps; a full store is
    one: producers pause until consumers have drained it)."""

    @abstractmethod
    def put(
        self, partition_id: str, tenant_id: str, columns: Mapping[str, Array], *, ttl_s: float
    ) -> dict[str, ColumnInfo]:
        """Add columns to a partition and let it expire `ttl_s` from now.

        The same column with the same content again is fine (a retry); other content raises
        `PayloadExistsError`, and the first one stays.
        """

    @abstractmethod
    def get(
        self, partition_id: str, tenant_id: str, columns: Iterable[str] | None = None
    ) -> dict[str, Array]:
        """Writable arrays of the named columns, or of all. Raises `PayloadNotFoundError` where
        the partition or a column is absent, `PayloadCorruptError` where bytes, digest or owner
        do not fit."""

    @abstractmethod
    def metadata(self, partition_id: str, tenant_id: str) -> dict[str, ColumnInfo]:
        """What is stored, without reading it. Empty where there is nothing."""

    @abstractmethod
    def clear(self, partition_id: str, tenant_id: str) -> bool:
        """Delete the whole partition, whatever of it exists; whether there was anything."""

    def close(self) -> None:
        """Release connections."""
        return None


def check_partition(partition_id: str, tenant_id: str) -> tuple[str, str]:
    return check_name("tenant", tenant_id), check_id("partition", partition_id)


def pack(partition_id: str, tenant_id: str, name: str, array: Array) -> tuple[ColumnInfo, bytes]:
    """The column as one value: header length, header, bytes."""
    if array.dtype.kind not in _KINDS:
        raise PayloadError(f"column {name}: {array.dtype} cannot be stored", column=name)
    dense = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    raw = dense.reshape(-1).view(np.uint8).data
    info = ColumnInfo(
        tenant_id=tenant_id,
        partition_id=partition_id,
        name=check_id("column", name),
        dtype=dense.dtype.str,
        shape=dense.shape,
        digest=_digest(raw),
    )
    header = json.dumps(asdict(info), separators=(",", ":")).encode()
    return info, b"".join([len(header).to_bytes(_LENGTH, "little"), header, raw])


def parse_header(value: bytes) -> ColumnInfo:
    """Header of a packed column, or of its first bytes. Raises `PayloadCorruptError`."""
    length = int.from_bytes(value[:_LENGTH], "little")
    try:
        raw: dict[str, Any] = json.loads(value[_LENGTH : _LENGTH + length])
        raw["shape"] = tuple(raw["shape"])
        return ColumnInfo(**raw)
    except (ValueError, TypeError, KeyError) as error:
        raise PayloadCorruptError("the header of a column is unreadable") from error


def unpack(partition_id: str, tenant_id: str, name: str, value: bytes) -> Array:
    """The array, after its owner, size and digest were checked. Raises `PayloadCorruptError`."""
    where = {"tenant_id": tenant_id, "partition_id": partition_id, "column": name}
    info = parse_header(value)
    if (info.tenant_id, info.partition_id, info.name) != (tenant_id, partition_id, name):
        raise PayloadCorruptError(f"column {name}: the reply belongs to another request", **where)
    start = _LENGTH + int.from_bytes(value[:_LENGTH], "little")
    try:
        dtype = np.dtype(info.dtype)
        expected = info.size_bytes
    except (TypeError, ValueError) as error:
        raise PayloadCorruptError(f"column {name}: unknown dtype", **where) from error
    if dtype.kind not in _KINDS or len(value) - start != expected:
        raise PayloadCorruptError(f"column {name} has the wrong number of bytes", **where)
    buffer = bytearray(memoryview(value)[start:])
    if _digest(buffer) != info.digest:
        raise PayloadCorruptError(f"column {name} does not match its digest", **where)
    return np.frombuffer(buffer, dtype).reshape(info.shape)


def _digest(raw: memoryview | bytearray) -> str:
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
