"""What the platform keeps of a tenant: one record in S3, `platform/tenants/<tenant>.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from vla_platform.errors import TenantError
from vla_storage.errors import ObjectNotFoundError
from vla_storage.objects import ObjectStore
from vla_storage.payloads import DEFAULT_QUOTA_BYTES

TENANTS_KEY = "vla:tenants"
"""The tenants that a Redis knows, on control and payload servers alike."""


@dataclass(frozen=True, kw_only=True)
class Tenant:
    tenant_id: str
    password_sha256: str
    payload_quota_bytes: int = DEFAULT_QUOTA_BYTES
    storage_quota_bytes: int | None = None  # in the object store; None: no limit
    monthly_worker_s: float | None = None  # of training and of inference; None: no limit
    removed: bool = False  # its access is being revoked; nothing restores it
    version: int = 1


def record_key(name: str) -> str:
    return f"platform/tenants/{name}.json"


def read_tenant(objects: ObjectStore, name: str) -> Tenant:
    """Raises `TenantError`."""
    try:
        raw: dict[str, Any] = json.loads(objects.get(record_key(name)))
    except ObjectNotFoundError:
        raise TenantError(f"no tenant {name}", tenant=name) from None
    tenant = Tenant(**raw)
    if tenant.removed:
        raise TenantError(f"no tenant {name}", tenant=name)
    return tenant


def list_tenants(objects: ObjectStore) -> list[Tenant]:
    """From S3, the truth; without those whose removal has begun."""
    found = []
    for info in objects.list("platform/tenants/"):
        try:
            raw: dict[str, Any] = json.loads(objects.get(info.key))
        except ObjectNotFoundError:
            continue  # removed between listing and reading
        found.append(Tenant(**raw))
    return [tenant for tenant in found if not tenant.removed]
