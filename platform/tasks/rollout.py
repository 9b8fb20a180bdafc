"""Tasks of the rollout queues. They run in an environment host of the harness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import shared_task

from vla_platform.control import rollouts
from vla_platform.control.services import services
from vla_platform.envs.rollout import Emit, rollout
from vla_platform.envs.rollout_messages import RolloutReport
from vla_platform.metrics.events import Event


@shared_task(name="rollout.produce")
def produce(tenant_id: str, workload: str) -> int:
    """Roll out what this run may reserve, for one slice."""
    return rollouts.produce(services(), tenant_id, workload, play)


def play(asked: rollouts.Rollout, on_progress: Callable[[int, int], None]) -> RolloutReport:
    """In this process's environments, with actions of the inference workers."""
    from vla_platform.envs.inference_policy import InferencePolicy
    from vla_platform.envs.worker import host, proxy

    found, job = services(), asked.job

    policy = InferencePolicy(
        proxy(),
        payloads=found.payloads,
        with_values=asked.spec.algorithm.kind == "ppo",
        with_features=asked.spec.encode_once,
    )
    return rollout(
        asked.config,
        job.job_id,
        asked.num_envs,
        asked.horizon,
        asked.version,
        host=host(),
        policy=policy,
        payloads=found.payloads,
        keep_video=keeper_of(job.tenant_id, job.workload),
        emit=emitter_of(job.tenant_id, job.workload, position=job.position),
        on_progress=on_progress,
    )


def emitter_of(tenant: str, workload: str, **more: Any) -> Emit:
    """Emits a rollout's events as its workload's, with `more` values."""

    def emit(kind: str, values: dict[str, Any]) -> None:
        event = Event(tenant=tenant, workload=workload, kind=kind, values={**more, **values})
        services().emitter.emit(event)

    return emit


def keeper_of(tenant: str, workload: str) -> Callable[[str, bytes], str]:
    """Stores a film beside its workload's spec; returns its key."""

    def keep(name: str, film: bytes) -> str:
        key = f"{tenant}/workloads/{workload}/videos/{name}"
        services().objects.put(key, film)
        return key

    return keep
