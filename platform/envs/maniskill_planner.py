"""The package's own motion planners as sources of demonstrations, in joint positions.

The planner ends the process with numpy 2 and above, so it is refused there.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.envs.base import Observation
from vla_platform.envs.maniskill import ManiSkillEnvironment
from vla_platform.errors import ConfigurationError

CONTROL_MODE = "pd_joint_pos"
MAX_STEPS = 400
"""Planned ways are longer than the tasks' time limits."""
SOLVERS = {
    "LiftPegUpright-v1": "lift_peg_upright",
    "PegInsertionSide-v1": "peg_insertion_side",
    "PickCube-v1": "pick_cube",
    "PlaceSphere-v1": "place_sphere",
    "PlugCharger-v1": "plug_charger",
    "PullCube-v1": "pull_cube",
    "PullCubeTool-v1": "pull_cube_tool",
    "PushCube-v1": "push_cube",
    "StackCube-v1": "stack_cube",
    "StackPyramid-v1": "stack_pyramid",
}
"""Task to its module below `mani_skill.examples.motionplanning.panda.solutions`."""


class Planner:
    """Solved episodes of one task. Raises `ConfigurationError` where there is no planner."""

    def __init__(self, env: ManiSkillEnvironment, name: str) -> None:
        if name not in SOLVERS:
            raise ConfigurationError(f"{name} has no motion planner; those that do: {[*SOLVERS]}")
        if env.simulator.control_mode != CONTROL_MODE:
            raise ConfigurationError(f"motion planners need the control mode {CONTROL_MODE}")
        if int(np.__version__.split(".")[0]) > 1:
            raise ConfigurationError(f"motion planners need numpy below 2, not {np.__version__}")
        module = f"mani_skill.examples.motionplanning.panda.solutions.{SOLVERS[name]}"
        self._solve = importlib.import_module(module).solve
        self._env = env

    def __call__(self, seed: int) -> tuple[list[Observation], list[npt.NDArray[np.float32]]] | None:
        """Observations and actions up to the first success; None where there was none."""
        recorder = _Recorder(self._env)
        self._solve(recorder, seed=seed)
        if recorder.num_to_success is None:
            return None
        length = recorder.num_to_success
        return recorder.observations[:length], recorder.actions[:length]


class _Recorder:
    """What a solver takes for the environment."""

    def __init__(self, env: ManiSkillEnvironment) -> None:
        self._env = env
        self.observations: list[Observation] = []
        self.actions: list[npt.NDArray[np.float32]] = []
        self.num_to_success: int | None = None

    @property
    def unwrapped(self) -> Any:
        return self._env.simulator

    def reset(self, *, seed: int) -> tuple[Observation, dict[str, Any]]:
        self.observations = [self._env.reset(seed)]
        return self.observations[0], {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        taken = np.asarray(action, np.float32).reshape(-1)
        taken = np.clip(taken, self._env.info.action_low, self._env.info.action_high)
        step = self._env.step(taken)
        self.actions.append(taken)
        self.observations.append(step.observation)
        if step.info["success"] and self.num_to_success is None:
            self.num_to_success = len(self.actions)
        return step.observation, step.reward, step.terminated, step.truncated, dict(step.info)
