"""RL specs refuse at the edge what no update could mean."""

from __future__ import annotations

from typing import Any

import pytest

from vla_platform.errors import SpecError
from vla_platform.specs import (
    DistillationReward,
    EnvironmentReward,
    GraderReward,
    RLSpec,
    canonical_json,
    parse_spec,
    parse_spec_json,
)

GOOD: dict[str, Any] = {
    "kind": "rl",
    "policy": "p",
    "init_from": "p/run/1",
    "environment": {"id": "tabletop/reach"},
    "updates": 3,
}
NAN, INF = float("nan"), float("inf")


def rl(**changes: Any) -> RLSpec:
    spec = parse_spec({**GOOD, **changes})
    assert isinstance(spec, RLSpec)
    return spec


@pytest.mark.parametrize(
    "algorithm",
    [
        *[{"kind": "ppo", "gamma": bad} for bad in (1.0001, -0.1, NAN, True, "0.9")],
        *[{"kind": "ppo", "lam": bad} for bad in (-0.1, 1.5, INF)],
        *[{"kind": "ppo", "clip_low": bad} for bad in (NAN, 0.0, 1.0, -0.2)],
        *[{"kind": "ppo", "clip_high": bad} for bad in (NAN, INF, 0.0)],
        *[{"kind": "ppo", "target_kl": bad} for bad in (INF, NAN, 0.0, -1.0)],
        *[{"kind": "ppo", "epochs": bad} for bad in (0, 1.5, True, 10**9)],
        *[{"kind": "grpo", "pass_rates": bad} for bad in ([0.9, 0.1], [0.0], [0.0, 1.1])],
        {"kind": "grpo"},
        {"kind": "unheard_of"},
    ],
)
def test_numbers_out_of_range_are_refused_b14_b16(algorithm: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        rl(algorithm=algorithm)


@pytest.mark.parametrize(
    "changes",
    [
        {"updates": 0},
        {"max_policy_staleness": -1},
        {"rollout": {"num_envs": 6, "group_size": 4}},
        {"rollout": {"num_envs": 0}},
        {"rollout": {"horizon": 10**9}},
        {"checkpoint": {"every_steps": 2}},
        {"environment": {"id": "tabletop/reach", "options": {"f": {"__class__": "x"}}}},
    ],
)
def test_rollouts_that_cannot_be_are_refused_b12_b15_b19(changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        rl(**changes)


@pytest.mark.parametrize(
    "reward",
    [
        {"kind": "grader"},
        {"kind": "grader", "name": "rank"},
        {"kind": "grader", "name": "os.system@1"},
        {"kind": "grader", "name": "rank@1", "options": {"weight": NAN}},
        {"kind": "grader", "name": "rank@1", "deadline_s": 0},
        {"kind": "grader", "name": "rank@1", "deadline_s": 7200},
        {"kind": "grader", "name": "rank@1", "on_failure": "ignore"},
        {"kind": "distillation"},
        {"kind": "distillation", "teacher": {"policy": "../x", "version": 1}},
        {"kind": "distillation", "teacher": {"policy": "x"}},
        {"kind": "distillation", "teacher": {"policy": "x", "version": True}},
    ],
)
def test_rewards_that_nobody_could_compute_are_refused(reward: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        rl(reward=reward)


def test_rewards_are_told_apart_and_survive_the_round_trip() -> None:
    kinds = [
        ({"kind": "environment"}, EnvironmentReward),
        ({"kind": "grader", "name": "rank@1"}, GraderReward),
        ({"kind": "distillation", "teacher": {"policy": "x", "version": 3}}, DistillationReward),
        ({"kind": "distillation", "teacher": {"policy": "x", "version": "x/r/3"}},
         DistillationReward),
    ]  # fmt: skip
    for reward, kind in kinds:
        spec = rl(reward=reward)
        assert isinstance(spec.reward, kind)
        assert spec == parse_spec_json(canonical_json(spec.model_dump(mode="json")))
    assert isinstance(rl().reward, EnvironmentReward)


OFFLINE = {
    "environment": None,
    "data": {"sources": [{"dataset": {"path": "mixed"}, "reward": "next.reward"}]},
    "algorithm": {"kind": "awr"},
}


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"kind": "ppo"}},
        {"environment": {"id": "tabletop/reach"}},
        {"reward": {"kind": "distillation", "teacher": {"policy": "x", "version": 1}}},
        {"data": {"sources": []}},
        {"data": {"sources": [{"dataset": {"path": "mixed"}}]}},
        {"data": {**OFFLINE["data"], "episodes_per_update": 0}},
        {"data": {"sources": 2 * OFFLINE["data"]["sources"], "episodes_per_update": 1}},
        {"algorithm": {"kind": "awr", "temperature": 0}},
        {"algorithm": {"kind": "awr", "temperature": NAN}},
        {"algorithm": {"kind": "awr", "max_weight": 0.5}},
    ],
)
def test_offline_runs_that_cannot_learn_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        rl(**{**OFFLINE, **changes})


def test_offline_runs_choose_their_checkpoints_and_need_no_environment() -> None:
    spec = rl(**OFFLINE, checkpoint={"every_steps": 5})
    assert spec.data is not None
    assert spec == parse_spec_json(canonical_json(spec.model_dump(mode="json")))
    without = {name: value for name, value in GOOD.items() if name != "environment"}
    again = parse_spec({**without, **{k: v for k, v in OFFLINE.items() if k != "environment"}})
    assert isinstance(again, RLSpec)
    with pytest.raises(SpecError, match="environment is missing"):
        parse_spec(without)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({}, "needs a `kind`"),
        ({"kind": "sfft"}, "one of 'sft', 'rl'"),
        ({"kind": "evaluation", "policy": "p"}, "vla evaluations run"),
    ],
)
def test_what_kinds_of_spec_there_are_is_told(raw: dict[str, str], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        parse_spec(raw)
