"""Tasks of the evaluation queues. They run in an environment host of the suite's harness."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from celery import shared_task

from vla_platform.control import usage
from vla_platform.control.services import services
from vla_platform.envs.evaluation import evaluate
from vla_platform.envs.suites import suite
from vla_platform.metrics.events import Event


@shared_task(name="evaluation.evaluate", ignore_result=False)
def run(
    evaluation_id: str,
    tenant: str,
    policy_key: str,
    version: int | None,
    policy: str,
    suite_name: str,
    episodes: int,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    num_envs: int = 4,
    execute_steps: int | None = None,
    num_videos: int = 0,
) -> dict[str, Any]:
    """One evaluation; done again it plays what is missing. Returns the record."""
    from vla_platform.envs.worker import host, policy_for

    found = services()

    def emit(kind: str, values: dict[str, Any]) -> None:
        found.emitter.emit(Event(tenant=tenant, workload=evaluation_id, kind=kind, values=values))

    record = evaluate(
        suite(suite_name, episodes=episodes, seed=seed, options=options),
        policy_for(policy, tenant),
        evaluation_id=evaluation_id,
        tenant=tenant,
        policy_key=policy_key,
        version=version,
        host=host(),
        objects=found.objects,
        num_envs=num_envs,
        execute_steps=execute_steps,
        num_videos=num_videos,
        emit=emit,
    )
    client = found.ledger.client
    usage.count(
        client, tenant, usage.today(client), policy=policy_key.partition("/")[2],
        workload=evaluation_id, amounts={usage.Use.SIMULATOR_S: record.seconds},
    )  # fmt: skip
    return {**asdict(record), "episodes": len(record.episodes)}
