"""Scripted experts of ManiSkill tasks: functions of the simulator's own state.

They need no motion planner. Actions are of the controllers `pd_ee_delta_pos` and
`pd_ee_delta_pose`, where 1 is 0.1 m; the last number opens (1) or closes (-1) the gripper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

REACH = 0.1
"""Metres of a full action."""
CONTROL_MODES = ("pd_ee_delta_pos", "pd_ee_delta_pose")

Array = npt.NDArray[np.float64]
OPEN, CLOSED = 1.0, -1.0


def push_cube(env: Any) -> tuple[Array, float]:
    """Down behind the cube, then forward through it to the goal."""
    tcp, cube = _place(env.agent.tcp), _place(env.obj)
    goal = _place(env.goal_region)
    behind = tcp[0] < cube[0] - 0.02 and abs(tcp[1] - cube[1]) < 0.02 and tcp[2] < 0.05
    target_x = goal[0] - 0.02 if behind else cube[0] - 0.10
    return np.array([target_x, cube[1], 0.02]) - tcp, CLOSED


def pick_cube(env: Any) -> tuple[Array, float]:
    """Over the cube, down, grasp, and with it to the goal."""
    tcp, cube = _place(env.agent.tcp), _place(env.cube)
    if bool(env.agent.is_grasping(env.cube)[0]):
        return _place(env.goal_site) - cube, CLOSED
    aside = float(np.linalg.norm((cube - tcp)[:2]))
    if aside > 0.015:
        height = 0.08 if aside > 0.03 or tcp[2] - cube[2] > 0.05 else 0.0
        return cube + np.array([0.0, 0.0, height]) - tcp, OPEN
    down = cube - tcp
    return down, OPEN if abs(down[2]) > 0.008 else CLOSED


EXPERTS: dict[str, Callable[[Any], tuple[Array, float]]] = {
    "PushCube-v1": push_cube,
    "PickCube-v1": pick_cube,
}


def expert_action(env: Any, name: str) -> npt.NDArray[np.float32] | None:
    """The next action, or None where there is no expert for the task and controller. (A,)."""
    expert = EXPERTS.get(name)
    if expert is None or env.control_mode not in CONTROL_MODES:
        return None
    way, gripper = expert(env)
    turn = [0.0, 0.0, 0.0] if env.control_mode == "pd_ee_delta_pose" else []
    return np.array([*np.clip(way / REACH, -1.0, 1.0), *turn, gripper], np.float32)


def _place(thing: Any) -> Array:
    """Position in metres. Shape: (3,)."""
    return np.asarray(thing.pose.p[0].cpu().numpy(), np.float64)
