"""How a tenant's session calls reach a host: lists on the payload Redis, one message each.

A tenant writes to `<tenant>:env:to:<host>` and pops `<tenant>:env:from:<session>`; its user on that
server reaches no other keys, so the list that a message came by is who sent it. The platform alone
writes `vla:env:open:<host>`, where the control worker asks for a new session. Messages are those of
`wire`.

    {"session", "call", "op", "arguments"}  ->  {"call", "result"} or {"call", "error"}
"""

from __future__ import annotations

import json
from typing import Any

from vla_platform.envs.sessions import EnvironmentRequest
from vla_storage.names import check_id, check_name

MAX_CALL_BYTES = 1 << 20
REPLY_TTL_S = 120.0
OPEN_S = 180.0


def to_host(tenant: str, host_id: str) -> str:
    return f"{check_name('tenant', tenant)}:env:to:{check_id('host', host_id)}"


def from_session(tenant: str, session: str) -> str:
    return f"{check_name('tenant', tenant)}:env:from:{check_id('session', session)}"


def open_requests(host_id: str) -> str:
    return f"vla:env:open:{check_id('host', host_id)}"


def acl_rules(tenant: str) -> list[str]:
    """What a tenant's user on the payload Redis needs for its sessions."""
    name = check_name("tenant", tenant)
    return [f"(+rpush ~{name}:env:to:*)", f"(+blpop ~{name}:env:from:*)"]


def request_text(request: EnvironmentRequest) -> str:
    """What the task `ingress.open_environment` takes."""
    fields: dict[str, Any] = {
        "env_id": request.env_id, "options": dict(request.options), "expert": request.expert,
    }  # fmt: skip
    return json.dumps(fields, allow_nan=False)
