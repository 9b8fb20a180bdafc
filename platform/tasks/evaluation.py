"""Tasks of the evaluation queues. They run in an environment host of the suite's harness."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from celery import Task, shared_task

from vla_platform import work
from vla_platform.broker import VISIBILITY_S
from vla_platform.control import evaluations, schedule_firings
from vla_platform.control.leases import Keeper, alone
from vla_platform.control.services import services
from vla_platform.control.settlement import settle
from vla_platform.envs.evaluation import evaluate
from vla_platform.envs.suites import suite
from vla_platform.errors import LeaseLostError
from vla_platform.metrics.events import Event
from vla_storage.errors import CodedError


@shared_task(name="evaluation.evaluate", bind=True, max_retries=None)
def run(self: Task, **asked: Any) -> dict[str, Any]:
    """`play`, once at a time: what outlasts the broker's patience comes again while it runs, and is
    sent on until that one has ended, or its worker has."""
    found = services()
    tenant, evaluation_id = asked["tenant"], asked["evaluation_id"]
    lease_s = found.settings.lease_s
    again_s = pause_s(lease_s)
    with alone(found.ledger, f"{tenant}/evaluations/{evaluation_id}", lease_s=lease_s) as keeper:
        if keeper is None:
            raise self.retry(countdown=again_s)
        try:
            return play(keeper, **asked)
        except LeaseLostError as error:
            raise self.retry(countdown=again_s, exc=error) from error


def pause_s(lease_s: float) -> float:
    """How long a message waits in a worker's memory to be tried again: a lease, but never so long
    that the broker takes it for abandoned and gives it to a second worker."""
    return min(lease_s, VISIBILITY_S / 4)


def play(
    keeper: Keeper,
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
    """One evaluation; done again it plays what is missing. Returns the record.

    Raises `LeaseLostError` after the episode in which somebody else may have begun to play.
    """
    from vla_platform.envs.worker import host, policy_for

    found = services()

    def emit(kind: str, values: dict[str, Any]) -> None:
        keeper.check()
        evaluations.heard(found, tenant, evaluation_id)
        found.emitter.emit(Event(tenant=tenant, workload=evaluation_id, kind=kind, values=values))

    try:
        with work.on_run("evaluation", tenant, evaluation_id):
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
    except LeaseLostError:
        raise
    except CodedError as error:
        if not error.retryable:
            schedule_firings.finished(found, tenant, evaluation_id, error=str(error))
        raise
    settle(found, record)
    return {**asdict(record), "episodes": len(record.episodes)}
