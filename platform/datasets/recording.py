"""Demonstrations of the built-in task: an expert's episodes as a LeRobot v3.0 dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vla_platform.datasets.metadata import Feature
from vla_platform.datasets.video_writer import Codec
from vla_platform.datasets.writer import EpisodeData, write_dataset
from vla_platform.envs.tabletop import Tabletop
from vla_platform.errors import ConfigurationError

IMAGE_PREFIX = "observation.images."
STATE_KEY = "observation.state"
ACTION_KEY = "action"


def make_demonstrations(
    path: Path,
    *,
    env: Tabletop,
    episodes: int,
    seed: int,
    noise: float = 0.0,
    codec: Codec = "h264",
) -> None:
    """Record `episodes` successful episodes of the expert into the new folder `path`.

    The recorded action is the expert's; the executed one carries Gaussian noise of `noise`, so that
    the data shows how to come back (DART, Laskey et al. 2017). Equal arguments give equal bytes.
    """
    info = env.info
    features = {
        f"{IMAGE_PREFIX}{name}": Feature("video", (*size, 3)) for name, size in info.cameras.items()
    }
    features[STATE_KEY] = Feature("float32", (len(info.state_names),), info.state_names)
    features[ACTION_KEY] = Feature("float32", (len(info.action_names),), info.action_names)
    write_dataset(
        path,
        expert_episodes(env, episodes=episodes, seed=seed, noise=noise),
        fps=info.fps,
        features=features,
        robot_type=info.robot_type,
        codec=codec,
    )


def expert_episodes(
    env: Tabletop, *, episodes: int, seed: int, noise: float = 0.0
) -> Iterator[EpisodeData]:
    """Successful episodes of the expert; an episode that failed is drawn anew."""
    found = 0
    for attempt in range(10 * episodes):
        draws = np.random.default_rng((seed, attempt))
        recorded = _run_expert(env, draws, noise=noise)
        if recorded is not None:
            yield recorded
            found += 1
        if found == episodes:
            return
    raise ConfigurationError(f"the expert solved {found} of {10 * episodes} scenes")


def _run_expert(env: Tabletop, draws: np.random.Generator, *, noise: float) -> EpisodeData | None:
    observation = env.reset(int(draws.integers(2**31)))
    observations, actions = [], []
    while True:
        action = env.expert_action()
        observations.append(observation)
        actions.append(action)
        step = env.step(action + (noise * draws.standard_normal(len(action))).astype(np.float32))
        observation = step.observation
        if step.truncated:
            return None
        if step.terminated:
            break
    return EpisodeData(
        columns={
            STATE_KEY: np.stack([seen.state for seen in observations]),
            ACTION_KEY: np.stack(actions),
        },
        images={
            f"{IMAGE_PREFIX}{name}": np.stack([seen.images[name] for seen in observations])
            for name in env.info.cameras
        },
        task=observation.task,
    )
