"""Advantages and returns over the rows of a rollout. Pure functions on arrays.

Rows are those of a rollout's partition: R rows, each one decision of the policy or the true final
observation of an episode (`is_transition` false). `next_row` points from a decision to the row of
the observation that followed, so nothing ever flows from one episode into the next. A decision is a
chunk of up to H actions; `rewards` has one number per action, `valid` marks those executed.

Termination ends the future: nothing is bootstrapped. Time-limit truncation and the end of a rollout
do not: the value of the true final observation stands for what would have followed
(Pardo et al. 2018, "Time Limits in Reinforcement Learning").

Two levels. `chunk` treats a chunk as one step: its rewards are summed and gamma counts chunks (as
RLinf does for diffusion policies). `step` counts environment steps: gamma applies to each action,
and an action is not credited with rewards that came before it inside its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.errors import DataError

Floats = npt.NDArray[np.float64]
Array = npt.NDArray[Any]


class Level(StrEnum):
    CHUNK = "chunk"
    """A chunk of actions is one step."""
    STEP = "step"
    """Every action is a step of its own."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the arithmetic reads of a partition. Shapes: R rows, H chunk."""

    rewards: Array  # (R, H)
    valid: Array  # (R, H) bool: executed
    next_row: Array  # (R,) int; -1 for final observations
    is_transition: Array  # (R,) bool
    terminated: Array  # (R,) bool

    def __post_init__(self) -> None:
        if not np.isfinite(self.rewards).all():
            row = int(np.argwhere(~np.isfinite(self.rewards))[0, 0])
            raise DataError(f"a reward in row {row} is not finite", column="rewards", row=row)
        unfinished = self.is_transition & (self.next_row < 0)
        if unfinished.any():
            row = int(np.argmax(unfinished))
            raise DataError(f"row {row} has no next row", column="next_row", row=row)

    @classmethod
    def of(cls, columns: dict[str, Array]) -> Rows:
        """From the columns that a rollout wrote."""
        return cls(
            rewards=columns["rewards"].astype(np.float64),
            valid=~columns["actions_is_pad"].astype(bool) & columns["is_transition"][:, None],
            next_row=columns["next_row"],
            is_transition=columns["is_transition"].astype(bool),
            terminated=columns["terminated"].astype(bool),
        )


@dataclass(frozen=True)
class Estimates:
    """Shape: advantages (R, H), zero where not valid; returns (R,), zero for final rows."""

    advantages: Floats
    returns: Floats


def generalized_advantages(
    rows: Rows, values: Array, *, gamma: float, lam: float, level: Level = Level.CHUNK
) -> Estimates:
    """GAE (Schulman et al. 2016, eq. 16): exponentially weighted TD residuals.

    values (R,), those of final rows included. `returns` are advantages of the chunk plus values:
    the value head's targets.
    """
    _check_values(values)
    reward, discount = _per_chunk(rows, gamma, level)
    advantage = np.zeros(len(reward))
    for row in _backwards(rows):
        after = rows.next_row[row]
        alive = 0.0 if rows.terminated[row] else 1.0
        delta = reward[row] + discount[row] * alive * values[after] - values[row]
        advantage[row] = delta + discount[row] * lam * alive * advantage[after]
    returns = np.where(rows.is_transition, advantage + values, 0.0)
    return Estimates(_per_action(rows, advantage, gamma, level), returns)


def discounted_returns(
    rows: Rows, *, gamma: float, level: Level = Level.CHUNK, values: Array | None = None
) -> Floats:
    """Return-to-go of each row, (R,). With `values`, what is cut off is bootstrapped."""
    reward, discount = _per_chunk(rows, gamma, level)
    returns = np.zeros(len(reward))
    if values is not None:
        _check_values(values)
        returns[~rows.is_transition] = values[~rows.is_transition]
    for row in _backwards(rows):
        alive = 0.0 if rows.terminated[row] else 1.0
        returns[row] = reward[row] + discount[row] * alive * returns[rows.next_row[row]]
    return np.where(rows.is_transition, returns, 0.0)


def returns_with_baseline(
    rows: Rows, *, gamma: float, level: Level = Level.CHUNK, baseline: float | None = None
) -> Estimates:
    """REINFORCE (Williams 1992): return-to-go less a constant; by default the mean over rows."""
    returns = discounted_returns(rows, gamma=gamma, level=level)
    if baseline is None:
        baseline = float(returns[rows.is_transition].mean()) if rows.is_transition.any() else 0.0
    advantage = np.where(rows.is_transition, returns - baseline, 0.0)
    return Estimates(_per_action(rows, advantage, gamma, level), returns)


def group_relative(scores: Array, groups: Array, *, scale: bool = True) -> Floats:
    """GRPO (Shao et al. 2024, section 4.1): scores against the mean of their own group.

    scores (E,), groups (E,) ints; returns (E,). Divided by the group's standard deviation
    (unbiased) with `scale`. A group of one, or of equal scores, has advantage 0: never NaN.
    """
    if not np.isfinite(scores).all():
        raise DataError("a score is not finite", column="score")
    advantage = np.zeros(len(scores))
    for group in np.unique(groups):
        of = groups == group
        if of.sum() < 2:
            continue
        centred = scores[of] - scores[of].mean()
        if np.ptp(scores[of]) == 0:
            continue
        advantage[of] = centred / (centred.std(ddof=1) + 1e-6) if scale else centred
    return advantage


def over_rows(advantage: Array, episode: Array, rows: Rows) -> Floats:
    """Advantages of episodes (E,), given to each executed action of theirs. Shape: (R, H)."""
    return np.where(rows.valid, advantage[episode][:, None], 0.0)


def normalized(advantages: Array, valid: Array) -> Floats:
    """Mean 0 and standard deviation 1 over what is valid; unchanged where nothing varies."""
    chosen = advantages[valid]
    if len(chosen) < 2 or np.ptp(chosen) == 0:
        return np.asarray(advantages, np.float64)
    shifted = (advantages - chosen.mean()) / (chosen.std() + 1e-5)
    return np.where(valid, shifted, 0.0)


def _per_chunk(rows: Rows, gamma: float, level: Level) -> tuple[Floats, Floats]:
    """Reward of each row's chunk, and the discount of what follows it. Shapes: (R,), (R,)."""
    rewards = np.where(rows.valid, rows.rewards, 0.0)
    if level is Level.CHUNK:
        return rewards.sum(axis=1), np.full(len(rewards), gamma)
    powers = gamma ** np.arange(rewards.shape[1])
    return rewards @ powers, gamma ** rows.valid.sum(axis=1).astype(np.float64)


def _per_action(rows: Rows, advantage: Floats, gamma: float, level: Level) -> Floats:
    per_action = np.repeat(advantage[:, None], rows.rewards.shape[1], axis=1)
    if level is Level.STEP:
        # What an action is credited with begins at the action, and counts from there.
        rewards = np.where(rows.valid, rows.rewards, 0.0)
        powers = gamma ** np.arange(rewards.shape[1])
        earlier = np.cumsum(rewards * powers, axis=1) - rewards * powers
        per_action = per_action - earlier
    return np.where(rows.valid, per_action, 0.0)


def _backwards(rows: Rows) -> Array:
    """Decisions, each after the one that follows it: rows of an episode lie in order of time."""
    return np.flatnonzero(rows.is_transition)[::-1]


def _check_values(values: Array) -> None:
    if not np.isfinite(values).all():
        row = int(np.argwhere(~np.isfinite(values))[0, 0])
        raise DataError(f"the value of row {row} is not finite", column="value", row=row)
