"""Scripted experts of LIBERO: pick an object up and put it down, from the simulator's own state.

They solve most tasks of `libero_object` (put a grocery into the basket) and, with a grasp at the
bowl's rim, of `libero_spatial` (put the bowl on the plate).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

REACH = 0.05
"""Metres of a full action."""
OPEN, CLOSED = -1.0, 1.0
GAIN = 1.5
OVERHEAD = np.array([0.0, 0.0, 0.10])

Array = npt.NDArray[np.float64]


class Phase(IntEnum):
    ABOVE = 0
    """Over the object, open."""
    DOWN = 1
    GRASP = 2
    LIFT = 3
    OVER = 4
    """Over where it goes."""
    LOWER = 5
    RELEASE = 6


@dataclass(frozen=True)
class Grasp:
    """Where to grasp and to release, relative to the centres, in metres."""

    offset: tuple[float, float, float] = (0.0, 0.0, 0.0)
    release: tuple[float, float, float] = (0.0, 0.0, 0.15)


_GRASPS = {
    "salad_dressing": Grasp((0.0, 0.0, 0.05)),
    "akita_black_bowl": Grasp((0.0, 0.05, 0.03), (0.0, 0.05, 0.08)),
}


class Expert:
    """One episode. `action` is asked once a step."""

    def __init__(self, thing: str, goal: str, grasp: Grasp) -> None:
        self._thing = thing
        self._goal = goal
        self._grasp = grasp
        self._phase = Phase.ABOVE
        self._count = 0

    def action(self, seen: Mapping[str, Any]) -> npt.NDArray[np.float32]:
        """Shape: (7,)."""
        hand = np.asarray(seen["robot0_eef_pos"], np.float64)
        target, gripper, near = self._plan(hand, seen)
        self._count += 1
        if near(target - hand, self._count):
            self._phase, self._count = Phase(min(self._phase + 1, Phase.RELEASE)), 0
        move = np.clip(GAIN * (target - hand) / REACH, -1.0, 1.0)
        return np.array([*move, 0.0, 0.0, 0.0, gripper], np.float32)

    def _plan(self, hand: Array, seen: Mapping[str, Any]) -> tuple[Array, float, Any]:
        """Where to, with which gripper, and when the phase is over."""
        grasp = np.asarray(seen[f"{self._thing}_pos"], np.float64) + self._grasp.offset
        if self._phase is Phase.ABOVE:
            return grasp + OVERHEAD, OPEN, lambda way, n: np.linalg.norm(way[:2]) < 0.008
        if self._phase is Phase.DOWN:
            return grasp, OPEN, lambda way, n: np.linalg.norm(way) < 0.01 or n > 25
        if self._phase is Phase.GRASP:
            return hand, CLOSED, lambda way, n: n >= 12
        goal = np.asarray(seen[f"{self._goal}_pos"], np.float64) + self._grasp.release
        if self._phase is Phase.LIFT:
            high = np.array([hand[0], hand[1], goal[2] + 0.12])
            return high, CLOSED, lambda way, n: abs(way[2]) < 0.02 or n > 30
        if self._phase is Phase.OVER:
            return goal + OVERHEAD, CLOSED, lambda way, n: np.linalg.norm(way[:2]) < 0.012
        if self._phase is Phase.LOWER:
            return goal, CLOSED, lambda way, n: abs(way[2]) < 0.015 or n > 25
        return hand + OVERHEAD / 10, OPEN, lambda way, n: False


def expert_for(interest: Sequence[str], folder: str) -> Expert | None:
    """The expert of a task: its first object of interest goes to the second. None: no expert."""
    if folder not in ("libero_object", "libero_spatial") or len(interest) < 2:
        return None
    thing, goal = interest[0], interest[1]
    kind = thing.rstrip("0123456789").rstrip("_")
    return Expert(thing, goal, _GRASPS.get(kind, Grasp()))
