"""The harness `maniskill`: ManiSkill 3 tasks whose assets the package brings (Tao et al. 2024).

One environment object is one scene. Even state observations need a Vulkan driver, because tasks
build render materials; Mesa's software driver from version 25 on is one. Pictures are drawn when
asked for only: one costs as much as ten steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("MS_SKIP_ASSET_DOWNLOAD_PROMPT", "1")  # never ask on a terminal

import gymnasium
import mani_skill.envs  # noqa: F401  (registers the tasks)
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box
from mani_skill.utils import common
from mani_skill.utils.registration import REGISTERED_ENVS

from vla_platform.envs import wire
from vla_platform.envs.base import (
    Environment,
    EnvironmentInfo,
    Observation,
    Step,
    init_state_of,
)
from vla_platform.envs.failures import Failure, printable
from vla_platform.envs.maniskill_experts import expert_action
from vla_platform.envs.options import ManiSkillOptions
from vla_platform.errors import ConfigurationError, SimulatorError

_DEVICE_ERRORS = ("rendering device", "physical device", "createInstance")
_SENTENCES = {
    "PickCube-v1": "pick up the red cube and move it to the goal",
    "PushCube-v1": "push the cube to the goal region",
    "PullCube-v1": "pull the cube to the goal region",
    "StackCube-v1": "put the red cube on the green cube",
    "LiftPegUpright-v1": "put the peg upright",
    "PegInsertionSide-v1": "put the peg into the hole of the box",
    "PlaceSphere-v1": "put the sphere into the bin",
    "PlugCharger-v1": "plug the charger into the receptacle",
}


class ManiSkillEnvironment(Environment):
    """Observations, as the option says. `rgb`: pictures, and as state joint positions and, where
    the robot has a tool centre point, its pose (position in metres, quaternion wxyz). `state`: the
    task's full state, with joint velocities and the poses of what it is about. `rgb+state`: both.

    Equal seeds and actions give bit-equal trajectories with the option `repeatable`; without it, up
    to the first contact: the physics engine keeps traces of the episode before. A restored snapshot
    goes on within 1e-3, because controllers keep targets of their own. The bounds of `pd_joint_pos`
    are the limits of the joints in radians.
    """

    def __init__(self, name: str, options: ManiSkillOptions) -> None:
        self._name = name
        self._pictures = options.observations != "state"
        self._full_state = options.observations != "rgb"
        self._repeatable = options.repeatable
        # Without gymnasium's wrappers: the session checks calls, and this class counts steps.
        self._env: Any = _make(name, options).unwrapped
        space = self._env.single_action_space
        if not isinstance(space, Box):
            self._env.close()
            raise ConfigurationError(f"{name}: actions are {space}; only one box is taken")
        self._max_steps = options.max_steps or REGISTERED_ENVS[name].max_episode_steps or 100
        self._steps = 0
        self._solved = False  # at reset already: some draws of a task are (B74)
        self._task = _SENTENCES.get(name, " ".join(name.removesuffix("-v1").split("-")))
        seen, _ = self._env.reset(seed=0)
        names = self._state_names(len(self._state(seen)))
        self._info = EnvironmentInfo(
            cameras={
                camera: (sensor.camera.height, sensor.camera.width)
                for camera, sensor in self._env.scene.sensors.items()
            }
            if self._pictures
            else {},
            state_names=names,
            action_names=tuple(f"a{at}" for at in range(space.shape[-1])),
            action_low=np.asarray(space.low, np.float32).reshape(-1),
            action_high=np.asarray(space.high, np.float32).reshape(-1),
            fps=float(self._env.control_freq),
            max_steps=self._max_steps,
            robot_type=str(getattr(self._env.agent, "uid", "maniskill")),
            deterministic=options.repeatable,
            can_snapshot=True,
        )

    @property
    def info(self) -> EnvironmentInfo:
        return self._info

    @property
    def simulator(self) -> Any:
        """The task's own object, for motion planners."""
        return self._env

    def reset(self, seed: int, options: Mapping[str, Any] | None = None) -> Observation:
        init_state_of(options, 0)
        seen, info = self._env.reset(
            seed=seed, options={"reconfigure": True} if self._repeatable else None
        )
        self._steps = 0
        self._solved = bool(_plain(info.get("success", False)))
        return self._observe(seen, render=True)

    def step(self, action: npt.NDArray[np.float32], *, render: bool = True) -> Step:
        self._steps += 1
        seen, reward, terminated, _, info = self._env.step(action)
        ended = bool(_plain(terminated))
        truncated = self._steps >= self._max_steps
        return Step(
            observation=self._observe(seen, render=render or ended or truncated),
            reward=float(_plain(reward)),
            terminated=ended,
            truncated=truncated,
            action=action,
            info={
                "success": False,
                **{name: _plain(value) for name, value in info.items()},
                "success_at_reset": self._solved,
            },
        )

    def close(self) -> None:
        self._env.close()

    def expert_action(self) -> npt.NDArray[np.float32] | None:
        return expert_action(self._env, self._name)

    def snapshot(self) -> bytes:
        return wire.encode(
            {"state": common.to_numpy(self._env.get_state_dict()), "steps": self._steps}
        )

    def restore(self, snapshot: bytes) -> Observation:
        message = wire.decode(snapshot)
        copied = common.to_tensor(_writable(message["state"]))
        self._env.set_state_dict(copied)
        self._steps = int(message["steps"])
        self._env._elapsed_steps[:] = self._steps
        return self._observe(self._env.get_obs(), render=True)

    def _observe(self, seen: Any, *, render: bool) -> Observation:
        images = self._draw() if self._pictures and render else {}
        return Observation(images, self._state(seen), self._task)

    def _state(self, seen: Any) -> npt.NDArray[np.float32]:
        if self._full_state:
            return _numbers(seen)
        return np.concatenate([_numbers(part) for part in self._own_parts().values()])

    def _state_names(self, size: int) -> tuple[str, ...]:
        if self._full_state:
            return tuple(f"s{at}" for at in range(size))
        parts = {name: len(_numbers(part)) for name, part in self._own_parts().items()}
        return tuple(f"{name}_{at}" for name, count in parts.items() for at in range(count))

    def _own_parts(self) -> dict[str, Any]:
        """What a robot knows of itself."""
        agent = self._env.agent
        parts = {"qpos": agent.robot.get_qpos()}
        if hasattr(agent, "tcp"):
            parts["tcp"] = agent.tcp.pose.raw_pose
        return parts

    def _draw(self) -> dict[str, npt.NDArray[np.uint8]]:
        # As BaseEnv._get_obs_sensor_data does it, but colours alone.
        for thing in self._env._hidden_objects:
            thing.hide_visual()
        self._env.scene.update_render(update_sensors=True, update_human_render_cameras=False)
        self._env.capture_sensor_data()
        return {
            camera: sensor.get_obs(rgb=True, depth=False, position=False, segmentation=False)[
                "rgb"
            ][0]
            .cpu()
            .numpy()
            for camera, sensor in self._env.scene.sensors.items()
        }


def make(name: str, options: ManiSkillOptions) -> Environment:
    return ManiSkillEnvironment(name, options)


def _make(name: str, options: ManiSkillOptions) -> Any:
    given: dict[str, Any] = {"num_envs": 1, "obs_mode": "state"}
    on_gpu = options.backend == "gpu"
    given |= {"sim_backend": "physx_cuda" if on_gpu else "physx_cpu"}
    given |= {"render_backend": "gpu" if on_gpu else "cpu"}
    given |= {"sensor_configs": {"width": options.image_size, "height": options.image_size}}
    if options.control_mode is not None:
        given["control_mode"] = options.control_mode
    if options.reward_mode is not None:
        given["reward_mode"] = options.reward_mode
    try:
        return gymnasium.make(name, **given)
    except (Exception, SystemExit) as error:
        if any(mark in str(error) for mark in _DEVICE_ERRORS):
            raise SimulatorError(
                f"maniskill/{name}: no usable Vulkan driver ({printable(error)}); on Debian 12 "
                "install mesa-vulkan-drivers from bookworm-backports, see docs/environments.md",
                env_id=f"maniskill/{name}",
                failure=str(Failure.NOT_BUILT),
            ) from error
        raise


def _plain(value: Any) -> Any:
    """One number of a tensor with one number; sparse rewards are bools in ManiSkill."""
    if hasattr(value, "numel"):
        return value.item() if value.numel() == 1 else None
    return value


def _numbers(value: Any) -> npt.NDArray[np.float32]:
    return np.asarray(value.cpu().numpy(), np.float32).reshape(-1)


def _writable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _writable(part) for name, part in value.items()}
    return np.array(value)
