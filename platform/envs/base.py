"""The session contract: what a tenant drives with reset, step and close.

Gymnasium's split of the two ends is kept: `terminated` is part of the task, `truncated` is the time
limit and never counts as termination.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vla_platform.errors import ConfigurationError, DataError
from vla_storage.closing import Closing


@dataclass(frozen=True)
class EnvironmentInfo:
    """What a policy must know before the first reset."""

    cameras: Mapping[str, tuple[int, int]]  # name to (height, width), in order
    state_names: tuple[str, ...]  # one per state dimension (S)
    action_names: tuple[str, ...]  # one per action dimension (A)
    action_low: npt.NDArray[np.float32]  # Shape: (A,)
    action_high: npt.NDArray[np.float32]  # Shape: (A,)
    fps: float  # control steps per second
    max_steps: int  # steps until truncation
    robot_type: str
    deterministic: bool = True  # equal seed and actions, equal trajectory
    can_snapshot: bool = False
    num_init_states: int = 0  # fixed starts that `reset` takes as option `init_state`; 0: by seed

    @functools.cached_property
    def bounds(self) -> tuple[list[float], list[float]]:
        """The actions' bounds as plain numbers."""
        return self.action_low.tolist(), self.action_high.tolist()


@dataclass(frozen=True)
class Observation:
    images: Mapping[str, npt.NDArray[np.uint8]]  # camera to (height, width, 3)
    state: npt.NDArray[np.float32]  # Shape: (S,)
    task: str
    expert_action: npt.NDArray[np.float32] | None = None  # where the session asks for it. (A,)


@dataclass(frozen=True)
class Step:
    """The outcome of one action."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    action: npt.NDArray[np.float32]  # as executed, after clipping. Shape: (A,)
    info: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Environment(Closing):
    """One environment instance. Every call comes from the thread that made it."""

    computes_here: ClassVar[bool] = True
    """False: its calls wait for somebody else, so they need not take turns with others'."""

    @property
    @abstractmethod
    def info(self) -> EnvironmentInfo: ...

    @abstractmethod
    def reset(self, seed: int, options: Mapping[str, Any] | None = None) -> Observation:
        """Start an episode; equal seeds and options start equal episodes.

        `options["init_state"]` names one of `info.num_init_states` fixed starts, where there are
        any. Raises `ConfigurationError` for other options.
        """

    @abstractmethod
    def step(self, action: npt.NDArray[np.float32], *, render: bool = True) -> Step:
        """Execute one action. Shape: (A,).

        Without `render` the images may be left out, unless the episode ends here. Raises
        `DataError` where the action is refused (shape, dtype, not finite): the environment is then
        not stepped.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; calling it twice is fine."""

    def expert_action(self) -> npt.NDArray[np.float32] | None:
        """What the scripted expert does next, or None where there is no expert. Shape: (A,)."""
        return None

    def snapshot(self) -> bytes:
        """The whole state of the episode, for `restore`. Raises `ConfigurationError`."""
        raise ConfigurationError(f"{type(self).__name__} cannot be snapshot")

    def restore(self, snapshot: bytes) -> Observation:
        """Go back to a snapshot of the same environment. Raises `ConfigurationError`."""
        raise ConfigurationError(f"{type(self).__name__} cannot be restored")


CAMERA_PREFIX = "observation.images."


def matching_cameras(wanted: Sequence[str], given: Collection[str]) -> list[str]:
    """The names among `given` of the cameras that a schema wants, in the schema's order.

    A schema names a dataset's feature (`observation.images.top`), an environment its camera
    (`top`): both are taken. Raises `DataError`.
    """
    found = [
        next((name for name in (key, key.removeprefix(CAMERA_PREFIX)) if name in given), None)
        for key in wanted
    ]
    missing = [key for key, name in zip(wanted, found, strict=True) if name is None]
    if missing:
        raise DataError(
            f"the policy looks through {', '.join(wanted)}; the observation has "
            f"{', '.join(sorted(given)) or 'no camera'} and lacks {', '.join(missing)}",
            column=missing[0],
        )
    return [name for name in found if name is not None]


def check_action(
    action: npt.NDArray[np.float32], info: EnvironmentInfo, *, frame: int
) -> tuple[npt.NDArray[np.float32], bool]:
    """The action to execute, and whether the bounds changed it. Shape: (A,); see `check_chunk`."""
    if isinstance(action, np.ndarray) and action.ndim == 1:
        executed, clipped = check_chunk(action[None], info, frame=frame)
        return executed[0], clipped[0]
    raise _refused(action, info, frame)


def check_chunk(
    actions: npt.NDArray[np.float32], info: EnvironmentInfo, *, frame: int
) -> tuple[npt.NDArray[np.float32], list[bool]]:
    """The actions to execute, Shape: (n, A), and which of the n the bounds changed.

    Only float32 of that shape is taken (B38). Raises `DataError` for anything else and for numbers
    that are not finite (B36), naming the frame. Values outside the bounds are clipped (B37).
    """
    if (
        not isinstance(actions, np.ndarray)
        or actions.dtype != np.float32
        or actions.ndim != 2
        or actions.shape[1:] != info.action_low.shape
    ):
        raise _refused(actions, info, frame)
    # The usual case, in the fewest steps: a simulator's own work leaves the caches cold.
    low, high = info.bounds
    if all(
        a <= value <= b
        for row in actions.tolist()
        for a, value, b in zip(low, row, high, strict=True)
    ):
        return actions.copy(), [False] * len(actions)
    finite = np.isfinite(actions)
    if not finite.all():
        first = int(np.argmin(finite.all(axis=1)))
        raise DataError("the action is not finite", frame=frame + first, column="action")
    executed = np.minimum(np.maximum(actions, info.action_low), info.action_high)
    return executed, (executed != actions).any(axis=1).tolist()


def _refused(actions: object, info: EnvironmentInfo, frame: int) -> DataError:
    if not isinstance(actions, np.ndarray) or actions.dtype != np.float32:
        given = getattr(actions, "dtype", type(actions).__name__)
        return DataError(f"an action is a float32 array, not {given}", frame=frame, column="action")
    return DataError(
        f"the action has shape {actions.shape}, the environment takes {info.action_low.shape}",
        frame=frame,
        column="action",
    )


def init_state_of(options: Mapping[str, Any] | None, num_init_states: int) -> int | None:
    """The option `init_state`, checked. Raises `ConfigurationError` for any other option."""
    given = dict(options or {})
    init_state = given.pop("init_state", None)
    if given:
        raise ConfigurationError(f"unknown reset options {sorted(given)}")
    if init_state is None:
        return None
    if type(init_state) is not int or not 0 <= init_state < num_init_states:
        raise ConfigurationError(
            f"init_state {init_state!r}: there are {num_init_states}, counted from 0"
        )
    return init_state
