"""`vla audit`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from vla_platform.cli.output import Format, Var, console, emit, table_of
from vla_platform.cli.tenants import operator
from vla_platform.control.audit_page import render, summary
from vla_platform.control.audits import Audits, audit_tenants
from vla_storage.audit_archive import AuditArchive
from vla_storage.audit_findings import AuditReport, Severity

STATUS = {None: 0, Severity.INFO: 0, Severity.WARNING: 3, Severity.ERROR: 4, Severity.CRITICAL: 5}
"""The exit status, by the worst finding."""


def audit(
    tenant: Annotated[
        list[str] | None, typer.Option("--tenant", help="only this one; repeatable")
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="read and hash every byte")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="also write this page")] = None,
    history: Annotated[
        bool, typer.Option("--history", help="list earlier audits; audit nothing")
    ] = False,
    var: Var = Path("var"),
    format: Format = "table",
) -> None:
    """Check every object of every tenant's checkpoints; deletes nothing.

    Exit status: 0 nothing to do, 3 warnings, 4 a checkpoint cannot be used, 5 forgery. An audit
    that was interrupted goes on where it had got to.
    """
    with operator(var) as one:
        if history:
            rows = _history(one.objects, tenant or [])
            emit(rows, format, table_of(rows))
            return
        say = (lambda name: None) if format == "json" else _say
        done = audit_tenants(one, tenants=tenant or (), deep=deep, on_tenant=say)
    if html is not None:
        html.write_text(render(done), encoding="utf-8")
    if format == "json":
        emit(_value(done), format, table_of([]))
    else:
        console.print(table_of(summary(done)))
        rows = [
            {"severity": f.severity, "kind": f.kind, "key": f.key, "what": f.message}
            for audited in done.audited
            for f in audited.report.findings
        ]
        if rows:
            console.print(table_of(rows))
        if done.unknown:
            console.print(f"prefixes of no tenant: {', '.join(done.unknown)}")
    raise typer.Exit(STATUS[done.worst])


def _say(name: str) -> None:
    console.print(f"  auditing {name}")


def _value(done: Audits) -> dict[str, Any]:
    return {
        "worst": done.worst,
        "summary": summary(done),
        "unknown_prefixes": list(done.unknown),
        "audits": [
            {
                "report": audited.report.to_dict(),
                "previous": audited.previous,
                "since": asdict(audited.since),
            }
            for audited in done.audited
        ],
    }


def _history(objects: Any, tenants: list[str]) -> list[dict[str, Any]]:
    from vla_platform.control.tenant_records import list_tenants

    rows = []
    for name in tenants or [tenant.tenant_id for tenant in list_tenants(objects)]:
        archive = AuditArchive(objects, name)
        for audit_id in archive.reports():
            rows.append({"tenant": name, **_row(archive.report(audit_id))})
    return rows


def _row(report: AuditReport) -> dict[str, Any]:
    return {
        "audit": report.audit_id,
        "deep": report.deep,
        "worst": str(report.worst or "none"),
        "findings": sum(report.counts.findings.values()),
        "checkpoints": report.counts.checkpoints,
        "size_bytes": report.counts.size_bytes,
    }
