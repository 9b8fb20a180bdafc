"""Groups of episodes, judged on metadata alone: what to keep, how to score, what is worth training.

An episode here is a summary of a few numbers; the driver never touches a tensor. A group shares its
initial state. Hooks are named and versioned functions that a tenant picks in the spec.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.errors import DataError, SpecError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class EpisodeMeta:
    """What is known of an episode without its rows."""

    episode: int
    group: int
    success: bool
    score: float  # total reward, until a hook or a grader rewrites it
    num_steps: int

    def __post_init__(self) -> None:
        if not np.isfinite(self.score):
            raise DataError(
                f"the score of episode {self.episode} is not finite",
                column="score",
                episode=self.episode,
            )


@dataclass(frozen=True, kw_only=True)
class GroupVerdict:
    """Which episodes are trained, and what became of the rest."""

    kept: tuple[EpisodeMeta, ...]
    rejected: tuple[int, ...]  # groups outside the accepted pass rates
    pass_rates: Mapping[int, float]  # by group


def judge(
    episodes: Sequence[EpisodeMeta], *, lowest: float = 0.0, highest: float = 1.0
) -> GroupVerdict:
    """Keep the groups whose share of successes lies within `lowest` and `highest`, inclusive."""
    rates = {
        group: float(np.mean([one.success for one in episodes if one.group == group]))
        for group in sorted({one.group for one in episodes})
    }
    kept = {group for group, rate in rates.items() if lowest <= rate <= highest}
    return GroupVerdict(
        kept=tuple(one for one in episodes if one.group in kept),
        rejected=tuple(group for group in rates if group not in kept),
        pass_rates=rates,
    )


def without_zero_groups(
    episodes: Sequence[EpisodeMeta], advantages: Floats
) -> tuple[npt.NDArray[np.bool_], tuple[int, ...]]:
    """A mask over episodes, and the groups whose advantages are all zero: they teach nothing."""
    groups = np.array([one.group for one in episodes])
    empty = tuple(
        int(group) for group in np.unique(groups) if not np.any(advantages[groups == group])
    )
    return ~np.isin(groups, empty), empty


ScoreHook = Callable[[Sequence[EpisodeMeta], Mapping[str, float]], list[EpisodeMeta]]
"""Rewrites scores. Options come from the spec."""
ShapeHook = Callable[[Sequence[EpisodeMeta], Floats, Mapping[str, float]], Floats]
"""Rewrites advantages of episodes."""


def _length_penalty(
    episodes: Sequence[EpisodeMeta], options: Mapping[str, float]
) -> list[EpisodeMeta]:
    """Take `per_step` (default 0.001) off the score for each step: shorter successes score more."""
    cost = options.get("per_step", 0.001)
    return [replace(one, score=one.score - cost * one.num_steps) for one in episodes]


def _success_score(
    episodes: Sequence[EpisodeMeta], options: Mapping[str, float]
) -> list[EpisodeMeta]:
    """Replace the score by `reward` (default 1) for a success and 0 otherwise."""
    reward = options.get("reward", 1.0)
    return [replace(one, score=reward * one.success) for one in episodes]


def _clip(
    episodes: Sequence[EpisodeMeta], advantages: Floats, options: Mapping[str, float]
) -> Floats:
    """Cut advantages at `limit` (default 5) on both sides."""
    limit = options.get("limit", 5.0)
    return np.clip(advantages, -limit, limit)


def _positive_only(
    episodes: Sequence[EpisodeMeta], advantages: Floats, options: Mapping[str, float]
) -> Floats:
    """Learn from what went better than its group only."""
    return np.maximum(advantages, 0.0)


SCORE_HOOKS: Mapping[str, ScoreHook] = {
    "length_penalty@1": _length_penalty,
    "success_score@1": _success_score,
}
SHAPE_HOOKS: Mapping[str, ShapeHook] = {
    "clip@1": _clip,
    "positive_only@1": _positive_only,
}


def find_hook(name: str, hooks: Mapping[str, Any]) -> Any:
    """A hook by name and version. Raises `SpecError` with the nearest name."""
    try:
        return hooks[name]
    except KeyError:
        near = difflib.get_close_matches(name, hooks, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "known are " + ", ".join(hooks)
        raise SpecError(
            f"no hook {name!r}; {hint}",
            problems=[{"field": "hooks", "value": name, "problem": "unknown", "hint": hint}],
        ) from None
