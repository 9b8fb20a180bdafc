"""A tenant that learns by reward: a short fine-tuning, then PPO or GRPO, measured before and after.

Success is measured by the platform's own evaluation: the deterministic policy, on scenes that no
rollout draws. What is learned is a `Lesson`; demo_rl.py and demo_full.py have theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from celery import Celery

from vla_platform.broker import evaluation_queue, queue
from vla_platform.cli.tenants import Operator
from vla_platform.client import Platform, Run
from vla_platform.client.report import RunReport, Video
from vla_platform.envs.evaluation_records import EvaluationArchive, EvaluationRecord
from vla_platform.specs import parse_spec


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What one tenant learns, and how long that may take."""

    environment: str  # id
    options: Mapping[str, Any]  # of the environment
    fine_tuning: Mapping[str, Any]  # spec
    learning: Mapping[str, Any]  # spec, without environment and checkpoint
    episodes: int = 128  # of an evaluation
    num_envs: int = 32  # of an evaluation
    num_videos: int = 4
    timeout_s: float = 1500.0  # for each of the four parts

    def learning_spec(self, checkpoint: str) -> dict[str, Any]:
        return {
            **self.learning,
            "kind": "rl",
            "init_from": checkpoint,
            "environment": {"id": self.environment, "options": dict(self.options)},
        }


@dataclass(frozen=True)
class Learned:
    """What one tenant's two runs gave."""

    lesson: Lesson
    tuning: Run
    run: Run
    spec: dict[str, Any]
    before: EvaluationRecord
    after: EvaluationRecord
    seconds: float  # of the reinforcement learning


def learn(
    admin: Operator, platform: Platform, lesson: Lesson, begun: Callable[[Run], None]
) -> Learned:
    """Fine-tune, evaluate, learn, evaluate. `begun(run)` is told of each run."""
    tuning = platform.submit(dict(lesson.fine_tuning))
    begun(tuning)
    checkpoint = tuning.result(lesson.timeout_s).checkpoint
    assert checkpoint is not None
    before = evaluate(admin, platform.tenant, lesson, lesson.fine_tuning["policy"], "before")
    spec = lesson.learning_spec(checkpoint)
    started = time.monotonic()
    run = platform.submit(spec)
    begun(run)
    run.result(lesson.timeout_s)
    seconds = time.monotonic() - started
    after = evaluate(admin, platform.tenant, lesson, spec["policy"], "after")
    return Learned(lesson, tuning, run, spec, before, after, seconds)


def evaluate(
    admin: Operator, tenant: str, lesson: Lesson, policy: str, name: str
) -> EvaluationRecord:
    """Have the platform play the lesson's episodes with the policy's current version."""
    arguments = {
        "evaluation_id": name,
        "tenant": tenant,
        "policy_key": f"{tenant}/{policy}",
        "version": None,
        "policy": "inference",
        "suite_name": lesson.environment,
        "episodes": lesson.episodes,
        "options": dict(lesson.options),
        "num_envs": lesson.num_envs,
        "num_videos": lesson.num_videos,
    }
    with Celery("demo", broker=admin.info.redis_url, set_as_current=False) as app:
        app.conf.update(broker_transport="vla_platform.broker:Transport")
        app.send_task(
            "evaluation.evaluate",
            kwargs=arguments,
            queue=queue(evaluation_queue(lesson.environment.partition("/")[0])),
            ignore_result=True,
        )
    archive = EvaluationArchive(admin.objects, tenant, name)
    end = time.monotonic() + lesson.timeout_s
    while (record := archive.record()) is None:
        if time.monotonic() > end:
            raise TimeoutError(f"{tenant}: the evaluation {name!r} does not end")
        time.sleep(0.5)
    return record


def report_of(admin: Operator, platform: Platform, learned: Learned) -> RunReport:
    """Numbers, curves and films of one tenant."""
    run, before, after = learned.run, learned.before, learned.after
    status, metrics = run.status(), run.metrics()
    rollouts = [event for event in metrics if event["kind"] == "rollout"]
    summary = {
        "run": run.id,
        "algorithm": learned.spec["algorithm"]["kind"],
        "fine_tuning_steps": learned.tuning.status().step,
        "success_first": before.success_rate,
        "success_first_interval": [before.interval_low, before.interval_high],
        "success_last": after.success_rate,
        "success_last_interval": [after.interval_low, after.interval_high],
        "evaluation_episodes": after.num_episodes,
        "updates": status.step,
        "policy_version": status.policy_version,
        "episodes": sum(event["episodes"] for event in rollouts),
        "checkpoint": status.checkpoint,
        "seconds": round(learned.seconds, 1),
    }
    evaluations = [
        {
            "step": step,
            "evaluated_success": record.success_rate,
            "evaluated_low": record.interval_low,
            "evaluated_high": record.interval_high,
        }
        for step, record in ((0, before), (len(rollouts), after))
    ]
    return RunReport(
        tenant=platform.tenant,
        policy=status.policy,
        workload_id=run.id,
        spec=parse_spec(learned.spec).model_dump(mode="json"),
        events=[*metrics, *evaluations],
        checkpoints=[
            {"checkpoint": one.checkpoint_id, "step": one.step, "size_bytes": one.size_bytes}
            for one in platform.checkpoints(status.policy, run.id)[-5:]
        ],
        summary=summary,
        videos=[
            *films(admin, before, "before"),
            *films(admin, after, "after"),
        ],
    )


def films(admin: Operator, record: EvaluationRecord, when: str) -> list[Video]:
    return [
        Video(
            f"{when}, {episode.task}: {'success' if episode.success else episode.end}",
            admin.objects.get(episode.video),
        )
        for episode in record.episodes
        if episode.video is not None
    ]
