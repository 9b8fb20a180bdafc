"""Reinforcement learning as a closed loop: real processes, real environments, several tenants.

The random base model: what must hold here are versions, counts and equality, not success.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.acceptance.recorded import offline, write_mixed
from tests.acceptance.stacks import (
    RANDOM,
    WORKERS,
    Stack,
    at_step,
    demonstrate,
    sft,
    started,
    with_tabletop,
)
from vla_platform.client import Platform, Run
from vla_platform.errors import NotFoundError, SpecError, WorkloadFailedError
from vla_storage.errors import CheckpointNotFoundError

UPDATES = 4
TIMEOUT_S = 180
SMALL = {"path": "reach", "heldout_samples": 4}
Running = tuple[Stack, dict[str, Platform]]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("rl")
    demonstrate(folder, episodes=6)
    write_mixed(folder / "data" / "mixed")
    with (
        started(folder, environment=RANDOM, roles=with_tabletop(folder, WORKERS)) as found,
        Platform(found.admin.add("a")) as a,
        Platform(found.admin.add("b")) as b,
    ):
        yield found, {"a": a, "b": b}


@pytest.fixture(scope="module")
def tuned(stack: Running) -> dict[str, str]:
    """A fine-tuned checkpoint of each tenant; `b` has the flow-matching module."""
    platforms = stack[1]
    flow = {"kind": "flow_matching", "chunk": 4, "hidden_dim": 32, "num_layers": 2, "num_heads": 2}
    runs = {
        name: platforms[name].submit(
            sft("reach", steps=10, action_module=module, dataset=SMALL, checkpoint={})
        )
        for name, module in (("a", {"kind": "oft", "chunk": 4}), ("b", flow))
    }
    return {name: str(run.result(TIMEOUT_S).checkpoint) for name, run in runs.items()}


def spec(policy: str, init_from: str, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "rl",
        "policy": policy,
        "init_from": init_from,
        "environment": {"id": "tabletop/reach", "options": {"max_steps": 16, "reward": "dense"}},
        "rollout": {"num_envs": 4, "horizon": 4},
        "algorithm": {"kind": "ppo", "epochs": 2, "minibatches": 2},
        "updates": UPDATES,
        "limits": {"max_in_flight": 1},
        **changes,
    }


GRPO = {
    "algorithm": {"kind": "grpo", "epochs": 1, "minibatches": 2},
    "rollout": {"num_envs": 4, "horizon": 4, "group_size": 2, "whole_episodes": True},
}


def updates(run: Run) -> list[dict[str, Any]]:
    return [event for event in run.events(follow=False) if event["kind"] == "update"]


@pytest.fixture(scope="module")
def alone(stack: Running, tuned: dict[str, str]) -> Run:
    run = stack[1]["a"].submit(spec("alone", tuned["a"]))
    run.result(TIMEOUT_S)
    return run


def test_a_run_publishes_a_version_with_every_update(stack: Running, alone: Run) -> None:
    running, platforms = stack
    status = alone.status()
    assert (status.step, status.policy_version) == (UPDATES, UPDATES)
    assert list(running.admin.ledger.steps(alone.id)) == list(range(1, UPDATES + 1))
    every = updates(alone)
    assert [event["policy_version"] for event in every] == [1, 2, 3, 4]
    assert [event["backbone_forwards"] for event in every] == [0] * UPDATES  # encoded once
    manifests = platforms["a"].checkpoints("alone", alone.id)
    assert manifests[-1].policy_version == UPDATES


def test_the_first_epoch_meets_the_policy_that_acted(stack: Running, tuned: dict[str, str]) -> None:
    """One pass in one minibatch: the ratio is 1, so nothing diverges and nothing is clipped."""
    one_pass = {"kind": "ppo", "epochs": 1, "minibatches": 1}
    run = stack[1]["a"].submit(spec("once", tuned["a"], algorithm=one_pass, updates=2))
    run.result(TIMEOUT_S)
    assert [event["clip_fraction"] for event in updates(run)] == [0.0, 0.0]
    assert max(event["approx_kl"] for event in updates(run)) < 1e-5


def test_encoding_again_gives_the_same_numbers(
    stack: Running, tuned: dict[str, str], alone: Run
) -> None:
    run = stack[1]["a"].submit(spec("recomputed", tuned["a"], encode_once=False))
    run.result(TIMEOUT_S)
    assert min(event["backbone_forwards"] for event in updates(run)) > 0
    for one, other in zip(updates(run), updates(alone), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-5)


def test_beside_others_equals_alone(stack: Running, tuned: dict[str, str], alone: Run) -> None:
    """Another tenant's GRPO and a fine-tuning run at the same time; parameters are equal."""
    running, platforms = stack
    others = [
        platforms["b"].submit(spec("noise", tuned["b"], **GRPO)),
        platforms["b"].submit(sft("filler", steps=200, dataset=SMALL, checkpoint={})),
    ]
    run = platforms["a"].submit(spec("beside", tuned["a"]))
    assert run.result(TIMEOUT_S).policy_version == UPDATES
    assert running.module("a", run) == running.module("a", alone)
    for other in others:
        other.result(TIMEOUT_S)


def test_grpo_trains_a_flow_matching_policy(stack: Running, tuned: dict[str, str]) -> None:
    run = stack[1]["b"].submit(spec("grpo", tuned["b"], **GRPO))
    assert run.result(TIMEOUT_S).step == UPDATES


def test_the_actors_forward_changes_nothing_on_fresh_samples(
    stack: Running, tuned: dict[str, str], alone: Run
) -> None:
    forward = {"kind": "ppo", "epochs": 2, "minibatches": 2, "actor_forward": True}
    run = stack[1]["a"].submit(spec("forward", tuned["a"], algorithm=forward))
    run.result(TIMEOUT_S)
    for one, other in zip(updates(run), updates(alone), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("role", ["gpu", "sft", "env-tabletop-1"])
def test_a_killed_worker_loses_no_update_f45_f53(
    stack: Running, tuned: dict[str, str], alone: Run, role: str
) -> None:
    running, platforms = stack
    run = platforms["a"].submit(spec(f"killed-{role}", tuned["a"]))
    at_step(run, 0, kind="update")
    running.kill(role)
    assert run.result(TIMEOUT_S).step == UPDATES
    assert list(running.admin.ledger.steps(run.id)) == list(range(1, UPDATES + 1))
    assert running.module("a", run) == running.module("a", alone)


def test_a_grader_rewards_from_a_task_of_its_own(stack: Running, tuned: dict[str, str]) -> None:
    """Its grades are told, and change what is learnt; a second run learns the same."""
    running, platforms = stack
    reward = {"kind": "grader", "name": "rank@1"}
    runs = [platforms["a"].submit(spec(f"graded-{at}", tuned["a"], reward=reward, **GRPO))
            for at in (1, 2)]  # fmt: skip
    plain = platforms["a"].submit(spec("ungraded", tuned["a"], **GRPO))
    for run in (*runs, plain):
        assert run.result(TIMEOUT_S).step == UPDATES
    told = [event for event in runs[0].events(follow=False) if event["kind"] == "grades"]
    assert {event["position"] for event in told} >= set(range(UPDATES))
    assert {event["grader"] for event in told} == {"rank@1"}
    assert {round(event["mean_grade"], 6) for event in told} == {0.5}
    assert running.module("a", runs[0]) == running.module("a", runs[1])
    assert running.module("a", runs[0]) != running.module("a", plain)
    assert runs[0].explain()["unscored"] == 0


@pytest.mark.parametrize("kind", ["awr", "ppo"])
def test_graders_and_advantage_weights_go_with_any_environment(
    stack: Running, tuned: dict[str, str], kind: str
) -> None:
    run = stack[1]["b"].submit(
        spec(f"graded-{kind}", tuned["b"], algorithm={"kind": kind, "epochs": 1}, updates=2,
             reward={"kind": "grader", "name": "smoothness@1", "on_failure": "fail"})
    )  # fmt: skip
    assert run.result(TIMEOUT_S).step == 2


DISTILLED = {"algorithm": {"kind": "reinforce", "gamma": 0.0, "normalize_advantages": False}}


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_a_teacher_rewards_what_it_would_have_done(
    stack: Running, tuned: dict[str, str], tenant: str
) -> None:
    """Both module kinds. From another policy there is something to learn, however it is named;
    from oneself there is not, up to rounding."""
    platform = stack[1][tenant]
    tutor = platform.submit(spec(f"tutor-{tenant}", tuned[tenant], updates=2))
    learnt = tutor.result(TIMEOUT_S)
    teachers = [
        {"policy": f"tutor-{tenant}", "version": learnt.checkpoint},
        {"policy": f"tutor-{tenant}", "version": learnt.policy_version},
        {"policy": "reach", "version": tuned[tenant]},
    ]
    pulls = []
    for at, teacher in enumerate(teachers):
        reward = {"kind": "distillation", "teacher": teacher, "on_failure": "fail"}
        run = platform.submit(
            spec(f"pupil-{tenant}-{at}", tuned[tenant], reward=reward, updates=1, **DISTILLED)
        )
        assert run.result(TIMEOUT_S).step == 1
        pulls.append(updates(run)[0]["grad_norm"])
    assert pulls[0] == pulls[1] > 100 * pulls[2]


def test_teachers_that_cannot_teach_are_refused(stack: Running, tuned: dict[str, str]) -> None:
    platforms = stack[1]
    for teacher, error in (
        ({"policy": "reach", "version": tuned["b"]}, CheckpointNotFoundError),
        ({"policy": "nobody", "version": 1}, NotFoundError),
        ({"policy": "other", "version": tuned["a"]}, SpecError),
        ({"policy": "reach", "version": tuned["a"], "base_model": "large"}, SpecError),
    ):
        reward = {"kind": "distillation", "teacher": teacher}
        with pytest.raises(error):
            platforms["a"].submit(spec("p", tuned["a"], reward=reward))


@pytest.mark.parametrize(
    ("role", "baseline", "in_flight"), [("gpu", "value", 1), ("gpu", "mean", 3), ("sft", "mean", 3)]
)
def test_recorded_episodes_train_by_the_same_path_and_resume_bit_by_bit(
    stack: Running, tuned: dict[str, str], role: str, baseline: str, in_flight: int
) -> None:
    """No environment, no staleness; a killed worker changes no bit, and checkpoints may be rare."""
    running, platforms = stack
    rare = offline(
        checkpoint={"every_steps": 3}, limits={"max_in_flight": in_flight},
        algorithm={"kind": "awr", "baseline": baseline, "epochs": 1, "minibatches": 2},
    )  # fmt: skip
    straight = platforms["a"].submit(spec(f"recorded-{role}-{baseline}", tuned["a"], **rare))
    assert straight.result(TIMEOUT_S).step == 8
    run = platforms["a"].submit(spec(f"recorded-killed-{role}-{baseline}", tuned["a"], **rare))
    at_step(run, 2, kind="update")
    running.kill(role)
    assert run.result(TIMEOUT_S).step == 8
    assert list(running.admin.ledger.steps(run.id)) == list(range(1, 9))
    assert running.module("a", run) == running.module("a", straight)


def test_a_flow_matching_policy_learns_from_two_sources_by_share(
    stack: Running, tuned: dict[str, str]
) -> None:
    running, platforms = stack
    source = {"dataset": {"path": "mixed"}, "success": "next.success"}
    data = {
        "sources": [
            {**source, "share": 3},
            {**source, "dataset": {"path": "mixed", "episodes": [1]}},
        ],
        "episodes_per_update": 4,
    }  # fmt: skip
    run = platforms["b"].submit(spec("two-sources", tuned["b"], **offline(data=data)))
    assert run.result(TIMEOUT_S).step == 8
    assert running.admin.ledger.client.hget("vla:usage:b", "jobs") is not None
    with pytest.raises(SpecError, match="makes its own samples"):
        run.train_batch({"is_transition": np.ones(1, bool)})


def test_recorded_data_that_do_not_fit_are_refused_by_name(
    stack: Running, tuned: dict[str, str]
) -> None:
    for dataset, name in (
        ({"path": "mixed", "action": "observation.state", "state": "next.reward"}, "state"),
        ({"path": "mixed", "state": "action", "action": "next.reward"}, "action"),
    ):
        data = {"sources": [{"dataset": dataset, "reward": "next.reward"}]}
        run = stack[1]["a"].submit(spec("misfit", tuned["a"], **offline(data=data)))
        with pytest.raises(WorkloadFailedError, match=name):
            run.result(TIMEOUT_S)


def test_what_teaches_nothing_ends_the_run_by_name(stack: Running, tuned: dict[str, str]) -> None:
    """A sparse reward that nobody finds: every rollout is dropped, and that has an end."""
    hopeless = {"id": "tabletop/reach", "options": {"max_steps": 4}}
    run = stack[1]["a"].submit(
        spec("hopeless", tuned["a"], environment=hopeless, max_dropped=3, **GRPO)
    )
    with pytest.raises(WorkloadFailedError, match="3 rollouts in a row taught nothing"):
        run.result(TIMEOUT_S)


def test_bad_requests_are_refused(stack: Running, tuned: dict[str, str]) -> None:
    platforms = stack[1]
    with pytest.raises(SpecError, match="did you mean"):
        platforms["a"].submit(spec("p", tuned["a"], environment={"id": "tabletop/raech"}))
    with pytest.raises(CheckpointNotFoundError):
        platforms["b"].submit(spec("p", tuned["a"]))
    with pytest.raises(SpecError, match="group_size"):
        platforms["a"].submit(spec("p", tuned["a"], algorithm={"kind": "grpo"}))


def example() -> Any:
    """examples/reinforce.py as a module."""
    path = Path(__file__).parents[2] / "examples" / "reinforce.py"
    found = importlib.util.spec_from_file_location("reinforce", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_an_algorithm_by_hand_gives_the_built_ins_update(
    stack: Running, tuned: dict[str, str]
) -> None:
    """Own sessions, own predictions, own advantages: equal bits for equal samples."""
    running, platforms = stack
    by_hand = example()
    platform, init = platforms["a"], tuned["a"]
    (whole,) = by_hand.train(platform, init, updates=1)  # as its user calls it
    assert np.isfinite(whole["loss"])
    episodes = by_hand.play(
        platform, policy="reach", version=init, seeds=[1, 2, 3], decisions=3,
        options={"max_steps": 12, "reward": "dense"},
    )  # fmt: skip
    size = running.admin.ledger.base_models()["tiny"]["image_size"]
    columns = by_hand.columns_of(episodes, cameras=("top", "wrist"), image_size=size)
    runs = [platform.submit(by_hand.spec(name, init, 1)) for name in ("own", "built-in")]
    own = runs[0].train_batch({**columns, **by_hand.advantages(columns)})
    built_in = runs[1].train_batch(columns)
    assert own["loss"] == built_in["loss"]
    assert own["policy_version"] == 1
    for run in runs:
        run.result(TIMEOUT_S)
    assert running.module("a", runs[0]) == running.module("a", runs[1])
    with pytest.raises(SpecError, match="makes its own samples"):
        platform.submit(spec("not-by-hand", init)).train_batch(columns)
