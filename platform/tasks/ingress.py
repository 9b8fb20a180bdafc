"""Tasks that tenants send, each on its own queue: the queue they came by is who sent them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from celery import Task, shared_task

from vla_platform.broker import INGRESS_PREFIX, tenant_of
from vla_platform.control import (
    checkpoint_changes,
    environments,
    evaluation_jobs,
    explanation,
    recovery,
    requests,
    schedules,
    timeline,
    workloads,
)
from vla_platform.control.services import services
from vla_storage.errors import CodedError

REPLY_TTL_S = 600


@shared_task(name="ingress.submit", bind=True)
def submit(self: Task, request_id: str, spec: str, key: str) -> None:
    def submitted(tenant: str) -> str:
        # A policy that the ledger has forgotten must not begin at version 0 again.
        recovery.recover_if_lost(services())
        return workloads.submit(services(), tenant, spec, key)

    _answer(self, request_id, submitted)


@shared_task(name="ingress.cancel", bind=True)
def cancel(self: Task, request_id: str, run: str) -> None:
    _answer(self, request_id, lambda tenant: workloads.cancel(services(), tenant, run))


@shared_task(name="ingress.pause", bind=True)
def pause(self: Task, request_id: str, run: str) -> None:
    _answer(self, request_id, lambda tenant: workloads.pause(services(), tenant, run))


@shared_task(name="ingress.resume", bind=True)
def resume(self: Task, request_id: str, run: str) -> None:
    _answer(self, request_id, lambda tenant: workloads.resume(services(), tenant, run))


@shared_task(name="ingress.explain", bind=True)
def explain(self: Task, request_id: str, run: str) -> None:
    def explained(tenant: str) -> dict[str, Any]:
        workloads.check_owner(services(), tenant, run)
        return asdict(explanation.explain(services().ledger, run))

    _answer(self, request_id, explained)


@shared_task(name="ingress.timeline", bind=True)
def job_timeline(self: Task, request_id: str, run: str, job_id: str) -> None:
    def told(tenant: str) -> list[dict[str, Any]]:
        workloads.check_owner(services(), tenant, run)
        return [asdict(one) for one in timeline.of_job(services().ledger, run, job_id)]

    _answer(self, request_id, told)


@shared_task(name="ingress.open_environment", bind=True)
def open_environment(self: Task, request_id: str, environment: str) -> None:
    _answer(
        self,
        request_id,
        lambda tenant: environments.open_environment(services(), tenant, environment, request_id),
        once=True,
    )


@shared_task(name="ingress.reserve_batch", bind=True)
def reserve_batch(self: Task, request_id: str, run: str) -> None:
    _answer(
        self,
        request_id,
        lambda tenant: workloads.reserve_batch(services(), tenant, run, request_id),
    )


@shared_task(name="ingress.release_batch", bind=True)
def release_batch(self: Task, request_id: str, run: str, job_id: str, fence: str) -> None:
    _answer(
        self,
        request_id,
        lambda tenant: workloads.release_batch(services(), tenant, run, job_id, fence),
    )


@shared_task(name="ingress.batch_state", bind=True)
def batch_state(self: Task, request_id: str, run: str, job_id: str) -> None:
    _answer(self, request_id, lambda tenant: workloads.batch_state(services(), tenant, run, job_id))


@shared_task(name="ingress.submit_batch", bind=True)
def submit_batch(
    self: Task, request_id: str, run: str, job_id: str, fence: str, samples: str
) -> None:
    _answer(
        self,
        request_id,
        lambda tenant: workloads.submit_batch(services(), tenant, run, job_id, fence, samples),
    )


@shared_task(name="ingress.change_checkpoints", bind=True)
def change_checkpoints(self: Task, request_id: str, change: str) -> None:
    _answer(
        self,
        request_id,
        lambda tenant: checkpoint_changes.change(services(), tenant, change),
        once=True,
    )


@shared_task(name="ingress.evaluate", bind=True)
def evaluate(self: Task, request_id: str, evaluation: str) -> None:
    _answer(
        self,
        request_id,
        lambda tenant: evaluation_jobs.evaluate(services(), tenant, evaluation, request_id),
        once=True,
    )


@shared_task(name="ingress.schedule", bind=True)
def schedule(self: Task, request_id: str, schedule: str) -> None:
    least_s = services().settings.min_schedule_s
    _answer(
        self,
        request_id,
        lambda tenant: schedules.add(services(), tenant, schedule, min_interval_s=least_s),
    )


@shared_task(name="ingress.change_schedule", bind=True)
def change_schedule(self: Task, request_id: str, name: str, change: str) -> None:
    _answer(
        self,
        request_id,
        lambda tenant: schedules.change(services(), tenant, name, change, request_id),
        once=True,
    )


def _answer(task: Task, request_id: str, call: Callable[[str], Any], *, once: bool = False) -> None:
    """`once`: a request that comes again is told what the first one was."""
    queue = task.request.delivery_info["routing_key"]
    if not queue.startswith(INGRESS_PREFIX):
        raise PermissionError(f"an ingress task came by {queue}")
    tenant = tenant_of(queue)
    try:
        if once:
            client = services().ledger.client
            answer = {"result": requests.once(client, tenant, request_id, lambda: call(tenant))}
        else:
            answer = {"result": call(tenant)}
    except CodedError as error:
        answer = {"error": error.to_dict()}
    key = f"vla:t:{tenant}:reply:{str(request_id)[:64]}"
    with services().ledger.client.pipeline() as pipe:
        pipe.rpush(key, json.dumps(answer, default=str))
        pipe.expire(key, REPLY_TTL_S)
        pipe.execute()
