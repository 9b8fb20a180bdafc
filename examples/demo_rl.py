"""The tenants of `make demo` that learn by reward: a short fine-tuning, then PPO or GRPO.

The task is `tabletop/reach` from one camera and the gripper's position, without grasping, with a
time limit; touching the block counts (`reach_radius`: half a block and the gripper's own width).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learning import Lesson

from vla_platform.datasets.recording import make_demonstrations
from vla_platform.envs.tabletop import Tabletop

DATASET = "touch"
REACH_RADIUS = 0.07
OPTIONS: dict[str, Any] = {
    "cameras": ["top"],
    "gripper": False,
    "max_steps": 16,
    "reach_radius": REACH_RADIUS,
    "reward": "dense",
}
HOST_LIMITS = {"VLA_MAX_SESSIONS": "320", "VLA_MAX_SESSIONS_PER_TENANT": "128"}
"""Sessions of the environment host, which are cheap here."""

FINE_TUNING: dict[str, Any] = {
    "kind": "sft",
    "policy": "touch-demos",
    "dataset": {"path": DATASET, "heldout_samples": 16},
    "steps": 100,
    "batch_size": 16,
    "optimizer": {"lr": 1e-3, "schedule": {"kind": "cosine", "warmup_steps": 10}},
}
LEARNING: dict[str, dict[str, Any]] = {
    "ppo-lab": {
        "rollout": {"num_envs": 64, "horizon": 4},
        "algorithm": {"kind": "ppo", "epochs": 4, "minibatches": 4, "gamma": 0.9},
        "optimizer": {"lr": 2e-4, "schedule": {"kind": "linear", "min_lr": 4e-5}},
        "updates": 60,
    },
    "grpo-lab": {
        "rollout": {"num_envs": 128, "horizon": 4, "group_size": 8, "whole_episodes": True},
        # Not scaled: groups that nearly all succeed differ by what does not matter.
        "algorithm": {"kind": "grpo", "epochs": 2, "minibatches": 4, "scale": False},
        "optimizer": {"lr": 2.5e-4, "schedule": {"kind": "linear", "min_lr": 1e-4}},
        "updates": 52,
    },
}
# Wide enough to find better actions with few episodes.
MODULES: dict[str, dict[str, Any]] = {
    "ppo-lab": {"kind": "oft", "chunk": 4, "initial_log_std": -1.2},
    "grpo-lab": {"kind": "oft", "chunk": 4, "initial_log_std": -0.7},
}
LESSONS = {
    tenant: Lesson(
        environment="tabletop/reach",
        options=OPTIONS,
        fine_tuning={**FINE_TUNING, "action_module": MODULES[tenant]},
        learning={**spec, "policy": "touch"},
    )
    for tenant, spec in LEARNING.items()
}


def make_dataset(folder: Path) -> None:
    """Demonstrations with disturbed motions, so that they show how to come back."""
    env = Tabletop(cameras=("top",), gripper=False, reach_radius=REACH_RADIUS)
    make_demonstrations(folder / DATASET, env=env, episodes=100, seed=3, noise=0.3)
