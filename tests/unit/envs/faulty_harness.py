"""A harness that fails on demand, and marks its frames; `VLA` plug-in for hosts under test."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vla_platform.envs.base import Environment, EnvironmentInfo, Observation, Step
from vla_platform.envs.harnesses import Harness
from vla_platform.specs import Float, Int, Spec

SIZE = 16


class FaultyOptions(Spec):
    fault: Literal[
        "none", "raise", "exit", "hang", "segv", "leak", "reward", "shape", "both_ends", "info",
        "arity", "hang_reset", "raise_reset", "hang_close", "system_exit", "aliased",
    ] = "none"  # fmt: skip
    at: Int = 1  # the step that fails, from 1
    once: str = ""  # a file whose existence means that it has failed before
    reward: Float | None = None  # None: a bool in its place
    length: Int = 5
    mark: Int = 0  # in the corner of every frame
    leak_mb: Int = 50


class Faulty(Environment):
    def __init__(self, options: FaultyOptions) -> None:
        self._options = options
        self._steps = 0
        self._seed = 0
        self._kept: list[bytearray] = []
        self._frame = np.zeros((SIZE, SIZE, 3), np.uint8)

    @property
    def info(self) -> EnvironmentInfo:
        return EnvironmentInfo(
            cameras={"main": (SIZE, SIZE)},
            state_names=("mark", "seed", "step"),
            action_names=("a",),
            action_low=np.full(1, -1, np.float32),
            action_high=np.full(1, 1, np.float32),
            fps=10.0,
            max_steps=self._options.length,
            robot_type="faulty",
        )

    def reset(self, seed: int, options: Mapping[str, Any] | None = None) -> Observation:
        self._steps, self._seed = 0, seed
        if self._options.fault == "leak":
            self._kept.append(bytearray(os.urandom(1 << 20) * self._options.leak_mb))
        if self._fails("hang_reset"):
            time.sleep(3600)
        if self._fails("raise_reset"):
            raise RuntimeError("no reset")
        return self._observe()

    def step(self, action: Any, *, render: bool = True) -> Any:
        self._steps += 1
        options = self._options
        due = self._steps == options.at
        if due and self._fails("raise"):
            raise RuntimeError("broken\x1b[31m\nroot: fake log line")
        if due and self._fails("system_exit"):
            raise SystemExit(1)
        if due and self._fails("exit"):
            os._exit(7)
        if due and self._fails("hang"):
            time.sleep(3600)
        if due and self._fails("segv"):
            signal.raise_signal(signal.SIGSEGV)
        if due and self._fails("arity"):
            return (1, 2, 3)
        truncated = self._steps >= options.length
        reward: Any = 0.1
        if due and self._fails("reward"):
            reward = True if options.reward is None else options.reward
        observation = self._observe()
        if due and options.fault == "shape":
            observation = Observation({"main": self._frame[:8]}, observation.state, "mark")
        info: dict[str, Any] = {"success": truncated}
        if options.fault == "info":
            info |= {"good": 1, "bad": object(), "nan": float("nan"), "text": "a\x00b", 3: 4}
        ends = options.fault == "both_ends" and due
        return Step(observation, reward, ends, truncated or ends, np.asarray(action), info)

    def close(self) -> None:
        if self._fails("hang_close"):
            time.sleep(3600)

    def expert_action(self) -> Any:
        return np.zeros(1, np.float32)

    def _observe(self) -> Observation:
        # One buffer for all frames: whoever does not copy sees the future (PF-33).
        self._frame[:] = self._steps
        self._frame[0, 0] = self._options.mark
        state = np.array([self._options.mark, self._seed % 1000, self._steps], np.float32)
        return Observation({"main": self._frame}, state, f"mark {self._options.mark}")

    def _fails(self, fault: str) -> bool:
        if self._options.fault != fault:
            return False
        if self._options.once:
            try:
                Path(self._options.once).touch(exist_ok=False)
            except FileExistsError:
                return False
        return True


def make(name: str, options: FaultyOptions) -> Environment:
    return Faulty(options)


HARNESS = Harness(
    name="faulty",
    module="faulty_harness",
    options=FaultyOptions,
    known=("one", "two"),
    exclusive=False,
)
