"""Tensors as bytes: the safetensors format, written plainly and read strictly.

The reader accepts less than the library does: no duplicate names, no gaps or overlaps, no
trailing bytes, a bounded header, and sizes checked before anything is allocated. All tensors of
one file alias one buffer. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from vla_storage.errors import TensorFormatError

__all__ = ["MAX_HEADER_BYTES", "MAX_TENSORS", "Array", "check_header", "decode", "encode", "write"]

Array = NDArray[Any]

MAX_HEADER_BYTES = 16 << 20  # far below the library's 100 MB, above which it refuses to read
MAX_TENSORS = 100_000
_MAX_RANK = 16
_LENGTH = 8  # bytes of the little-endian header length
_NAME = re.compile(r"[!-~]{1,512}")
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def encode(tensors: Mapping[str, Array]) -> bytes:
    """The file as bytes: equal tensors give equal bytes. Raises `TensorFormatError`."""
    header, ordered = _plan(tensors)
    return b"".join([header, *(_raw(array) for array in ordered)])


def write(tensors: Mapping[str, Array], file: IO[bytes]) -> int:
    """Stream the same bytes into an open file without a second copy; returns the size."""
    header, ordered = _plan(tensors)
    file.write(header)
    for array in ordered:
        file.write(_raw(array))
    return len(header) + sum(array.nbytes for array in ordered)


def decode(
    data: bytes | bytearray, *, max_bytes: int | None = None, require_finite: bool = False
) -> dict[str, Array]:
    """Writable tensors that alias one buffer (the given one where it is a `bytearray`).

    Raises `TensorFormatError` with `details["reason"]`: `too_large`, `truncated`,
    `trailing_bytes`, `header_too_large`, `header_invalid`, `duplicate_key`, `too_many_tensors`,
    `dtype`, `shape`, `offsets`, and `not_finite` where `require_finite` finds NaN or infinity.
    """
    if max_bytes is not None and len(data) > max_bytes:
        raise _refused("too_large", f"{len(data)} bytes, at most {max_bytes} are allowed")
    start, entries = check_header(bytes(data[: _LENGTH + MAX_HEADER_BYTES]), len(data))
    buffer = data if isinstance(data, bytearray) else bytearray(data)
    tensors: dict[str, Array] = {}
    for name, (dtype, shape, offset) in entries.items():
        count = math.prod(shape)
        flat = np.frombuffer(buffer, dtype, count, start + offset) if count else np.empty(0, dtype)
        tensors[name] = flat.reshape(shape)
        if require_finite and dtype.kind == "f" and not np.isfinite(tensors[name]).all():
            raise _refused("not_finite", f"tensor {name} holds NaN or infinity", tensor=name)
    return tensors


def check_header(
    head: bytes, size_bytes: int
) -> tuple[int, dict[str, tuple[np.dtype[Any], tuple[int, ...], int]]]:
    """Where the data begin, and dtype, shape and offset of each tensor, without reading data.

    `head` holds at least the header of a file of `size_bytes`. Raises as `decode` does.
    """
    if len(head) < _LENGTH:
        raise _refused("truncated", "no header length")
    length = int.from_bytes(head[:_LENGTH], "little")
    if length > MAX_HEADER_BYTES:
        raise _refused("header_too_large", f"header of {length} bytes")
    start = _LENGTH + length
    if start > size_bytes or start > len(head):
        raise _refused("truncated", "the header ends after the file")
    header = _parse(head[_LENGTH:start])
    if len(header) > MAX_TENSORS:
        raise _refused("too_many_tensors", f"{len(header)} tensors")
    entries = {name: _entry(name, raw) for name, raw in header.items()}
    expected = 0
    for name, (dtype, shape, begin, end) in sorted(
        entries.items(), key=lambda item: (item[1][2], item[1][3])
    ):
        if begin != expected or end - begin != math.prod(shape) * dtype.itemsize:
            raise _refused("offsets", f"tensor {name}: overlap, gap or wrong length", tensor=name)
        expected = end
    if start + expected > size_bytes:
        raise _refused("truncated", f"{start + expected - size_bytes} bytes are missing")
    if start + expected < size_bytes:
        raise _refused("trailing_bytes", f"{size_bytes - start - expected} bytes too many")
    return start, {name: (dtype, shape, at) for name, (dtype, shape, at, _) in entries.items()}


def _plan(tensors: Mapping[str, Array]) -> tuple[bytes, list[Array]]:
    if len(tensors) > MAX_TENSORS:
        raise _refused(
            "too_many_tensors",
            f"{len(tensors)} tensors, at most {MAX_TENSORS}: pack scalars into one tensor",
        )
    header: dict[str, Any] = {}
    ordered: list[Array] = []
    offset = 0
    # Widest dtype first, as the library does: every tensor then starts aligned.
    for name in sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, key)):
        array = tensors[name]
        dtype = array.dtype.newbyteorder("<")
        if not _NAME.fullmatch(name) or name == "__metadata__":
            raise _refused("header_invalid", f"tensor name {name[:80]!r}")
        if dtype not in _NAMES:
            raise _refused("dtype", f"tensor {name}: {array.dtype} is not stored", tensor=name)
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        ordered.append(np.asarray(array, dtype=dtype, order="C"))
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    if len(text) > MAX_HEADER_BYTES:
        raise _refused("header_too_large", f"header of {len(text)} bytes")
    return len(text).to_bytes(_LENGTH, "little") + text, ordered


def _raw(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _parse(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise _refused("duplicate_key", "a name occurs twice in the header")
        return found

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _refused("header_invalid", "the header is not JSON") from error
    if not isinstance(header, dict):
        raise _refused("header_invalid", "the header is not an object")
    header.pop("__metadata__", None)
    return header


def _entry(name: str, raw: Any) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise _refused("header_invalid", f"tensor {name}: malformed entry", tensor=name)
    shape, offsets = raw["shape"], raw["data_offsets"]
    if not _naturals(shape) or len(shape) > _MAX_RANK:
        raise _refused("shape", f"tensor {name}: malformed shape", tensor=name)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise _refused("offsets", f"tensor {name}: malformed offsets", tensor=name)
    if not isinstance(raw["dtype"], str) or raw["dtype"] not in _DTYPES:
        raise _refused("dtype", f"tensor {name}: dtype {raw['dtype']!r}", tensor=name)
    return _DTYPES[raw["dtype"]], tuple(shape), offsets[0], offsets[1]


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _refused(reason: str, problem: str, **details: Any) -> TensorFormatError:
    return TensorFormatError(f"not a valid tensor file: {problem}", reason=reason, **details)
