"""Tenants: a broker user and an object-store user each, that reach the tenant's own things only.

The record lies in S3 (`platform/tenants/<tenant>.json`); the broker's ACL is applied from it again
whenever the control Redis has lost it. Passwords are kept as SHA-256, the form Redis takes.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from vla_platform.broker import ingress_queue
from vla_platform.control.payload_access import (
    apply_payload_access,
    keep_acls,
    remove_payload_access,
)
from vla_platform.control.tenant_records import TENANTS_KEY, Tenant, list_tenants, record_key
from vla_platform.errors import TenantError
from vla_platform.specs import check_name
from vla_storage.errors import ObjectChangedError, ObjectExistsError, ObjectNotFoundError
from vla_storage.objects import ObjectStore, S3Admin
from vla_storage.payloads import DEFAULT_QUOTA_BYTES

RESERVED = ("platform", "default", "admin")

_COMMANDS = (
    "-@all +@connection -client +client|setinfo +client|setname +client|id +ping +info "
    "+multi +exec +unwatch"
)
_READS = (
    "+lrange +llen +smembers +get +hget +hgetall +hmget +exists +type +ttl "
    "+xread +xrange +xrevrange +xlen +zrange +zrevrange"
)


def acl_rules(tenant: Tenant) -> list[str]:
    """The broker's rules: write one ingress queue, read the own keys, pop the own replies.

    Exact keys and a colon after the tenant keep `a` out of `ab` (bad-inputs B05). Each key has the
    commands of its one use: a key of another type than its readers expect would stop them for
    everybody, and what is only read and popped cannot be filled.
    """
    name = tenant.tenant_id
    queue = ingress_queue(name)
    lower = f"{queue}\x06\x16[369]"  # kombu's lists of the lower priorities
    return [
        "reset",
        "on",
        f"#{tenant.password_sha256}",
        "resetchannels",
        *_COMMANDS.split(),
        f"(+lpush +llen +exists +type ~{queue} ~{lower})",
        f"(+sadd +smembers +exists +type ~_kombu.binding.{queue})",
        f"({_READS} %R~vla:t:{name}:*)",
        f"(+brpop +blpop ~vla:t:{name}:reply:*)",
    ]


def apply_acl(client: Any, tenant: Tenant) -> None:
    client.execute_command("ACL", "SETUSER", tenant.tenant_id, *acl_rules(tenant))
    client.sadd(TENANTS_KEY, tenant.tenant_id)
    keep_acls(client)


@dataclass(frozen=True, kw_only=True)
class TenantServers:
    """Where tenants have users, and where their URLs lead."""

    client: Any  # of the control Redis
    objects: ObjectStore
    iam: S3Admin
    redis_url: str
    s3_endpoint: str | None
    bucket: str
    payload_urls: Sequence[str] = ()
    payload_clients: Sequence[Any] = ()


def add_tenant(
    servers: TenantServers, name: str, *, payload_quota_bytes: int = DEFAULT_QUOTA_BYTES
) -> str:
    """Create a tenant; returns the URL that its `Platform(url)` takes. It is shown once.

    Raises `TenantError` for a refused, reserved or existing name.
    """
    try:
        check_name(name)
    except ValueError as error:
        raise TenantError(f"tenant {name[:80]!r}: {error}", tenant=name[:80]) from error
    if name in RESERVED:
        raise TenantError(f"{name!r} is a name of the platform's own", tenant=name)
    _check_free(name, servers)
    password = secrets.token_urlsafe(24)
    tenant = Tenant(
        tenant_id=name,
        password_sha256=hashlib.sha256(password.encode()).hexdigest(),
        payload_quota_bytes=payload_quota_bytes,
    )
    record = json.dumps(asdict(tenant)).encode()
    try:
        servers.objects.put(record_key(name), record, if_absent=True)
    except ObjectExistsError as error:
        raise TenantError(
            f"tenant {name} exists; `vla tenants remove {name}` first", tenant=name
        ) from error
    return _url(servers, name, password, _let_in(servers, tenant))


def rotate_tenant(servers: TenantServers, name: str) -> str:
    """New password and keys; the old ones and the connections made with them end at once.

    Returns the new URL. What the tenant runs goes on. Raises `TenantError` for an unknown name.
    """
    password = secrets.token_urlsafe(24)
    digest = hashlib.sha256(password.encode()).hexdigest()
    tenant = _change_record(servers.objects, name, password_sha256=digest)
    keys = _let_in(servers, tenant)
    for one in (servers.client, *servers.payload_clients):
        # A new password alone would leave who is in where he is.
        one.execute_command("CLIENT", "KILL", "USER", name)
    return _url(servers, name, password, keys)


def _let_in(servers: TenantServers, tenant: Tenant) -> tuple[str, str]:
    """Make the tenant's users on all servers; returns its keys of the object store."""
    keys = servers.iam.create_tenant(tenant.tenant_id)
    apply_acl(servers.client, tenant)
    for client in servers.payload_clients:
        apply_payload_access(client, tenant)
    return keys


def _url(servers: TenantServers, name: str, password: str, keys: tuple[str, str]) -> str:
    parts = urlsplit(servers.redis_url)
    host = f"{name}:{quote(password)}@{parts.hostname}:{parts.port or 6379}"
    query = {"bucket": servers.bucket, "access_key": keys[0], "secret_key": keys[1]}
    if servers.s3_endpoint:
        query["endpoint"] = servers.s3_endpoint
    if servers.payload_urls:
        query["payload"] = ",".join(_without_user(url) for url in servers.payload_urls)
    scheme = "vlas" if parts.scheme == "rediss" else "vla"
    return urlunsplit((scheme, host, parts.path or "/0", urlencode(query), ""))


def _check_free(name: str, servers: TenantServers) -> None:
    """A server's own users, such as those of workers, are no tenants: their rights are not ours to
    replace."""
    for client in (servers.client, *servers.payload_clients):
        users = {_text(user) for user in client.execute_command("ACL", "USERS")}
        if name in users and not _has_record(servers.objects, name):
            raise TenantError(
                f"{name!r} is a user of the Redis server already, and no tenant; choose another",
                tenant=name,
            )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _has_record(objects: ObjectStore, name: str) -> bool:
    try:
        objects.head(record_key(name))
    except ObjectNotFoundError:
        return False
    return True


def remove_tenant(servers: TenantServers, name: str) -> None:
    """Revoke the tenant's access at once. Its objects stay for the auditors.

    Where a server does not answer, the rest is done by calling it again. Raises `TenantError` for
    an unknown name.
    """
    # First, so that what restores users after an outage leaves this one out from now on. The record
    # goes last: with it, what is left to revoke would be forgotten.
    _change_record(servers.objects, name, removed=True)
    servers.client.execute_command("ACL", "DELUSER", name)
    servers.client.srem(TENANTS_KEY, name)
    keep_acls(servers.client)
    for client in servers.payload_clients:
        remove_payload_access(client, name)
    servers.iam.delete_tenant(name)
    servers.objects.delete(record_key(name))


def set_limits(objects: ObjectStore, name: str, **limits: float | int | None) -> Tenant:
    """Change `monthly_worker_s` or `storage_quota_bytes` of a tenant; None: no limit. Returns what
    holds now."""
    return _change_record(objects, name, **limits)


def _change_record(objects: ObjectStore, name: str, **changes: Any) -> Tenant:
    for _ in range(100):
        try:
            raw, etag = objects.get_with_etag(record_key(name))
        except ObjectNotFoundError:
            raise TenantError(f"no tenant {name}", tenant=name) from None
        tenant = Tenant(**json.loads(raw))
        if tenant.removed and "removed" not in changes:
            raise TenantError(f"no tenant {name}", tenant=name)
        changed = replace(tenant, **changes)
        if changed == tenant:
            return tenant  # what only shows writes nothing
        try:
            objects.put(record_key(name), json.dumps(asdict(changed)).encode(), if_match=etag)
        except ObjectChangedError:
            continue
        return changed
    raise TenantError(f"the record of {name} keeps changing; try again", tenant=name)


def restore_acls(client: Any, objects: ObjectStore) -> list[str]:
    """Apply the rules of every tenant that the control Redis does not know. Returns their names."""
    known = set(client.execute_command("ACL", "USERS"))
    members = client.smembers(TENANTS_KEY)
    restored = []
    for tenant in list_tenants(objects):
        if tenant.tenant_id not in known or tenant.tenant_id not in members:
            apply_acl(client, tenant)
            restored.append(tenant.tenant_id)
    return restored


def _without_user(url: str) -> str:
    """A payload Redis's address; the tenant's own user and password go with it at the client."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{parts.hostname}:{parts.port or 6379}"))
