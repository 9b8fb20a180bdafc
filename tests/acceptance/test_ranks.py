"""A worker that trains on two ranks, and loses one: real processes, two tenants, SFT and RL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.acceptance.stacks import (
    RANDOM,
    WORKERS,
    Stack,
    at_step,
    demonstrate,
    losses,
    sft,
    started,
    with_tabletop,
)
from tests.waiting import wait_until
from vla_platform.client import Platform, Run

STEPS, UPDATES = 60, 3
TIMEOUT_S = 150
FLOW = {"kind": "flow_matching", "chunk": 4, "hidden_dim": 32, "num_layers": 2, "num_heads": 2}
Platforms = dict[str, Platform]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("ranks")
    demonstrate(folder, episodes=6)
    environment = {**RANDOM, "VLA_TRAINING_RANKS": "2"}
    with started(folder, environment=environment, roles=with_tabletop(folder, WORKERS)) as found:
        yield found
    wait_until(lambda: followers_of(found.var) == [], timeout_s=10)


@pytest.fixture(scope="module")
def platforms(stack: Stack) -> Iterator[Platforms]:
    with Platform(stack.admin.add("a")) as a, Platform(stack.admin.add("b")) as b:
        yield {"a": a, "b": b}


def followers_of(var: Path) -> list[psutil.Process]:
    """Every follower of this stack, whoever its parent is."""
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            if "ranks.follower" in command and process.environ().get("VLA_STACK") == str(var):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def tuned(stack: Stack, platforms: Platforms) -> dict[str, Run]:
    """A run of each tenant, during which the follower dies."""
    runs = {
        name: platforms[name].submit(
            sft("reach", steps=STEPS, gradient_accumulation=2, action_module=module)
        )
        for name, module in (("a", {"kind": "oft", "chunk": 4}), ("b", FLOW))
    }
    at_step(runs["a"], 15)
    (follower,) = followers_of(stack.var)
    follower.kill()
    for run in runs.values():
        run.result(TIMEOUT_S)
    return runs


def test_a_follower_dies_and_no_step_is_lost_or_doubled(
    stack: Stack, platforms: Platforms, tuned: dict[str, Run]
) -> None:
    for tenant, run in tuned.items():
        assert run.status().step == STEPS
        assert list(stack.admin.ledger.steps(run.id)) == list(range(1, STEPS + 1))
        assert platforms[tenant].verify(run.status().checkpoint or "").step == STEPS
        found = list(losses(run).values())
        assert sum(found[-5:]) < sum(found[:5])
    assert len(followers_of(stack.var)) == 1
    log = (stack.var / "logs" / "gpu.log").read_text()
    assert "action=rank_lost" in log
    assert log.count("action=ranks_ready num_ranks=2") == 2


def test_reinforcement_learning_goes_through_both_ranks(
    stack: Stack, platforms: Platforms, tuned: dict[str, Run]
) -> None:
    """One tenant with the features that its rollouts kept, the other encodes again."""
    runs = {
        name: platforms[name].submit(
            {
                "kind": "rl",
                "policy": f"{name}-learns",
                "init_from": tuned[name].status().checkpoint,
                "environment": {
                    "id": "tabletop/reach", "options": {"max_steps": 16, "reward": "dense"},
                },
                "rollout": {"num_envs": 4, "horizon": 4, "group_size": 2, "whole_episodes": True},
                "algorithm": {"kind": algorithm, "epochs": 2, "minibatches": 2},
                "updates": UPDATES,
                "encode_once": name == "a",
            }
        )
        for name, algorithm in (("a", "ppo"), ("b", "grpo"))
    }  # fmt: skip
    for name, run in runs.items():
        run.result(TIMEOUT_S)
        assert list(stack.admin.ledger.steps(run.id)) == list(range(1, UPDATES + 1))
        updates = [event for event in run.events(follow=False) if event["kind"] == "update"]
        assert [event["policy_version"] for event in updates] == [1, 2, 3]
        assert all((event["backbone_forwards"] > 0) == (name == "b") for event in updates)
        assert all(event["optimizer_steps"] == 4 for event in updates)
