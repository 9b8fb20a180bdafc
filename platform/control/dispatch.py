"""Sends the hints: Celery messages that make a worker look at the ledger.

Every hint may be lost or doubled; `control.reconcile` sends again what the ledger says is due.
"""

from __future__ import annotations

from celery import current_app


def prepare(tenant: str, workload: str) -> None:
    current_app.send_task("sft.prepare", kwargs={"tenant_id": tenant, "workload": workload})


def produce(tenant: str, workload: str) -> None:
    current_app.send_task("sft.produce", kwargs={"tenant_id": tenant, "workload": workload})


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
