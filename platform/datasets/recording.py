"""Demonstrations: an expert's or a motion planner's episodes as a LeRobot v3.0 dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vla_platform.datasets.metadata import Feature
from vla_platform.datasets.video_writer import Codec
from vla_platform.datasets.writer import EpisodeData, write_dataset
from vla_platform.envs.base import Environment, Observation
from vla_platform.errors import ConfigurationError

Plan = Callable[[int], tuple[list[Observation], list[npt.NDArray[np.float32]]] | None]
"""Observations and actions of a solved episode with this seed, or None where it was not solved."""

IMAGE_PREFIX = "observation.images."
STATE_KEY = "observation.state"
ACTION_KEY = "action"


def make_demonstrations(
    path: Path,
    *,
    env: Environment,
    episodes: int,
    seed: int,
    noise: float = 0.0,
    codec: Codec = "h264",
    plan: Plan | None = None,
    on_episode: Callable[[int], None] | None = None,
) -> None:
    """Record `episodes` successful episodes into the new folder `path`.

    They come from `plan`, a motion planner, or from the environment's scripted expert. The recorded
    action is the expert's; the executed one carries Gaussian noise of `noise`, so that the data
    shows how to come back (DART, Laskey et al. 2017). Equal arguments give equal bytes. Raises
    `ConfigurationError` where there is no expert, or where it solves fewer than one scene in ten.
    """
    info = env.info
    features = {
        f"{IMAGE_PREFIX}{name}": Feature("video", (*size, 3)) for name, size in info.cameras.items()
    }
    features[STATE_KEY] = Feature("float32", (len(info.state_names),), info.state_names)
    features[ACTION_KEY] = Feature("float32", (len(info.action_names),), info.action_names)
    found = expert_episodes(env, episodes=episodes, seed=seed, noise=noise, plan=plan)
    write_dataset(
        path,
        _reported(found, on_episode),
        fps=info.fps,
        features=features,
        robot_type=info.robot_type,
        codec=codec,
    )


def expert_episodes(
    env: Environment, *, episodes: int, seed: int, noise: float = 0.0, plan: Plan | None = None
) -> Iterator[EpisodeData]:
    """Successful episodes of the expert; an episode that failed is drawn anew."""
    found = 0
    for attempt in range(10 * episodes):
        draws = np.random.default_rng((seed, attempt))
        if plan is None:
            solved = _run_expert(env, draws, noise=noise)
        else:
            solved = plan(int(draws.integers(2**31)))
        if solved is not None:
            yield _episode(env, *solved)
            found += 1
        if found == episodes:
            return
    raise ConfigurationError(f"the expert solved {found} of {10 * episodes} scenes")


def _reported(
    episodes: Iterator[EpisodeData], on_episode: Callable[[int], None] | None
) -> Iterator[EpisodeData]:
    for count, episode in enumerate(episodes, start=1):
        yield episode
        if on_episode is not None:
            on_episode(count)


def _run_expert(
    env: Environment, draws: np.random.Generator, *, noise: float
) -> tuple[list[Observation], list[npt.NDArray[np.float32]]] | None:
    observation = env.reset(int(draws.integers(2**31)))
    observations, actions = [], []
    low, high = env.info.action_low, env.info.action_high
    while True:
        action = env.expert_action()
        if action is None:
            raise ConfigurationError(f"{type(env).__name__} has no scripted expert for this task")
        observations.append(observation)
        actions.append(action)
        moved = action + (noise * draws.standard_normal(len(action))).astype(np.float32)
        step = env.step(np.clip(moved, low, high))
        observation = step.observation
        if step.done:
            return (observations, actions) if step.info.get("success") else None


def _episode(
    env: Environment,
    observations: list[Observation],
    actions: list[npt.NDArray[np.float32]],
) -> EpisodeData:
    return EpisodeData(
        columns={
            STATE_KEY: np.stack([seen.state for seen in observations]),
            ACTION_KEY: np.stack(actions),
        },
        images={
            f"{IMAGE_PREFIX}{name}": np.stack([seen.images[name] for seen in observations])
            for name in env.info.cameras
        },
        task=observations[-1].task,
    )
