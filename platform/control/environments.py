"""Opening a tenant's remote session: validated, assigned to a host, handed over."""

from __future__ import annotations

import redis

from vla_platform.control.environment_hosts import HostTable
from vla_platform.control.requests import ANSWERED_S, token_of
from vla_platform.control.services import Services
from vla_platform.envs import wire
from vla_platform.envs.harnesses import check_request
from vla_platform.envs.remote_protocol import OPEN_S, open_requests
from vla_platform.envs.sessions import EnvironmentRequest
from vla_platform.errors import SpecError, UnavailableError
from vla_platform.specs import load_json, nearest


def open_environment(services: Services, tenant: str, text: str, request_id: str) -> dict[str, str]:
    """Where the tenant's session is; the environment is made meanwhile, and its first answer waits
    under the session's name. The same request has one session.

    Raises `SpecError` for what no host should see, `QuotaError` where the tenant has as many as it
    may, `UnavailableError` where no host has room.
    """
    request = _parse(text)
    harness, _, _ = check_request(request)
    session = token_of(tenant, request_id)
    client = services.ledger.client
    key = f"vla:session:{tenant}:{session}"
    host_id = client.get(key)
    if host_id is None:
        assigned = HostTable(client).assign(
            harness.name, tenant=tenant, limit=services.settings.max_sessions_per_tenant
        )
        is_first = client.set(key, assigned, nx=True, ex=ANSWERED_S)
        host_id = assigned if is_first else client.get(key)
    message = {"tenant": tenant, "session": session, "request": request}
    try:
        with services.payload_clients[0].pipeline() as pipe:
            pipe.rpush(open_requests(host_id), wire.encode(message))
            pipe.pexpire(open_requests(host_id), round(1000 * OPEN_S))
            pipe.execute()
    except redis.RedisError as error:
        raise UnavailableError(f"the payload store does not answer: {error}") from error
    return {"host": host_id, "session": session}


def _parse(text: str) -> EnvironmentRequest:
    raw = load_json(text)
    if not isinstance(raw, dict):
        raise SpecError("an environment is asked for with a map of fields", problems=[])
    known = {"env_id", "options", "expert"}
    for name in set(raw) - known:
        raise SpecError(f"{name[:80]}: unknown field; {nearest(name, known)}", problems=[])
    env_id, options = raw.get("env_id"), raw.get("options", {})
    if not (isinstance(env_id, str) and isinstance(options, dict)):
        raise SpecError("env_id is a text and options are a map", problems=[])
    return EnvironmentRequest(env_id=env_id, options=options, expert=bool(raw.get("expert", False)))
