"""Tasks of the sft queue: demonstrations become training jobs."""

from __future__ import annotations

import functools

from celery import shared_task

from vla_platform.control import production
from vla_platform.control.services import services


@functools.cache
def sources() -> production.Sources:
    return production.Sources(services())


@shared_task(name="sft.prepare")
def prepare(tenant_id: str, workload: str) -> str:
    return production.prepare(services(), tenant_id, workload)


@shared_task(name="sft.produce")
def produce(tenant_id: str, workload: str) -> int:
    return production.produce(services(), sources(), tenant_id, workload)
