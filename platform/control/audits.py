"""Audits of all tenants, as the schedule and the operator's command run them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from vla_platform.control.tenant_records import list_tenants
from vla_platform.control.workloads import spec_key
from vla_platform.errors import TenantError
from vla_platform.metrics.events import Event
from vla_storage.audit import Auditor, AuditRules
from vla_storage.audit_archive import AuditArchive
from vla_storage.audit_findings import AuditReport, Difference, Severity, difference
from vla_storage.folders import unknown_prefixes
from vla_storage.objects import ObjectStore

WORKLOAD = "audits"
"""Under this name an audit's numbers are among a tenant's metrics."""
_log = logging.getLogger(__name__)


class Stores(Protocol):
    """What an audit reads."""

    @property
    def objects(self) -> ObjectStore: ...
    @property
    def signing_key(self) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Audited:
    """One tenant's report and what changed since the one before."""

    report: AuditReport
    since: Difference
    previous: str | None = None  # id of the audit that it is compared with


@dataclass(frozen=True, kw_only=True)
class Audits:
    audited: tuple[Audited, ...]
    unknown: tuple[str, ...] = ()  # prefixes in the bucket that belong to no tenant

    @property
    def worst(self) -> Severity | None:
        found = [one.report.worst for one in self.audited]
        return max((s for s in found if s is not None), key=lambda s: s.rank, default=None)


def audit_tenants(
    stores: Stores,
    *,
    tenants: Collection[str] = (),
    deep: bool = False,
    rules: AuditRules | None = None,
    emit: Callable[[Event], None] | None = None,
    on_tenant: Callable[[str], None] | None = None,
) -> Audits:
    """Audit the named tenants, or all. Raises `TenantError` for a name that is none."""
    known = {tenant.tenant_id: tenant for tenant in list_tenants(stores.objects)}
    for name in tenants:
        if name not in known:
            raise TenantError(f"no tenant {name}", tenant=name)
    done = []
    for name in sorted(tenants or known):
        if on_tenant is not None:
            on_tenant(name)
        base = rules or AuditRules()
        own = AuditRules(
            **vars(base) | {"quota_bytes": known[name].storage_quota_bytes, "spec_key": spec_key}
        )
        archive = AuditArchive(stores.objects, name)
        before = archive.latest()
        report = Auditor(stores.objects, signing_key=stores.signing_key, rules=own).audit(
            name, deep=deep
        )
        assert report is not None  # nobody stops it
        _tell(report, emit)
        done.append(
            Audited(
                report=report,
                since=difference(before, report),
                previous=before.audit_id if before else None,
            )
        )
    unknown = () if tenants else tuple(unknown_prefixes(stores.objects, set(known)))
    return Audits(audited=tuple(done), unknown=unknown)


def _tell(report: AuditReport, emit: Callable[[Event], None] | None) -> None:
    for one in report.findings:
        if one.severity.rank >= Severity.ERROR.rank:
            _log.error(
                "action=audit_finding tenant=%s kind=%s severity=%s key=%s reason=%s",
                one.tenant, one.kind, one.severity, one.key, one.message,
            )  # fmt: skip
    if emit is not None:
        values = {
            "audit_id": report.audit_id,
            "deep": report.deep,
            "objects": report.counts.objects,
            "size_bytes": report.counts.size_bytes,
            "checkpoints": report.counts.checkpoints,
            "seconds": round(report.finished - report.started, 3),
            **{
                str(severity): sum(one.severity is severity for one in report.findings)
                for severity in Severity
            },
        }
        emit(Event(tenant=report.tenant, workload=WORKLOAD, kind="audit", values=values))
