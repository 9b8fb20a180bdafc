"""The tenants of `make demo` that learn by reward: a short fine-tuning, then PPO or GRPO.

The task is `tabletop/reach` from one camera and the gripper's position, without grasping, with a
time limit; touching the block counts (`reach_radius`). Success is measured before and after by the
platform's own evaluation: the deterministic policy, on scenes that no rollout draws.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery

from vla_platform.broker import evaluation_queue, queue
from vla_platform.cli.tenants import Operator
from vla_platform.client import Platform, Run
from vla_platform.client.report import RunReport, Video
from vla_platform.datasets.recording import make_demonstrations
from vla_platform.envs.evaluation_records import EvaluationArchive, EvaluationRecord
from vla_platform.envs.tabletop import Tabletop
from vla_platform.specs import parse_spec

DATASET = "touch"
REACH_RADIUS = 0.06
OPTIONS: dict[str, Any] = {
    "cameras": ["top"],
    "gripper": False,
    "max_steps": 16,
    "reach_radius": REACH_RADIUS,
}
EPISODES = 128  # of an evaluation
TIMEOUT_S = 900.0
HOST_LIMITS = {"VLA_MAX_SESSIONS": "320", "VLA_MAX_SESSIONS_PER_TENANT": "128"}
"""Sessions of the environment host, which are cheap here."""

FINE_TUNING: dict[str, Any] = {
    "kind": "sft",
    "policy": "touch-demos",
    "dataset": {"path": DATASET, "heldout_samples": 16},
    "steps": 150,
    "batch_size": 16,
    "optimizer": {"lr": 1e-3, "schedule": {"kind": "cosine", "warmup_steps": 10}},
}
LEARNING: dict[str, dict[str, Any]] = {
    "ppo-lab": {
        "rollout": {"num_envs": 64, "horizon": 4},
        "algorithm": {"kind": "ppo", "epochs": 4, "minibatches": 4, "gamma": 0.9},
        "optimizer": {"lr": 1.5e-4, "schedule": {"kind": "linear", "min_lr": 3e-5}},
        "updates": 50,
    },
    "grpo-lab": {
        "rollout": {"num_envs": 128, "horizon": 4, "group_size": 8, "whole_episodes": True},
        "algorithm": {"kind": "grpo", "epochs": 2, "minibatches": 4},
        "optimizer": {"lr": 2.5e-4, "schedule": {"kind": "linear", "min_lr": 1e-4}},
        "updates": 60,
    },
}
# Wide enough to find better actions with few episodes.
MODULES: dict[str, dict[str, Any]] = {
    "ppo-lab": {"kind": "oft", "chunk": 4, "initial_log_std": -1.2},
    "grpo-lab": {"kind": "oft", "chunk": 4, "initial_log_std": -0.7},
}


def make_dataset(folder: Path) -> None:
    """Demonstrations with disturbed motions, so that they show how to come back."""
    env = Tabletop(cameras=("top",), gripper=False, reach_radius=REACH_RADIUS)
    make_demonstrations(folder / DATASET, env=env, episodes=100, seed=3, noise=0.3)


def fine_tuning(tenant: str) -> dict[str, Any]:
    return {**FINE_TUNING, "action_module": MODULES[tenant]}


def learning(tenant: str, checkpoint: str) -> dict[str, Any]:
    return {
        "kind": "rl",
        "policy": "touch",
        "init_from": checkpoint,
        "environment": {"id": "tabletop/reach", "options": {**OPTIONS, "reward": "dense"}},
        **LEARNING[tenant],
    }


@dataclass(frozen=True)
class Learned:
    """What one tenant's two runs gave."""

    tuning: Run
    run: Run
    spec: dict[str, Any]
    before: EvaluationRecord
    after: EvaluationRecord
    seconds: float  # of the reinforcement learning


def learn(admin: Operator, platform: Platform, begun: Any) -> Learned:
    """Fine-tune, evaluate, learn, evaluate. `begun(run)` is told of each run."""
    tenant = platform.tenant
    tuning = platform.submit(fine_tuning(tenant))
    begun(tuning)
    checkpoint = tuning.result(TIMEOUT_S).checkpoint
    assert checkpoint is not None
    before = evaluate(admin, tenant, "touch-demos", "before")
    spec = learning(tenant, checkpoint)
    started = time.monotonic()
    run = platform.submit(spec)
    begun(run)
    run.result(TIMEOUT_S)
    seconds = time.monotonic() - started
    return Learned(tuning, run, spec, before, evaluate(admin, tenant, "touch", "after"), seconds)


def evaluate(admin: Operator, tenant: str, policy: str, name: str) -> EvaluationRecord:
    """Have the platform play `EPISODES` episodes with the policy's current version."""
    arguments = {
        "evaluation_id": name,
        "tenant": tenant,
        "policy_key": f"{tenant}/{policy}",
        "version": None,
        "policy": "inference",
        "suite_name": "tabletop/reach",
        "episodes": EPISODES,
        "options": {**OPTIONS, "reward": "dense"},
        "num_envs": 32,
        "num_videos": 4,
    }
    with Celery("demo", broker=admin.info.redis_url, set_as_current=False) as app:
        app.conf.update(broker_transport="vla_platform.broker:Transport")
        app.send_task(
            "evaluation.evaluate",
            kwargs=arguments,
            queue=queue(evaluation_queue("tabletop")),
            ignore_result=True,
        )
    archive = EvaluationArchive(admin.objects, tenant, name)
    end = time.monotonic() + TIMEOUT_S
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
