"""Errors from their wire form: what a worker raised, the client raises again."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from vla_platform.errors import PlatformError
from vla_storage.errors import CodedError


def to_error(wire: Mapping[str, Any]) -> CodedError:
    """The typed error again; an unknown code becomes a `PlatformError` that carries it."""
    message, details = str(wire.get("message")), dict(wire.get("details") or {})
    kind = _kinds().get(str(wire.get("code")))
    if kind is None:
        return PlatformError(message, wire_code=wire.get("code"), **details)
    return kind(message, **details)


@functools.cache
def _kinds() -> dict[str, type[CodedError]]:
    found: dict[str, type[CodedError]] = {}
    pending: list[type[CodedError]] = [CodedError]
    while pending:
        kind = pending.pop()
        found.setdefault(kind.code, kind)
        pending.extend(kind.__subclasses__())
    return found
