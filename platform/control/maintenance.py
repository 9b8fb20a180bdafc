"""Maintenance: nothing new is taken, what runs goes on, and tenants are told why."""

from __future__ import annotations

from typing import Any

from vla_platform.errors import UnavailableError

_KEY = "vla:maintenance"


def begin(client: Any, reason: str) -> None:
    client.set(_KEY, reason[:500])


def end(client: Any) -> None:
    client.delete(_KEY)


def maintenance_reason(client: Any) -> str:
    """Empty: there is none."""
    return client.get(_KEY) or ""


def refuse_in_maintenance(client: Any) -> None:
    """Raises `UnavailableError` with the operator's reason."""
    reason = maintenance_reason(client)
    if reason:
        raise UnavailableError(f"the platform is in maintenance: {reason}", maintenance=reason)
