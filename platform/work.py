"""Work on a run or a job, as operators see it: its log lines say whose they are, and it is a span
of the job's trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vla_platform import logs, tracing
from vla_platform.control.training_job import TrainingJob


@contextmanager
def on_run(name: str, tenant: str, workload: str) -> Iterator[None]:
    """What is done for a run before and beside its jobs."""
    with (
        logs.bound(tenant=tenant, workload=workload),
        tracing.span(name, workload, tenant=tenant, workload=workload),
    ):
        yield


@contextmanager
def on_job(name: str, job: TrainingJob) -> Iterator[None]:
    with (
        logs.bound(tenant=job.tenant_id, workload=job.workload, job=job.job_id),
        tracing.span(name, job.job_id, **attributes_of(job)),
    ):
        yield


def over(name: str, job: TrainingJob, begun_s: float, ended_s: float, **more: int | str) -> None:
    """A part of the work on a job that several jobs shared, or that nobody did: waiting."""
    if tracing.is_on():
        tracing.past(name, job.job_id, begun_s, ended_s, **attributes_of(job), **more)


def attributes_of(job: TrainingJob) -> dict[str, str | int]:
    return {
        "tenant": job.tenant_id,
        "workload": job.workload,
        "policy": job.policy_key,
        "job": job.job_id,
        "position": job.position,
        "attempt": job.attempt,
        "fence": job.fence,
    }
