"""The session contract, enforced: what an environment returns is checked before anybody sees it.

A simulator is foreign code: its frames may alias its own buffers, its rewards may be tensors, its
flags may contradict each other. Everything here raises `ValueError` with the reason; the session
turns it into a `SimulatorError` with the failure `bad_output`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from vla_platform.envs.base import EnvironmentInfo, Observation, Step
from vla_platform.envs.failures import printable

MAX_REWARD = 1e9
MAX_TASK = 1024
MAX_INFO = 64

Plain = bool | int | float | str


def check_observation(seen: object, info: EnvironmentInfo, *, images: bool) -> Observation:
    """An own copy of the observation: later steps cannot change it (PF-33).

    Without `images` the cameras may be missing, all of them.
    """
    if not isinstance(seen, Observation):
        raise ValueError(f"an observation is a {type(seen).__name__}")
    if not isinstance(seen.task, str) or len(seen.task) > MAX_TASK:
        raise ValueError(f"the task is no text of at most {MAX_TASK} characters")
    if seen.images.keys() != info.cameras.keys() and (images or seen.images):
        raise ValueError(f"cameras {sorted(seen.images)} in place of {sorted(info.cameras)}")
    return Observation(
        images={name: _picture(name, seen.images[name], info) for name in seen.images},
        state=_numbers("the state", seen.state, (len(info.state_names),)),
        task=seen.task,
        expert_action=seen.expert_action,
    )


def check_step(seen: object, info: EnvironmentInfo, *, images: bool) -> Step:
    """The step with its own copies, plain `info`, and one end: termination wins (B41)."""
    if not isinstance(seen, Step):
        raise ValueError(f"a step is a {type(seen).__name__}")
    for name in ("terminated", "truncated"):
        if not isinstance(getattr(seen, name), (bool, np.bool_)):
            raise ValueError(f"{name} is a {type(getattr(seen, name)).__name__}, not a bool")
    terminated = bool(seen.terminated)
    truncated = bool(seen.truncated) and not terminated
    return Step(
        observation=check_observation(
            seen.observation, info, images=images or terminated or truncated
        ),
        reward=check_reward(seen.reward),
        terminated=terminated,
        truncated=truncated,
        action=seen.action,
        info=plain_info(seen.info),
    )


def check_reward(reward: object) -> float:
    """Only one finite number (B39)."""
    if isinstance(reward, (bool, np.bool_)) or not isinstance(reward, (int, float, np.number)):
        raise ValueError(f"the reward is a {type(reward).__name__}, not a number")
    value = float(reward)
    if not math.isfinite(value) or abs(value) > MAX_REWARD:
        raise ValueError(f"the reward is {value}")
    return value


def plain_info(info: object) -> dict[str, Plain]:
    """What of a simulator's info may leave its process: a few plain values (B74)."""
    if type(info) is not dict and not isinstance(info, Mapping):
        return {}
    kept: dict[str, Plain] = {}
    for name, value in info.items():
        if not isinstance(name, str) or len(kept) == MAX_INFO:
            continue
        key = printable(name[:64])
        if type(value) is bool:
            kept[key] = value
        elif isinstance(value, (bool, np.bool_)):
            kept[key] = bool(value)
        elif isinstance(value, (int, np.integer)) and -(2**63) <= value < 2**63:
            kept[key] = int(value)
        elif isinstance(value, (float, np.floating)) and math.isfinite(value):
            kept[key] = float(value)
        elif isinstance(value, str):
            kept[key] = printable(value)
    return kept


def _picture(name: str, picture: object, info: EnvironmentInfo) -> npt.NDArray[np.uint8]:
    shape = (*info.cameras[name], 3)
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.shape != shape:
        found = (getattr(picture, "dtype", type(picture).__name__), getattr(picture, "shape", ""))
        raise ValueError(f"camera {name!r} gives {found[0]} {found[1]}, not uint8 {shape}")
    return np.array(picture, np.uint8, order="C")


def _numbers(what: str, values: object, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
        raise ValueError(f"{what} is a {type(values).__name__}, not numbers")
    if values.shape != shape:
        raise ValueError(f"{what} has shape {values.shape}, not {shape}")
    copied = np.array(values, np.float32)
    if not all(map(math.isfinite, copied.tolist())):
        raise ValueError(f"{what} is not finite")
    return copied
