"""Sends the hints: Celery messages that make a worker look at the ledger.

Every hint may be lost or doubled; `control.reconcile` sends again what the ledger says is due.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import redis
from celery import current_app
from celery.schedules import crontab
from kombu.exceptions import OperationalError

from vla_platform.broker import evaluation_queue, queue, rollout_queue
from vla_platform.control.states import JobState, Stage
from vla_platform.control.training_job import TrainingJob
from vla_platform.specs.cron import hint_minutes

_log = logging.getLogger(__name__)


# A pooled channel whose connection was lost raises AttributeError (kombu 5.7).
_AWAY = (OperationalError, redis.RedisError, OSError, AttributeError)


def _send(task: str, **options: Any) -> bool:
    """False: the hint is lost, for the broker is away. Pooled connections may be dead without
    knowing it: the second try has a connection of its own."""
    try:
        current_app.send_task(task, **options)
        return True
    except _AWAY as error:
        _log.warning("action=hint_not_sent task=%s reason=%r", task, error)
    try:
        with current_app.connection_for_write() as connection:
            current_app.send_task(task, connection=connection, **options)
            return True
    except _AWAY as error:
        _log.warning("action=hint_lost task=%s reason=%r", task, error)
        return False


def prepare(tenant: str, workload: str) -> None:
    _send("sft.prepare", kwargs={"tenant_id": tenant, "workload": workload})


def produce(workload: Mapping[str, str]) -> None:
    """To whoever makes this workload's samples; `workload` is the ledger's hash of it."""
    arguments = {"tenant_id": workload["tenant"], "workload": workload["id"]}
    recorded = workload["kind"] == "sft" or workload.get("recorded") == "1"
    if not recorded and not workload.get("harness"):
        return  # the tenant gives the samples itself
    if not recorded:
        where = queue(rollout_queue(workload["harness"]))
        _send("rollout.produce", kwargs=arguments, queue=where)
    else:
        _send("sft.produce", kwargs=arguments)


def stage(stage: Stage, base_model: str) -> None:
    """To whoever computes what samples still lack; `base_model` where its workers do."""
    if stage is Stage.ADVANTAGES:
        _send("advantages.compute", kwargs={})
    elif stage is Stage.ACTOR_FORWARD:
        _send("training.actor_forward", kwargs={"base_model": base_model})
    elif base_model:
        _send("training.teacher_scores", kwargs={"base_model": base_model})
    else:
        _send("graders.grade", kwargs={})


def go_on(job: TrainingJob, state: JobState) -> None:
    """To whoever takes `job`, now that it is in `state`."""
    if state is JobState.READY:
        return train(job)
    needed = Stage(state.removeprefix("needs_"))
    place = {Stage.ACTOR_FORWARD: job.base_model, Stage.SCORES: job.scored_by}
    stage(needed, place.get(needed, ""))


def train(job: TrainingJob) -> None:
    _send(
        "training.train_job",
        kwargs={
            "job_id": job.job_id,
            "tenant_id": job.tenant_id,
            "partition_id": job.partition_id,
            "base_model": job.base_model,
        },
    )


def evaluate(*, suite_name: str, **arguments: Any) -> bool:
    """`arguments` are those of the task `evaluation.evaluate`. False: it was not sent."""
    return _send(
        "evaluation.evaluate",
        kwargs={"suite_name": suite_name, **arguments},
        queue=queue(evaluation_queue(suite_name.partition("/")[0])),
    )


def schedule_hint(tenant: str, name: str, *, cron: str, timezone: str) -> None:
    """RedBeat's entry for one schedule: looks whenever a firing may fall, whatever the offset."""
    from redbeat import RedBeatSchedulerEntry  # environment hosts lack it, and send no hints

    minutes = ",".join(map(str, sorted(hint_minutes(cron, timezone))))
    RedBeatSchedulerEntry(
        hint_name(tenant, name),
        task="control.look_at_schedule",
        schedule=crontab(minute=minutes),
        kwargs={"tenant": tenant, "name": name},
        app=current_app,
    ).save()


def remove_hint(tenant: str, name: str) -> None:
    from redbeat import RedBeatSchedulerEntry

    RedBeatSchedulerEntry(
        hint_name(tenant, name), task="control.look_at_schedule", schedule=crontab(),
        app=current_app,
    ).delete()  # fmt: skip


def hint_name(tenant: str, name: str) -> str:
    return f"schedule:{tenant}:{name}"
