"""An audit as one self-contained page: first what a manager asks, then what an auditor needs."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import resources
from typing import Any

import jinja2

from vla_platform.control.audits import Audits
from vla_storage.audit_findings import Severity

VERDICTS = {
    None: "Every checkpoint is complete and untampered.",
    Severity.INFO: "Every checkpoint is complete and untampered; some leftovers lie about.",
    Severity.WARNING: "Every checkpoint can be used; something needs attention soon.",
    Severity.ERROR: "Some checkpoints cannot be used.",
    Severity.CRITICAL: "Somebody forged a manifest or reached into another tenant's place.",
}
MOST_SHOWN = 1000


def render(audits: Audits) -> str:
    template = resources.files("vla_platform.control").joinpath("audit.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"size": human_size, "time": utc_time}
    return environment.from_string(template).render(
        audits=audits, verdict=VERDICTS[audits.worst], most=MOST_SHOWN, summary=summary(audits)
    )


def summary(audits: Audits) -> list[dict[str, Any]]:
    """One row per tenant."""
    return [
        {
            "tenant": one.report.tenant,
            "worst": str(one.report.worst or "none"),
            "findings": sum(one.report.counts.findings.values()),
            "new": len(one.since.appeared),
            "gone": len(one.since.gone),
            "checkpoints": one.report.counts.checkpoints,
            "objects": one.report.counts.objects,
            "size_bytes": one.report.counts.size_bytes,
            "seconds": round(one.report.finished - one.report.started, 2),
            "audit": one.report.audit_id,
        }
        for one in audits.audited
    ]


def human_size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def utc_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
