"""A session: one environment, driven by action chunks, with the contract checked at its border.

The same class runs on a thread of a host, in a child process and in a remote simulator's reference
server. Nothing here knows threads, processes or networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.envs.base import Environment, EnvironmentInfo, Observation, Step, check_chunk
from vla_platform.envs.checks import Plain, check_observation, check_step
from vla_platform.envs.failures import Failure, printable
from vla_platform.errors import ConfigurationError, DataError, SimulatorError
from vla_storage.errors import CodedError

MAX_CHUNK = 64
REQUEST_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class EnvironmentRequest:
    """Which environment a session has; `options` obey the harness's own schema."""

    env_id: str  # harness/name
    options: Mapping[str, Any] = field(default_factory=dict)
    expert: bool = False  # whether observations carry the scripted expert's action
    version: int = REQUEST_VERSION


@dataclass(frozen=True)
class Outcome:
    """What a chunk of n executed actions led to; n is less than asked where the episode ended."""

    observation: Observation  # after the last action; the true final one where the episode ended
    rewards: npt.NDArray[np.float32]  # Shape: (n,)
    actions: npt.NDArray[np.float32]  # as executed, after clipping. Shape: (n, A)
    terminated: bool
    truncated: bool
    success: bool
    num_clipped: int  # actions that the bounds changed
    info: Mapping[str, Plain] = field(default_factory=dict)  # of the last action
    frames: tuple[Observation, ...] = ()  # one per action, where asked for

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated

    @property
    def num_steps(self) -> int:
        return len(self.rewards)


class Session:
    """Not thread-safe, like the environment inside."""

    def __init__(self, env: Environment, request: EnvironmentRequest) -> None:
        self._env = env
        self._request = request
        self.info: EnvironmentInfo = env.info
        self.computes_here = env.computes_here
        self._seed: int | None = None
        self._steps = 0
        self._running = False

    def reset(self, seed: int, options: Mapping[str, Any] | None = None) -> Observation:
        """Start an episode. Raises `ConfigurationError` for a wrong seed or option."""
        if type(seed) is not int or not 0 <= seed < 2**32:
            raise ConfigurationError(f"seed {seed!r}: use an integer from 0 to 2**32 - 1")
        self._seed, self._steps, self._running = seed, 0, False
        raw = self._guarded(lambda: self._env.reset(seed, options))
        first = self._with_expert(self._checked(raw))
        self._running = True
        return first

    def step(self, actions: npt.NDArray[np.float32], *, every_frame: bool = False) -> Outcome:
        """Execute a chunk one action after the other, ending with the episode. Shape: (n, A).

        With `every_frame` the outcome has the observation after each action. The whole chunk is
        checked first: `DataError` means that nothing was executed (B36, B38).
        """
        if not self._running:
            raise ConfigurationError("no episode runs: reset the session first")
        if isinstance(actions, np.ndarray) and not 1 <= len(actions) <= MAX_CHUNK:
            raise DataError(
                f"a chunk of {len(actions)} actions; 1 to {MAX_CHUNK} are taken", column="action"
            )
        executed, clipped = check_chunk(actions, self.info, frame=self._steps)
        steps: list[Step] = []
        for at, action in enumerate(executed):
            steps.append(self._step(action, images=every_frame or at == len(executed) - 1))
            if steps[-1].done:
                break
        last, num = steps[-1], len(steps)
        self._running = not last.done
        observation = self._with_expert(last.observation)
        return Outcome(
            observation=observation,
            rewards=np.array([step.reward for step in steps], np.float32),
            actions=executed[:num],
            terminated=last.terminated,
            truncated=last.truncated,
            success=bool(last.info.get("success", False)),
            num_clipped=sum(clipped[:num]),
            info=last.info,
            frames=tuple(step.observation for step in steps) if every_frame else (),
        )

    def snapshot(self) -> bytes:
        """Raises `ConfigurationError` where the simulator cannot."""
        if not self._running:
            raise ConfigurationError("no episode runs: reset the session first")
        taken: bytes = self._guarded(self._env.snapshot)
        return taken

    def restore(self, snapshot: bytes) -> Observation:
        """Go on from a snapshot of the same environment."""
        seen = self._guarded(lambda: self._env.restore(snapshot))
        self._running = True
        return self._with_expert(self._checked(seen))

    def close(self) -> None:
        self._running = False
        self._guarded(self._env.close)

    def _step(self, action: npt.NDArray[np.float32], *, images: bool) -> Step:
        raw = self._guarded(lambda: self._env.step(action, render=images))
        try:
            step = check_step(raw, self.info, images=images)
        except (ValueError, TypeError, AttributeError) as error:
            raise self._failed(Failure.BAD_OUTPUT, error) from error
        self._steps += 1
        return step

    def _checked(self, raw: object) -> Observation:
        try:
            return check_observation(raw, self.info, images=True)
        except (ValueError, TypeError, AttributeError) as error:
            raise self._failed(Failure.BAD_OUTPUT, error) from error

    def _with_expert(self, seen: Observation) -> Observation:
        if not self._request.expert:
            return replace(seen, expert_action=None) if seen.expert_action is not None else seen
        action = self._guarded(self._env.expert_action)
        if action is None:
            raise ConfigurationError(f"{self._request.env_id} has no scripted expert")
        return replace(seen, expert_action=np.asarray(action, np.float32))

    def _guarded(self, call: Any) -> Any:
        try:
            return call()
        except CodedError:
            raise
        except (Exception, SystemExit) as error:  # ManiSkill ends in sys.exit without an asset
            raise self._failed(Failure.RAISED, error) from error

    def _failed(self, failure: Failure, error: BaseException) -> SimulatorError:
        self._running = False
        return SimulatorError(
            f"{self._request.env_id}, seed {self._seed}, step {self._steps}: {failure}: "
            f"{type(error).__name__}: {printable(error)}",
            env_id=self._request.env_id,
            failure=str(failure),
            seed=self._seed,
            step=self._steps,
        )
