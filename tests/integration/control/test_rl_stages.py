"""Graders and advantage workers on real stores: what dies, is late, doubled or not a number."""

from __future__ import annotations

import contextlib
import importlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from celery import Celery

from vla_platform.control import advantages, dispatch, grading, rollouts
from vla_platform.control.ledger import Ledger
from vla_platform.control.ledger_functions import TEST_CLOCK_KEY
from vla_platform.control.services import Services, connect
from vla_platform.control.states import JobState, Stage, state_after
from vla_platform.control.training_job import ReserveLimits, TrainingJob
from vla_platform.control.workloads import ledger_fields, load_rl_spec, spec_key
from vla_platform.errors import UnavailableError
from vla_platform.rl.graders import GRADERS, EpisodeRows, Grader
from vla_platform.rl.rewards import GRADE
from vla_platform.settings import Settings
from vla_platform.specs import canonical_json, parse_spec
from vla_platform.stack.servers import S3Address

pytestmark = pytest.mark.services
H, GROUP, NUM_GROUPS = 2, 2, 2
TTL_S = 600.0


@pytest.fixture
def services(
    control_redis_url: str,
    payload_redis_url: str,
    s3: S3Address,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Services]:
    monkeypatch.setattr(grading, "reach", lambda failpoint: None)
    # Hints go nowhere: the ledger must do without them.
    app = Celery("hints", broker="memory://", set_as_current=False)
    monkeypatch.setattr(dispatch, "current_app", app)
    (tmp_path / "key").write_bytes(b"the platform's key")
    found = connect(
        Settings(
            redis_url=control_redis_url,
            payload_url=payload_redis_url,
            s3_endpoint=s3.endpoint,
            s3_access_key=s3.access_key,
            s3_secret_key=s3.secret_key,
            s3_bucket=s3.bucket,
            signing_key_file=tmp_path / "key",
            slice_s=0.3,
        )
    )
    ledger = Ledger.connect(control_redis_url, test_clock=True)
    ledger.load()
    ledger.register_base_model("tiny", {})
    object.__setattr__(found, "ledger", ledger)
    yield found
    ledger.load()
    found.payloads.close()
    found.emitter.close()
    ledger.close()
    found.objects.close()
    for client in found.payload_clients:
        client.close()


GRPO = {
    "algorithm": {"kind": "grpo", "scale": False},
    "rollout": {"num_envs": 4, "group_size": GROUP, "whole_episodes": True},
}


def start(services: Services, *, run: str = "r", **changes: Any) -> str:
    raw = {
        "kind": "rl", "policy": "p", "init_from": "p/x/1", "updates": 500,
        "environment": {"id": "tabletop/reach"}, "limits": {"max_in_flight": 64},
        "max_policy_staleness": 1000, "max_dropped": 1000, **GRPO, **changes,
    }  # fmt: skip
    spec = parse_spec(raw)
    content = canonical_json(spec.model_dump(mode="json"))
    services.objects.put(spec_key("a", run), content)
    fields = ledger_fields("a", spec, content=content, schema_signature="s" * 64, teacher="")
    services.ledger.submit(run, {**fields, "max_in_flight": 500}, max_pending=9)
    services.ledger.prepared(run, total_positions=0, total_steps=500)
    assert services.ledger.admit(run, max_running=9) == "running"
    return run


def columns(rewards: Sequence[float]) -> dict[str, Any]:
    """One episode per reward: one decision, whose first action earns it, and an end."""
    num = len(rewards)
    earned = np.zeros((2 * num, H), np.float32)
    earned[::2, 0] = rewards
    is_transition = np.tile([True, False], num)
    return {
        "rewards": earned,
        "actions_is_pad": np.repeat(~is_transition[:, None], H, axis=1),
        "executed_actions": np.zeros((2 * num, H, 1), np.float32),
        "is_transition": is_transition,
        "next_row": np.where(is_transition, np.arange(2 * num) + 1, -1),
        "terminated": is_transition,
        "episode": np.repeat(np.arange(num), 2),
        "log_prob": np.full((2 * num, H), -1.0, np.float32),
    }


def roll_out(services: Services, run: str, rewards: Sequence[float] = (1, 0, 2, 0)) -> TrainingJob:
    """What a rollout leaves behind."""
    limits = ReserveLimits(tenant_rollouts=999, rollouts=999)
    job = services.ledger.reserve(run, lease_s=60, limits=limits)
    assert isinstance(job, TrainingJob)
    services.payloads.put(job.partition_id, "a", columns(rewards), ttl_s=TTL_S)
    episodes = [
        {"episode": at, "group": at // GROUP, "success": one > 0, "total_reward": float(one),
         "num_steps": 1}
        for at, one in enumerate(rewards)
    ]  # fmt: skip
    services.ledger.mark(
        job, state_after(job.lifecycle, JobState.RESERVED), sample_count=len(rewards),
        episodes=json.dumps(episodes),
    )  # fmt: skip
    return job


def state_of(services: Services, job: TrainingJob) -> str:
    return services.ledger.descriptor(job.job_id)["state"]


def advantages_of(services: Services, job: TrainingJob) -> list[float]:
    """Of the episodes' first actions."""
    found = services.payloads.arrays(job.partition_id, "a", ["advantages"])["advantages"]
    return [float(one) for one in found[::2, 0]]


def use_grader(
    monkeypatch: pytest.MonkeyPatch, grade: Any, columns: tuple[str, ...] = ()
) -> dict[str, Any]:
    monkeypatch.setitem(GRADERS, "test@1", Grader(columns=columns, grade=grade))  # type: ignore[arg-type]
    return {"kind": "grader", "name": "test@1", "deadline_s": 20.0}


def test_grades_take_the_place_of_the_groups_rewards(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def upside_down(group: Sequence[EpisodeRows], options: Mapping[str, float]) -> list[float]:
        assert {"rewards"} == {name for one in group for name in one.columns}
        return [-10.0 * float(one.columns["rewards"].sum()) for one in group]

    run = start(services, reward=use_grader(monkeypatch, upside_down, ("rewards",)))
    job = roll_out(services, run)
    assert advantages.compute_ready(services, "adv") == 0  # it waits for its grades
    assert grading.grade_waiting(services, "g") == 1
    assert advantages.compute_ready(services, "adv") == 1
    assert state_of(services, job) == "ready"
    assert advantages_of(services, job) == [-5.0, 5.0, -10.0, 10.0]
    assert "unscored" not in services.ledger.workload(run)


@pytest.mark.parametrize("policy", ["keep_reward", "drop", "fail"])
@pytest.mark.parametrize("how", ["raises", "nan", "short", "hangs"])
def test_a_grader_that_fails_costs_what_the_spec_says_b39(
    services: Services, monkeypatch: pytest.MonkeyPatch, policy: str, how: str
) -> None:
    def broken(group: Sequence[EpisodeRows], options: Mapping[str, float]) -> list[float]:
        if how == "raises":
            raise KeyError("no such thing")
        if how == "hangs":
            threading.Event().wait(30)
        return [float("nan")] * len(group) if how == "nan" else []

    within = {"deadline_s": 1.0} if how == "hangs" else {}
    reward = {**use_grader(monkeypatch, broken), "on_failure": policy, **within}
    run = start(services, reward=reward)
    job = roll_out(services, run)
    grading.grade_waiting(services, "g")
    advantages.compute_ready(services, "adv")
    w = services.ledger.workload(run)
    assert w["unscored"] == "1"
    if policy == "keep_reward":
        assert advantages_of(services, job) == [0.5, -0.5, 1.0, -1.0]
    elif policy == "drop":
        assert (state_of(services, job), w["dropped"], w["state"]) == ("dropped", "1", "running")
    else:
        assert w["state"] == "failed"
        assert "position 0 has no scores" in w["reason"]


def test_what_a_killed_grader_wrote_stays_and_is_graded_once_f45(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between its grades and the ledger: the next one finds them there."""
    calls = []

    def counting(group: Sequence[EpisodeRows], options: Mapping[str, float]) -> list[float]:
        calls.append(len(group))
        return [float(one.meta.episode + 100 * len(calls)) for one in group]

    run = start(services, reward={**use_grader(monkeypatch, counting), "deadline_s": 600.0})
    job = roll_out(services, run)
    killed = services.ledger.lease_stage(Stage.SCORES, "killed", lease_s=1)
    assert killed is not None
    grading._write_grades(services, killed)
    services.ledger.client.incrby(TEST_CLOCK_KEY, 2000)
    services.ledger.due()
    assert grading.grade_waiting(services, "g") == 1
    advantages.compute_ready(services, "adv")
    assert calls == [GROUP] * NUM_GROUPS
    assert advantages_of(services, job) == [-0.5, 0.5, -0.5, 0.5]


def test_grades_that_come_too_late_count_for_nothing(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(group: Sequence[EpisodeRows], options: Mapping[str, float]) -> list[float]:
        services.ledger.client.set(TEST_CLOCK_KEY, 21_000)
        services.ledger.due()  # the reconciler, meanwhile
        return [-1000.0 * one.meta.score for one in group]

    run = start(services, reward={**use_grader(monkeypatch, late), "on_failure": "keep_reward"})
    job = roll_out(services, run)
    grading.grade_waiting(services, "g")
    assert GRADE in services.payloads.metadata(job.partition_id, "a")
    advantages.compute_ready(services, "adv")
    assert advantages_of(services, job) == [0.5, -0.5, 1.0, -1.0]


def test_grading_goes_on_beside_rollouts(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that waits for its grader holds no rollout's place."""
    reward = use_grader(monkeypatch, lambda group, options: [0.0] * len(group))
    run = start(services, reward=reward)
    for _ in range(3):
        job = services.ledger.reserve(
            run, lease_s=60, limits=ReserveLimits(tenant_rollouts=1, rollouts=1)
        )
        assert isinstance(job, TrainingJob)
        services.ledger.mark(job, JobState.NEEDS_SCORES, episodes="[]")


def test_advantages_of_a_killed_worker_are_computed_whole_and_identical_f45(
    services: Services,
) -> None:
    run = start(services)
    job = roll_out(services, run)
    killed = services.ledger.lease_stage(Stage.ADVANTAGES, "killed", lease_s=1)
    assert killed is not None
    advantages._write_advantages(services, killed)  # and dies before it tells
    before = advantages_of(services, job)
    services.ledger.client.incrby(TEST_CLOCK_KEY, 2000)
    services.ledger.due()
    assert advantages.compute_ready(services, "adv") == 1
    assert (state_of(services, job), advantages_of(services, job)) == ("ready", before)


def test_a_group_that_lacks_a_member_is_judged_by_those_there_f46(services: Services) -> None:
    """One of a group's episodes never came: the rest are compared with each other."""
    run = start(services)
    job = roll_out(services, run, rewards=(1, 0, 3))
    advantages.compute_ready(services, "adv")
    assert advantages_of(services, job) == [0.5, -0.5, 0.0]


def test_128_rollouts_fan_in_once_each_through_dropped_connections_pf28(
    services: Services, control_redis_url: str
) -> None:
    run = start(services)
    jobs = [roll_out(services, run) for _ in range(128)]
    with redis.Redis.from_url(control_redis_url) as admin:
        done = 0
        for _ in range(40):
            if done < 5:
                admin.client_kill_filter(_type="normal", skipme=True)
                done += 1
            with contextlib.suppress(UnavailableError):
                advantages.compute_ready(services, "adv")
            services.ledger.client.incrby(TEST_CLOCK_KEY, 11_000)  # leases of lost answers
            with contextlib.suppress(UnavailableError):
                services.ledger.due()
            states = {state_of(services, job) for job in jobs}
            if states == {"ready"}:
                break
    assert states == {"ready"}
    ready = [services.ledger.descriptor(job.job_id)["ready_seq"] for job in jobs]
    assert len(set(ready)) == 128
    assert services.ledger.client.zcard("vla:stage:advantages") == 0


def test_hints_that_come_twice_to_several_workers_compute_each_job_once_pf28(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    graded: list[float] = []

    def note(group: Sequence[EpisodeRows], options: Mapping[str, float]) -> list[float]:
        graded.append(1.0)
        return [one.meta.score for one in group]

    run = start(services, reward={**use_grader(monkeypatch, note), "deadline_s": 600.0})
    jobs = [roll_out(services, run) for _ in range(12)]
    with ThreadPoolExecutor(6) as workers:
        for stage, work in (
            (Stage.SCORES, grading.grade_waiting),
            (Stage.ADVANTAGES, advantages.compute_ready),
        ):
            while (stage, "") in services.ledger.due().stages:
                list(workers.map(lambda name, work=work: work(services, name), "abcdef"))
    assert len(graded) == len(jobs) * NUM_GROUPS
    assert {state_of(services, job) for job in jobs} == {"ready"}
    assert all(advantages_of(services, job) == [0.5, -0.5, 1.0, -1.0] for job in jobs)


def test_an_outage_costs_a_producer_no_attempt(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody answers the rollout's predictions: that is not the run's fault, however often."""

    def nobody_predicts(*_: Any) -> None:
        raise UnavailableError("no inference worker answers")

    run = start(services)
    monkeypatch.setattr(rollouts, "_roll_out", nobody_predicts)
    for _ in range(5):
        with pytest.raises(UnavailableError):
            rollouts.produce(services, "a", run, play=nobody_predicts)  # type: ignore[arg-type]
    assert services.ledger.workload(run)["state"] == "running"
    assert not services.ledger.client.scard("vla:rollouts")


def test_a_reward_that_is_no_number_ends_its_own_run_only_b39(services: Services) -> None:
    bad, good = start(services, run="bad"), start(services, run="good", policy="q")
    roll_out(services, bad, rewards=(1, 0, 0, 0))
    job = services.ledger.reserve(
        bad, lease_s=60, limits=ReserveLimits(tenant_rollouts=99, rollouts=99)
    )
    assert isinstance(job, TrainingJob)
    services.payloads.put(job.partition_id, "a", columns([np.nan, 0, 0, 0]), ttl_s=TTL_S)
    services.ledger.mark(job, JobState.NEEDS_ADVANTAGES, episodes="[]")
    other = roll_out(services, good)
    advantages.compute_ready(services, "adv")
    assert services.ledger.workload(bad)["state"] == "failed"
    assert "not finite" in services.ledger.workload(bad)["reason"]
    assert state_of(services, other) == "ready"


def test_an_update_reads_the_rows_and_columns_that_train_something(services: Services) -> None:
    """Nothing of a group whose scores are equal, no final observation, no pixels where features
    were kept."""
    training = pytest.importorskip("vla_platform.gpu_workers.rollout_training")
    backbone = importlib.import_module("vla_platform.gpu_workers.backbone")
    models = importlib.import_module("vla_platform.gpu_workers.training")
    device = importlib.import_module("vla_platform.gpu_workers.device")
    run = start(services)
    job = roll_out(services, run, rewards=(1, 1, 2, 0))
    late = {
        "latent": np.arange(8.0).reshape(8, 1, 1, 1), "images": np.zeros((8, 1, 4, 4, 3), np.uint8),
        "feature": [np.full((at + 1, 2), at, np.float32) for at in range(8)],
    }  # fmt: skip
    services.payloads.put(job.partition_id, "a", late, ttl_s=TTL_S)
    advantages.compute_ready(services, "adv")
    service = models.TrainingModelService(backbone.Backbone.load("tiny-random"))
    rollouts = training.RolloutTraining(services, service, device.DeviceTurns())
    spec = load_rl_spec(services, "a", run)
    item = rollouts.fetch(job, spec.algorithm)
    found = item.columns
    assert item.source is not None
    assert item.source.rows == ((4, 6),)
    assert list(found["row"]) == [4, 6]
    assert [len(one) for one in found["feature"]] == [5, 7]
    assert found["latent"].reshape(-1).tolist() == [4.0, 6.0]
    assert found["advantages"][:, 0].tolist() == [1.0, -1.0]
    assert "images" not in found
    assert "rewards" not in found
    rollouts.close()
