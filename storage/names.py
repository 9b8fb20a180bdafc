"""The alphabet of everything that becomes part of a key: built from checked ids, never decoded."""

from __future__ import annotations

import re

from vla_storage.errors import InvalidKeyError

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_KEY = re.compile(r"[A-Za-z0-9_.=-]+(/[A-Za-z0-9_.=-]+)*")
_MAX_KEY = 1024


def check_name(kind: str, value: str) -> str:
    """A tenant or policy name; raises `InvalidKeyError` naming the `kind`."""
    if not _NAME.fullmatch(value):
        raise InvalidKeyError(
            f"{kind} {value[:80]!r}: use 1 to 63 of a-z, 0-9 and '-', "
            "beginning with a letter or digit",
            kind=kind,
            value=value[:80],
        )
    return value


def check_id(kind: str, value: str) -> str:
    """A workload, partition or column id: one path segment, no `..`."""
    if not _ID.fullmatch(value) or ".." in value:
        raise InvalidKeyError(
            f"{kind} {value[:80]!r}: use 1 to 128 of A-Z, a-z, 0-9, '_', '.' and '-'",
            kind=kind,
            value=value[:80],
        )
    return value


def check_key(key: str) -> str:
    """An object key: segments joined by '/', none of them '.' or '..' (bad-inputs B06)."""
    if (
        len(key) > _MAX_KEY
        or not _KEY.fullmatch(key)
        or any(part in {".", ".."} for part in key.split("/"))
    ):
        raise InvalidKeyError(f"object key {key[:80]!r} is not allowed", kind="key", value=key[:80])
    return key
