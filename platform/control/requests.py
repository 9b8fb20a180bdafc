"""Requests that come again: a client sends again what it had no answer to, and the broker delivers
again what its worker did not acknowledge. What changes something has one effect and one answer.

    vla:answered:<tenant>:<token>    string   the answer, for as long as a request may come again

An effect that began and has no answer yet, because its worker died or is at it now, is found by a
name that follows from the request: `token_of`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

ANSWERED_S = 600
"""Longer than clients wait and brokers remember."""


def token_of(tenant: str, request_id: str) -> str:
    """16 hexadecimal digits that nobody else's request leads to; part of an id or a key."""
    return hashlib.sha256(f"{tenant}\0{request_id}".encode()).hexdigest()[:16]


def once(client: Any, tenant: str, request_id: str, change: Callable[[], Any]) -> Any:
    """What `change` returns, or returned when this request came before. What it raises is not kept:
    the same request may be tried again."""
    key = f"vla:answered:{tenant}:{token_of(tenant, request_id)}"
    known = client.get(key)
    if known is not None:
        return json.loads(known)
    answer = change()
    client.set(key, json.dumps(answer, default=str), ex=ANSWERED_S)
    return answer
