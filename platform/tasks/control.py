"""Tasks of the control queue."""

from __future__ import annotations

from celery import shared_task

from vla_platform.control import reconciler, schedule_firings
from vla_platform.control.services import services


@shared_task(name="control.reconcile")
def reconcile() -> None:
    reconciler.reconcile(services())


@shared_task(name="control.look_at_schedule")
def look_at_schedule(tenant: str, name: str) -> list[str]:
    return schedule_firings.look_at(services(), tenant, name)
