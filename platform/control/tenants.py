"""Tenants: a broker user and an object-store user each, that reach the tenant's own things only.

The record lies in S3 (`platform/tenants/<tenant>.json`); the broker's ACL is applied from it again
whenever the control Redis has lost it. Passwords are kept as SHA-256, the form Redis takes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

import redis

from vla_platform.broker import ingress_queue
from vla_platform.errors import TenantError
from vla_platform.specs import check_name
from vla_storage.errors import ObjectExistsError, ObjectNotFoundError
from vla_storage.objects import ObjectStore, S3Admin

TENANTS_KEY = "vla:tenants"
RESERVED = ("platform", "default", "admin")

_COMMANDS = (
    "-@all +@connection -client +client|setinfo +client|setname +client|id +ping +info "
    "+lpush +llen +brpop +blpop +lrange +sadd +smembers +get +hget +hgetall +hmget "
    "+exists +type +ttl +xread +xrange +xrevrange +xlen +zrange +zrevrange "
    "+multi +exec +watch +unwatch"
)
_PAYLOAD_COMMANDS = (
    "-@all +@connection -client +client|setinfo +client|setname +client|id +ping "
    "+xadd +xlen +blmpop +lmpop +del"
)


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """What the platform keeps of a tenant."""

    tenant_id: str
    password_sha256: str
    version: int = 1


def acl_rules(tenant: Tenant) -> list[str]:
    """The broker's rules: write one ingress queue, read the own keys, pop the own replies.

    Exact keys and a colon after the tenant keep `a` out of `ab` (bad-inputs B05).
    """
    name = tenant.tenant_id
    queue = ingress_queue(name)
    return [
        "reset",
        "on",
        f"#{tenant.password_sha256}",
        f"~{queue}",
        f"~{queue}\x06\x16[369]",  # kombu's lists of the lower priorities
        f"~_kombu.binding.{queue}",
        f"%R~vla:t:{name}:*",
        f"~vla:t:{name}:reply:*",
        "resetchannels",
        *_COMMANDS.split(),
    ]


def payload_acl_rules(tenant: Tenant) -> list[str]:
    """The payload Redis's rules: write the own request streams, pop the own answers.

    Streams are `infer:<base model>:<tenant>`, so the end of the name is the tenant; nobody reads a
    stream back, and nobody but the owner writes it.
    """
    name = tenant.tenant_id
    return [
        "reset",
        "on",
        f"#{tenant.password_sha256}",
        f"~infer:*:{name}",
        f"~{name}:infer:*",
        "resetchannels",
        *_PAYLOAD_COMMANDS.split(),
    ]


def apply_payload_acl(client: Any, tenant: Tenant) -> None:
    client.execute_command("ACL", "SETUSER", tenant.tenant_id, *payload_acl_rules(tenant))
    _keep_acls(client)


def apply_acl(client: Any, tenant: Tenant) -> None:
    client.execute_command("ACL", "SETUSER", tenant.tenant_id, *acl_rules(tenant))
    client.sadd(TENANTS_KEY, tenant.tenant_id)
    _keep_acls(client)


def _keep_acls(client: Any) -> None:
    """So that a restarted Redis knows its users at once; one without a file gets them again."""
    with contextlib.suppress(redis.ResponseError):
        client.execute_command("ACL", "SAVE")


def add_tenant(
    name: str, *, client: Any, objects: ObjectStore, iam: S3Admin, redis_url: str,
    s3_endpoint: str | None, bucket: str, payload_url: str,
) -> str:  # fmt: skip
    """Create a tenant; returns the URL that its `Platform(url)` takes. It is shown once.

    Raises `TenantError` for a refused, reserved or existing name.
    """
    try:
        check_name(name)
    except ValueError as error:
        raise TenantError(f"tenant {name[:80]!r}: {error}", tenant=name[:80]) from error
    if name in RESERVED:
        raise TenantError(f"{name!r} is a name of the platform's own", tenant=name)
    password = secrets.token_urlsafe(24)
    tenant = Tenant(tenant_id=name, password_sha256=hashlib.sha256(password.encode()).hexdigest())
    record = json.dumps(asdict(tenant)).encode()
    try:
        objects.put(_record_key(name), record, if_absent=True)
    except ObjectExistsError as error:
        raise TenantError(
            f"tenant {name} exists; `vla tenants remove {name}` first", tenant=name
        ) from error
    access_key, secret_key = iam.create_tenant(name)
    apply_acl(client, tenant)
    with _payload_client(payload_url) as payload:
        apply_payload_acl(payload, tenant)
    parts = urlsplit(redis_url)
    host = f"{name}:{quote(password)}@{parts.hostname}:{parts.port or 6379}"
    query = {"bucket": bucket, "access_key": access_key, "secret_key": secret_key}
    if s3_endpoint:
        query["endpoint"] = s3_endpoint
    payload_parts = urlsplit(payload_url)
    query["payload"] = (
        f"{payload_parts.hostname}:{payload_parts.port or 6379}{payload_parts.path or '/0'}"
    )
    scheme = "vlas" if parts.scheme == "rediss" else "vla"
    return urlunsplit((scheme, host, parts.path or "/0", urlencode(query), ""))


def _payload_client(url: str) -> Any:
    return redis.Redis.from_url(url, socket_timeout=10.0, socket_connect_timeout=5.0)


def remove_tenant(
    name: str, *, client: Any, objects: ObjectStore, iam: S3Admin, payload_url: str
) -> None:
    """Revoke the tenant's access at once. Its objects and records stay for the auditors."""
    if name not in {tenant.tenant_id for tenant in list_tenants(objects)}:
        raise TenantError(f"no tenant {name}", tenant=name)
    client.execute_command("ACL", "DELUSER", name)
    client.srem(TENANTS_KEY, name)
    _keep_acls(client)
    with _payload_client(payload_url) as payload:
        payload.execute_command("ACL", "DELUSER", name)
        _keep_acls(payload)
    iam.delete_tenant(name)
    objects.delete(_record_key(name))


def list_tenants(objects: ObjectStore) -> list[Tenant]:
    """From S3, the truth."""
    found = []
    for info in objects.list("platform/tenants/"):
        try:
            raw: dict[str, Any] = json.loads(objects.get(info.key))
        except ObjectNotFoundError:
            continue  # removed between listing and reading
        found.append(Tenant(**raw))
    return found


def restore_acls(client: Any, objects: ObjectStore, *, payload: Any) -> list[str]:
    """Apply the rules of every tenant that a server does not know. Returns their names."""
    known = set(client.execute_command("ACL", "USERS"))
    known_payload = set(map(_text, payload.execute_command("ACL", "USERS")))
    members = client.smembers(TENANTS_KEY)
    restored = []
    for tenant in list_tenants(objects):
        name = tenant.tenant_id
        if name not in known or name not in members:
            apply_acl(client, tenant)
            restored.append(name)
        if name not in known_payload:
            apply_payload_acl(payload, tenant)
            restored.append(name)
    return sorted(set(restored))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _record_key(name: str) -> str:
    return f"platform/tenants/{name}.json"
