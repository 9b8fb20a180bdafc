"""Tasks of the training queue. They run in a GPU worker, which has a runner with a base model."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from vla_platform.failpoints import Failpoint, reach


@shared_task(name="training.train_job")
def train_job(job_id: str, tenant_id: str, partition_id: str, base_model: str) -> dict[str, Any]:
    """Train what is ready for this base model, the named job among it, for one slice."""
    from vla_platform.gpu_workers.bootsteps import runner

    runner(base_model).compute_stages()
    counts = runner(base_model).drain()
    reach(Failpoint.BEFORE_ACK)
    return counts


@shared_task(name="training.actor_forward")
def actor_forward(base_model: str) -> int:
    """What the present actors say of rollouts that wait for it."""
    from vla_platform.gpu_workers.bootsteps import runner

    return runner(base_model).compute_stages()


@shared_task(name="training.teacher_scores")
def teacher_scores(base_model: str) -> int:
    """What teachers of this base model say of rollouts that wait for it."""
    from vla_platform.gpu_workers.bootsteps import runner

    return runner(base_model).compute_stages()
