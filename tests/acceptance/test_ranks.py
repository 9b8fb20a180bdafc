"""A worker that trains on two ranks, and loses one: real processes, two tenants, SFT and RL."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from vla_platform.cli.tenants import Operator, operator
from vla_platform.client import Platform, Run
from vla_platform.datasets.recording import make_demonstrations
from vla_platform.envs.tabletop import Tabletop
from vla_platform.stack import operate
from vla_platform.stack.roles import ROLES, environment_roles

STEPS, UPDATES = 60, 3
TIMEOUT_S = 150
FLOW = {"kind": "flow_matching", "chunk": 4, "hidden_dim": 32, "num_layers": 2, "num_heads": 2}
Stack = tuple[Path, Operator, dict[str, Platform]]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("ranks")
    make_demonstrations(folder / "data" / "reach", env=Tabletop(), episodes=6, seed=0)
    var = folder / "var"
    environment = {
        **os.environ, "VLA_BASE_MODELS": "tiny=tiny-random", "VLA_TRAINING_RANKS": "2",
    }  # fmt: skip
    roles = (*ROLES, *environment_roles(1, {"tabletop": 1.0}, var))
    try:
        operate.up(
            var, environment=environment, dataset_roots=str(folder / "data"), roles=roles,
            timeout_s=180,
        )  # fmt: skip
        with operator(var) as admin:
            platforms = {name: Platform(admin.add(name)) for name in ("a", "b")}
            yield var, admin, platforms
            for platform in platforms.values():
                platform.close()
    finally:
        operate.down(var)
    assert followers_of(var) == []


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


def sft(module: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "sft",
        "policy": "reach",
        "dataset": {"path": "reach", "heldout_samples": 4},
        "steps": STEPS,
        "batch_size": 6,
        "gradient_accumulation": 2,
        "action_module": module,
        "checkpoint": {"every_steps": 10},
    }


@pytest.fixture(scope="module")
def tuned(stack: Stack) -> dict[str, Run]:
    """A run of each tenant, during which the follower dies."""
    var, _, platforms = stack
    runs = {
        name: platforms[name].submit(sft(module))
        for name, module in (("a", {"kind": "oft", "chunk": 4}), ("b", FLOW))
    }
    (follower,) = followers_of(var)
    for event in runs["a"].events():
        if event["kind"] == "step" and event["step"] >= 15:
            break
    follower.kill()
    for run in runs.values():
        run.result(TIMEOUT_S)
    return runs


def test_a_follower_dies_and_no_step_is_lost_or_doubled(
    stack: Stack, tuned: dict[str, Run]
) -> None:
    var, admin, platforms = stack
    for tenant, run in tuned.items():
        assert run.status().step == STEPS
        assert list(admin.ledger.steps(run.id)) == list(range(1, STEPS + 1))
        assert platforms[tenant].verify(run.status().checkpoint or "").step == STEPS
        losses = [event["loss"] for event in run.metrics() if event["kind"] == "step"]
        assert sum(losses[-5:]) < sum(losses[:5])
    (again,) = followers_of(var)
    assert time.time() - again.create_time() < TIMEOUT_S
    log = (var / "logs" / "gpu.log").read_text()
    assert "action=rank_lost" in log
    assert log.count("action=ranks_ready num_ranks=2") == 2


def test_reinforcement_learning_goes_through_both_ranks(
    stack: Stack, tuned: dict[str, Run]
) -> None:
    _, admin, platforms = stack
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
        assert list(admin.ledger.steps(run.id)) == list(range(1, UPDATES + 1))
        updates = [event for event in run.events(follow=False) if event["kind"] == "update"]
        assert [event["policy_version"] for event in updates] == [1, 2, 3]
        assert all((event["backbone_forwards"] > 0) == (name == "b") for event in updates)
        assert all(event["optimizer_steps"] == 4 for event in updates)
