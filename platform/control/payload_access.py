"""A tenant's access to the payload Redis: its own `<tenant>:payload:` keys, within its quota, and
its own streams of inference requests and environment sessions.

The server keeps nothing: after a restart users, quotas and functions are applied again, from the
records in S3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import redis

from vla_platform.control.tenant_records import TENANTS_KEY, Tenant, list_tenants
from vla_platform.envs import remote_protocol
from vla_storage.objects import ObjectStore
from vla_storage.payloads.redis_index import load_functions, quota_key

# Functions run with the caller's rights, so they change nothing that these keys do not cover.
_COMMANDS = (
    "-@all +@connection -client +client|setinfo +client|setname +client|id +ping +info "
    "+fcall +get +getrange +psetex +unlink +pexpire +pexpireat +exists +pttl +time "
    "+hget +hset +hdel +hexists +hkeys +hgetall +sadd +smembers"
)


def payload_acl_rules(tenant: Tenant) -> list[str]:
    """The colon after the tenant keeps `a` out of `ab` (bad-inputs B05).

    Streams are `infer:<base model>:<tenant>`, so the end of the name is the tenant; nobody reads a
    stream back, and nobody but the owner writes it. What workers read of all tenants at once has
    the commands of its one use: a key of another type would stop them for everybody.
    """
    name = tenant.tenant_id
    return [
        "reset",
        "on",
        f"#{tenant.password_sha256}",
        f"~{name}:payload:*",
        f"%R~{quota_key(name)}",
        "resetchannels",
        *_COMMANDS.split(),
        f"(+xadd +xlen ~infer:*:{name})",
        f"(+blmpop +lmpop +del ~{name}:infer:*)",
        *remote_protocol.acl_rules(name),
    ]


def apply_payload_access(client: Any, tenant: Tenant) -> None:
    client.execute_command("ACL", "SETUSER", tenant.tenant_id, *payload_acl_rules(tenant))
    client.set(quota_key(tenant.tenant_id), tenant.payload_quota_bytes)
    client.sadd(TENANTS_KEY, tenant.tenant_id)
    keep_acls(client)


def remove_payload_access(client: Any, name: str) -> None:
    client.execute_command("ACL", "DELUSER", name)
    client.delete(quota_key(name))
    client.srem(TENANTS_KEY, name)
    keep_acls(client)


def restore_payload_access(
    clients: Iterable[Any], objects: ObjectStore, *, expected: set[str]
) -> list[str]:
    """Bring a payload Redis that was restarted up to date; returns the tenants it had lost.

    `expected` are the tenants that the control Redis knows: where none is missing, S3 is not
    asked.
    """
    restored: set[str] = set()
    for client in clients:
        missing = expected - {_text(name) for name in client.smembers(TENANTS_KEY)}
        if not missing:
            continue
        load_functions(client)
        for tenant in list_tenants(objects):
            if tenant.tenant_id in missing:
                apply_payload_access(client, tenant)
                restored.add(tenant.tenant_id)
    return sorted(restored)


def keep_acls(client: Any) -> None:
    """So that a restarted Redis knows its users at once; one without a file gets them again."""
    with contextlib.suppress(redis.ResponseError):
        client.execute_command("ACL", "SAVE")


def _text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode()
