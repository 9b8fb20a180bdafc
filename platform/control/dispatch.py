"""Sends the hints: Celery messages that make a worker look at the ledger.

Every hint may be lost or doubled; `control.reconcile` sends again what the ledger says is due.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import current_app

from vla_platform.broker import evaluation_queue, queue, rollout_queue
from vla_platform.control.states import Stage


def prepare(tenant: str, workload: str) -> None:
    current_app.send_task("sft.prepare", kwargs={"tenant_id": tenant, "workload": workload})


def produce(workload: Mapping[str, str]) -> None:
    """To whoever makes this workload's samples; `workload` is the ledger's hash of it."""
    arguments = {"tenant_id": workload["tenant"], "workload": workload["id"]}
    if workload["kind"] == "rl":
        where = queue(rollout_queue(workload["harness"]))
        current_app.send_task("rollout.produce", kwargs=arguments, queue=where)
    else:
        current_app.send_task("sft.produce", kwargs=arguments)


def stage(stage: Stage, base_model: str) -> None:
    """To whoever computes what samples still lack."""
    if stage is Stage.ADVANTAGES:
        current_app.send_task("advantages.compute", kwargs={})
    else:
        current_app.send_task("training.actor_forward", kwargs={"base_model": base_model})


def train(*, job_id: str, tenant: str, partition_id: str, base_model: str) -> None:
    current_app.send_task(
        "training.train_job",
        kwargs={
            "job_id": job_id,
            "tenant_id": tenant,
            "partition_id": partition_id,
            "base_model": base_model,
        },
    )


def evaluate(*, suite_name: str, **arguments: Any) -> None:
    """`arguments` are those of the task `evaluation.evaluate`."""
    current_app.send_task(
        "evaluation.evaluate",
        kwargs={"suite_name": suite_name, **arguments},
        queue=queue(evaluation_queue(suite_name.partition("/")[0])),
    )
