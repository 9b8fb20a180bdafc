"""The one byte form of session calls and answers: msgpack, arrays as raw bytes, never pickle.

Child processes, a tenant's remote sessions and external simulators all speak it. A message is a
map. Arrays are extension type 1: one byte length of a header, the header `[dtype, shape]`, the
bytes in C order, little-endian. Dataclasses are maps with their type under `t`.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from vla_platform.envs.base import EnvironmentInfo, Observation
from vla_platform.envs.sessions import EnvironmentRequest, Outcome
from vla_platform.errors import DataError, to_error
from vla_storage.errors import CodedError

WIRE_VERSION = 1
MAX_BYTES = 64 << 20
_ARRAY = 1
_KINDS = "biuf"
_DTYPE = re.compile(rf"[<>|=]?[{_KINDS}](1|2|4|8)")  # numpy's own parser takes a language
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


def encode(message: dict[str, Any]) -> bytes:
    """Plain values, arrays, and the dataclasses of a session, as bytes."""
    packed: bytes = msgpack.packb(message, default=_pack, use_bin_type=True)
    return packed


def decode(raw: bytes) -> dict[str, Any]:
    """The inverse of `encode`; arrays are read-only. Raises `DataError` for anything else."""
    if len(raw) > MAX_BYTES:
        raise DataError(f"a message of {len(raw)} bytes; at most {MAX_BYTES} are taken")
    try:
        message = msgpack.unpackb(
            raw, ext_hook=_unpack_array, object_hook=_unpack, raw=False, strict_map_key=True
        )
    except (*_MALFORMED, msgpack.UnpackException) as error:
        raise DataError(f"not a message of version {WIRE_VERSION}: {error}") from error
    if not isinstance(message, dict):
        raise DataError("a message is a map")
    return message


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _pack_array(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Outcome):
        return {"t": "outcome", **vars(value), "frames": list(value.frames)}
    if isinstance(value, Observation):
        return {"t": "observation", **vars(value), "images": dict(value.images)}
    if isinstance(value, EnvironmentInfo):
        return {
            "t": "info",
            **vars(value),
            # A list: the order of cameras is part of the contract.
            "cameras": [[name, list(size)] for name, size in value.cameras.items()],
        }
    if isinstance(value, EnvironmentRequest):
        return {"t": "request", **vars(value), "options": dict(value.options)}
    if isinstance(value, CodedError):
        return {"t": "error", **value.to_dict()}
    return str(value)  # details of errors may hold paths and the like


def _unpack(found: dict[str, Any]) -> Any:
    kind = found.pop("t", None)
    if kind is None:
        return found
    if kind == "observation":
        return Observation(**found)
    if kind == "outcome":
        return Outcome(**{**found, "frames": tuple(found["frames"])})
    if kind == "info":
        cameras = {name: (size[0], size[1]) for name, size in found.pop("cameras")}
        for key in ("state_names", "action_names"):
            found[key] = tuple(found[key])
        return EnvironmentInfo(cameras=cameras, **found)
    if kind == "request":
        return EnvironmentRequest(**found)
    if kind == "error":
        return to_error(found)
    raise ValueError(f"unknown type {str(kind)[:40]!r}")


def _pack_array(array: npt.NDArray[Any]) -> msgpack.ExtType:
    if array.dtype.kind not in _KINDS:
        raise TypeError(f"arrays of {array.dtype} cannot be sent")
    dense = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    header: bytes = msgpack.packb([dense.dtype.str, list(dense.shape)])
    return msgpack.ExtType(_ARRAY, bytes([len(header)]) + header + dense.tobytes())


def _unpack_array(code: int, raw: bytes) -> npt.NDArray[Any]:
    if code != _ARRAY:
        raise ValueError(f"unknown extension type {code}")
    start = 1 + raw[0]
    name, shape = msgpack.unpackb(raw[1:start])
    if not _DTYPE.fullmatch(str(name)):
        raise ValueError("not an array that is taken")
    dtype = np.dtype(str(name))
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("not an array that is taken")
    if len(raw) - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("an array has the wrong number of bytes")
    return np.frombuffer(raw, dtype, offset=start).reshape(shape)
