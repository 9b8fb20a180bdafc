"""Episodes with rewards for the tests of offline RL: some by the expert, some that go astray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vla_platform.datasets.metadata import Feature
from vla_platform.datasets.writer import EpisodeData, write_dataset
from vla_platform.envs.tabletop import Tabletop


def write_mixed(path: Path, *, episodes: int = 6) -> None:
    """`next.reward` and `next.success` tell how each went."""
    env = Tabletop(max_steps=12, dense=True)
    cameras = {
        f"observation.images.{name}": Feature("video", (*size, 3))
        for name, size in env.info.cameras.items()
    }
    features = {
        **cameras,
        "observation.state": Feature("float32", (len(env.info.state_names),)),
        "action": Feature("float32", (len(env.info.action_names),)),
        "next.reward": Feature("float32", (1,)),
        "next.success": Feature("bool", (1,)),
    }
    made = [_played(env, seed) for seed in range(episodes)]
    write_dataset(path, made, fps=10.0, features=features, robot_type="tabletop")


def offline(**changes: Any) -> dict[str, Any]:
    """What makes an RL spec one that learns from the dataset `mixed`."""
    source = {"dataset": {"path": "mixed"}, "reward": "next.reward", "success": "next.success"}
    return {
        "environment": None,
        "data": {"sources": [source], "episodes_per_update": 2},
        "algorithm": {"kind": "awr", "epochs": 1, "minibatches": 2},
        "updates": 8,
        "limits": {"max_in_flight": 3},
        **changes,
    }


def _played(env: Tabletop, seed: int) -> EpisodeData:
    seen, over = env.reset(seed), False
    seens, actions, rewards, success = [], [], [], []
    while not over:
        action = env.expert_action() if seed % 2 else np.array([0.5, -0.5, -1.0], np.float32)
        seens.append(seen)
        actions.append(action)
        step = env.step(action)
        rewards.append([step.reward])
        success.append([bool(step.info["success"])])
        seen, over = step.observation, step.done
    return EpisodeData(
        columns={
            "observation.state": np.stack([one.state for one in seens]),
            "action": np.stack(actions),
            "next.reward": np.array(rewards, np.float32),
            "next.success": np.array(success),
        },
        images={
            f"observation.images.{name}": np.stack([one.images[name] for one in seens])
            for name in env.info.cameras
        },
        task=seens[0].task,
    )
