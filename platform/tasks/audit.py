"""Tasks of the audit queue."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from vla_platform.control import audit_page, audits
from vla_platform.control.services import services


@shared_task(name="audit.run")
def run(tenants: list[str] | None = None, deep: bool = False) -> list[dict[str, Any]]:
    """Audit the named tenants, or all; reports lie in `platform/audits/`."""
    found = services()
    done = audits.audit_tenants(found, tenants=tenants or (), deep=deep, emit=found.emitter.emit)
    return audit_page.summary(done)
