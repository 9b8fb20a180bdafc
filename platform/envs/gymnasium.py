"""The harness `gymnasium`: any environment with a box of numbers as observation.

Discrete actions are one number per choice; the largest is taken. A gymnasium environment says
nothing of success: give `success_return`, or an `info["success"]` of its own is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Discrete

from vla_platform.envs.base import (
    Environment,
    EnvironmentInfo,
    Observation,
    Step,
    init_state_of,
)
from vla_platform.envs.options import GymnasiumOptions
from vla_platform.errors import ConfigurationError

DEFAULT_MAX_STEPS = 1000


class GymnasiumEnvironment(Environment):
    """Raises `ConfigurationError` for spaces that are no box, or actions neither box nor choice."""

    def __init__(self, env: gymnasium.Env[Any, Any], options: GymnasiumOptions) -> None:
        self._env = env
        self._options = options
        self._return = 0.0
        self._steps = 0
        self._solved = False
        spec = env.spec
        limit = options.max_steps or (spec.max_episode_steps if spec is not None else None)
        self._max_steps = limit or DEFAULT_MAX_STEPS
        seen, act = env.observation_space, env.action_space
        if not isinstance(seen, Box):
            raise ConfigurationError(f"observations are {seen}; only a box of numbers is taken")
        if isinstance(act, Discrete):
            low, high = np.zeros(int(act.n), np.float32), np.ones(int(act.n), np.float32)
        elif isinstance(act, Box) and act.dtype is not None and act.dtype.kind == "f":
            low, high = (np.asarray(edge, np.float32).reshape(-1) for edge in (act.low, act.high))
        else:
            raise ConfigurationError(f"actions are {act}; boxes of floats and choices are taken")
        size = (options.image_size, options.image_size)
        self._info = EnvironmentInfo(
            cameras={"main": size} if options.camera else {},
            state_names=tuple(f"s{at}" for at in range(int(np.prod(seen.shape)))),
            action_names=tuple(f"a{at}" for at in range(len(low))),
            action_low=low,
            action_high=high,
            fps=float(env.metadata.get("render_fps") or 30.0),
            max_steps=self._max_steps,
            robot_type="gymnasium",
            deterministic=not (spec is not None and spec.nondeterministic),
        )

    @property
    def info(self) -> EnvironmentInfo:
        return self._info

    def reset(self, seed: int, options: Mapping[str, Any] | None = None) -> Observation:
        init_state_of(options, 0)
        self._return, self._steps = 0.0, 0
        seen, info = self._env.reset(seed=seed)
        self._solved = bool(info.get("success", False))
        return self._observe(seen, render=True)

    def step(self, action: npt.NDArray[np.float32], *, render: bool = True) -> Step:
        space = self._env.action_space
        if isinstance(space, Discrete):
            taken: Any = int(space.start) + int(np.argmax(action))
        else:
            taken = action.reshape(space.shape or (-1,))
        seen, reward, terminated, truncated, info = self._env.step(taken)
        self._steps += 1
        self._return += float(reward)
        truncated = truncated or self._steps >= self._max_steps
        threshold = self._options.success_return
        success = (
            bool(info.get("success", False)) if threshold is None else self._return >= threshold
        )
        return Step(
            observation=self._observe(seen, render=render or terminated or truncated),
            reward=reward,  # type: ignore[arg-type]  # checked by the session
            terminated=terminated,
            truncated=truncated,
            action=action,
            info={**info, "success": success, "success_at_reset": self._solved},
        )

    def close(self) -> None:
        self._env.close()

    def _observe(self, seen: Any, *, render: bool) -> Observation:
        images = {"main": self._picture()} if self._info.cameras and render else {}
        return Observation(images, np.asarray(seen).reshape(-1), self._options.task)

    def _picture(self) -> npt.NDArray[np.uint8]:
        from vla_platform.datasets.frames import resize

        return resize(np.asarray(self._env.render(), np.uint8), self._options.image_size)


def make(name: str, options: GymnasiumOptions) -> Environment:
    arguments: dict[str, Any] = dict(options.arguments)
    if options.camera:
        arguments["render_mode"] = "rgb_array"
    env = gymnasium.make(name, **arguments)
    try:
        return GymnasiumEnvironment(env, options)
    except BaseException:
        env.close()
        raise
