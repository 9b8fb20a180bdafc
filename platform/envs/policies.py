"""What acts: the protocol that a rollout asks for actions, and policies that need no model.

The inference proxy of the client has this shape; rollouts, evaluations and demonstrations are
written against it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vla_platform.envs.base import EnvironmentInfo, Observation
from vla_platform.errors import ConfigurationError


class Prediction(Protocol):
    """Action chunks for B observations, and where they come from."""

    @property
    def actions(self) -> npt.NDArray[np.float32]: ...  # Shape: (B, H, A)

    @property
    def policy_version(self) -> int: ...

    @property
    def module_digest(self) -> str: ...

    @property
    def log_prob(self) -> npt.NDArray[Any] | None: ...  # leading B

    @property
    def value(self) -> npt.NDArray[Any] | None: ...  # Shape: (B,)

    @property
    def latent(self) -> npt.NDArray[Any] | None: ...  # leading B; what was drawn, for training

    @property
    def features(self) -> list[npt.NDArray[Any]] | None: ...  # (L, D) of each row


class Policy(Protocol):
    """Thread-safe."""

    def predict(
        self,
        observations: Sequence[Observation],
        *,
        policy_key: str,
        version: int | str | None,
        seed: int | None = None,
        timeout_s: float,
    ) -> Prediction: ...


@dataclass(frozen=True)
class Predicted:
    """A prediction of a policy in this process."""

    actions: npt.NDArray[np.float32]  # Shape: (B, H, A)
    policy_version: int
    module_digest: str = ""
    log_prob: npt.NDArray[Any] | None = None
    value: npt.NDArray[Any] | None = None
    latent: npt.NDArray[Any] | None = None
    features: list[npt.NDArray[Any]] | None = None


class ExpertPolicy:
    """The environment's scripted expert, one action at a time; sessions must ask for `expert`."""

    def predict(
        self,
        observations: Sequence[Observation],
        *,
        policy_key: str,
        version: int | str | None,
        seed: int | None = None,
        timeout_s: float,
    ) -> Predicted:
        actions = [seen.expert_action for seen in observations]
        if any(action is None for action in actions):
            raise ConfigurationError("the sessions were opened without `expert`")
        return Predicted(np.stack(actions)[:, None], _number(version), "expert")  # type: ignore[arg-type]


class RandomPolicy:
    """Uniform actions within the bounds; infinite bounds count as 1."""

    def __init__(self, info: EnvironmentInfo, *, chunk: int = 1) -> None:
        self._low = np.where(np.isfinite(info.action_low), info.action_low, -1)
        self._high = np.where(np.isfinite(info.action_high), info.action_high, 1)
        self._chunk = chunk

    def predict(
        self,
        observations: Sequence[Observation],
        *,
        policy_key: str,
        version: int | str | None,
        seed: int | None = None,
        timeout_s: float,
    ) -> Predicted:
        shape = (len(observations), self._chunk, len(self._low))
        draws = np.random.default_rng(seed).random(shape)
        actions = (self._low + draws * (self._high - self._low)).astype(np.float32)
        return Predicted(actions, _number(version), "random")


def needs_expert(policy: Policy) -> bool:
    return isinstance(policy, ExpertPolicy)


def _number(version: int | str | None) -> int:
    return version if isinstance(version, int) else 0
