"""The harness `libero`: the tasks of LIBERO's five suites (Liu et al. 2023), drawn off screen.

Written against the `libero.libero` interface that all packages of it share. Pictures are upright
(the simulator's own are upside down) and drawn when asked for only: one costs as much as ten steps.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The off-screen renderer reads these at import; without a device number it takes none at all where
# CUDA_VISIBLE_DEVICES is empty.
os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", "0")

import numpy as np
import numpy.typing as npt
from libero.libero import benchmark, get_libero_path
from libero.libero.envs.env_wrapper import ControlEnv

from vla_platform.envs.base import (
    Environment,
    EnvironmentInfo,
    Observation,
    Step,
    init_state_of,
)
from vla_platform.envs.libero_experts import Expert, expert_for
from vla_platform.envs.libero_states import load_init_states
from vla_platform.envs.options import LiberoOptions

MAX_STEPS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Time limits in steps, as OpenVLA's evaluation has them (Kim et al. 2024)."""
CONTROL_HZ = 20.0
IDLE = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
ACTIONS = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
STATE = ("x", "y", "z", "rx", "ry", "rz", "finger_left", "finger_right")

_numpy_random = threading.Lock()
"""robosuite draws from numpy's global generator, which threads share."""


class LiberoEnvironment(Environment):
    """Actions: end-effector changes in [-1, 1], 1 is 0.05 m or 0.5 rad; gripper -1 opens.

    The state is the end effector's position (m), its orientation as axis-angle (rad), and the two
    finger positions (m). Equal seed, initial state and actions give bit-equal trajectories. Without
    the option `init_state` the seed chooses one.
    """

    def __init__(self, suite: str, task: int, options: LiberoOptions) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            tasks = benchmark.get_benchmark(suite)()
        self._task = tasks.get_task(task)
        folder = self._task.problem_folder
        self._init_states = load_init_states(
            Path(get_libero_path("init_states")) / folder / self._task.init_states_file
        )
        self._options = options
        self._max_steps = options.max_steps or MAX_STEPS[suite]
        self._steps = 0
        self._expert: Expert | None = None
        self._seen: Mapping[str, Any] = {}
        with _numpy_random:
            self._env: Any = ControlEnv(
                bddl_file_name=str(
                    Path(get_libero_path("bddl_files")) / folder / self._task.bddl_file
                ),
                use_camera_obs=False,
                has_offscreen_renderer=bool(options.cameras),
                ignore_done=True,  # steps are counted here
                hard_reset=False,
            )
        self._info = EnvironmentInfo(
            cameras={name: (options.image_size, options.image_size) for name in options.cameras},
            state_names=STATE,
            action_names=ACTIONS,
            action_low=np.full(7, -1, np.float32),
            action_high=np.full(7, 1, np.float32),
            fps=CONTROL_HZ,
            max_steps=self._max_steps,
            robot_type="panda",
            can_snapshot=False,  # controllers keep goals that are not part of the state
            num_init_states=len(self._init_states),
        )

    @property
    def info(self) -> EnvironmentInfo:
        return self._info

    def reset(self, seed: int, options: Mapping[str, Any] | None = None) -> Observation:
        init_state = init_state_of(options, len(self._init_states))
        if init_state is None:
            init_state = seed % len(self._init_states)
        with _numpy_random:
            self._env.seed(seed)
            self._reset_scene()
        # A soft reset keeps the gripper's last command, and with it a trace of the episode before.
        gripper = self._env.robots[0].gripper
        gripper.current_action = np.zeros(gripper.dof)
        self._seen = self._env.set_init_state(self._init_states[init_state])
        for _ in range(self._options.settle_steps):
            self._seen, _, _, _ = self._env.step(IDLE)
        self._steps = 0
        self._expert = expert_for(self._env.obj_of_interest, self._task.problem_folder)
        return self._observe(render=True)

    def step(self, action: npt.NDArray[np.float32], *, render: bool = True) -> Step:
        self._seen, reward, success, _ = self._env.step(action)
        self._steps += 1
        truncated = self._steps >= self._max_steps
        return Step(
            observation=self._observe(render=render or bool(success) or truncated),
            reward=float(reward),
            terminated=bool(success),
            truncated=truncated,
            action=action,
            info={"success": bool(success)},
        )

    def close(self) -> None:
        self._env.close()

    def expert_action(self) -> npt.NDArray[np.float32] | None:
        return self._expert.action(self._seen) if self._expert is not None else None

    def _reset_scene(self) -> None:
        # Not ControlEnv.reset: it tries for ever, whatever is wrong.
        from robosuite.utils.errors import RandomizationError

        for _ in range(100):
            with contextlib.suppress(RandomizationError):
                self._env.env.reset()
                return
        raise RuntimeError("no placement of the objects was found in 100 tries")

    def _observe(self, *, render: bool) -> Observation:
        seen = self._seen
        state = np.concatenate(
            [
                seen["robot0_eef_pos"],
                axis_angle(seen["robot0_eef_quat"]),
                seen["robot0_gripper_qpos"],
            ]
        ).astype(np.float32)
        images = self._draw() if render and self._options.cameras else {}
        return Observation(images, state, self._task.language)

    def _draw(self) -> dict[str, npt.NDArray[np.uint8]]:
        # Another environment of this thread may have made its own context current since.
        self._env.sim._render_context_offscreen.gl_ctx.make_current()
        size = self._options.image_size
        return {
            name: np.ascontiguousarray(
                self._env.sim.render(camera_name=name, width=size, height=size)[::-1]
            )
            for name in self._options.cameras
        }


def axis_angle(quaternion: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """A rotation vector in rad from a unit quaternion xyzw. Shape: (3,)."""
    x, y, z, w = (float(part) for part in quaternion)
    sine = float(np.sqrt(max(0.0, 1.0 - min(1.0, w * w))))
    if sine < 1e-8:
        return np.zeros(3)
    return np.array([x, y, z]) / sine * 2.0 * float(np.arccos(np.clip(w, -1.0, 1.0)))


def make(name: str, options: LiberoOptions) -> Environment:
    suite, _, task = name.partition("/")
    return LiberoEnvironment(suite, int(task), options)
