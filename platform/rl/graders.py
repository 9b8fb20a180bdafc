"""Graders: named, versioned functions over whole groups of episodes, whose grades become rewards.

A grader says which columns it reads, and gets no others. It runs in a task of its own beside the
rollouts (`vla_platform.control.grading`), so it may take its time; what it returns counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.errors import DataError
from vla_platform.rl.groups import EpisodeMeta

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class EpisodeRows:
    """An episode, and the columns that its grader asked for: rows of decisions in order of time."""

    meta: EpisodeMeta
    columns: Mapping[str, Array]  # Shape: (T, ...)


Grade = Callable[[Sequence[EpisodeRows], Mapping[str, float]], Sequence[float]]
"""`grade(group, options)`: a number for each episode of one group, in their order."""


@dataclass(frozen=True, kw_only=True)
class Grader:
    columns: tuple[str, ...]  # of the partition
    grade: Grade


def grade_episodes(
    grader: Grader,
    episodes: Sequence[EpisodeMeta],
    columns: Mapping[str, Array],
    options: Mapping[str, float],
) -> dict[int, float]:
    """Grades by episode. columns: the grader's, with `episode` (R,) and `is_transition` (R,).

    Raises `DataError` where the grader gives something other than one finite number each.
    """
    decisions = columns["is_transition"].astype(bool)
    grades: dict[int, float] = {}
    for group in sorted({one.group for one in episodes}):
        members = []
        for meta in (one for one in episodes if one.group == group):
            rows = np.flatnonzero(decisions & (columns["episode"] == meta.episode))
            members.append(
                EpisodeRows(
                    meta=meta, columns={name: columns[name][rows] for name in grader.columns}
                )
            )
        found = np.asarray(grader.grade(members, options), np.float64)
        if found.shape != (len(members),) or not np.isfinite(found).all():
            raise DataError(
                f"the grader gives group {group} grades {found.tolist()!s:.80}, "
                f"not {len(members)} finite numbers",
                column="grade",
            )
        grades |= {
            one.meta.episode: float(grade) for one, grade in zip(members, found, strict=True)
        }
    return grades


def _rank(group: Sequence[EpisodeRows], options: Mapping[str, float]) -> Sequence[float]:
    """The share of the group that an episode's total reward beats, ties by half: from 0 to 1."""
    scores = np.array([one.meta.score for one in group])
    others = max(1, len(scores) - 1)
    beats = (scores[:, None] > scores).sum(axis=1) + 0.5 * (scores[:, None] == scores).sum(axis=1)
    ranks: list[float] = ((beats - 0.5) / others).tolist()
    return ranks


def _smoothness(group: Sequence[EpisodeRows], options: Mapping[str, float]) -> Sequence[float]:
    """The total reward less `weight` (default 1) times the mean change from action to action."""
    weight = options.get("weight", 1.0)
    grades = []
    for one in group:
        executed = ~one.columns["actions_is_pad"].astype(bool)
        actions = one.columns["executed_actions"][executed].astype(np.float64)
        change = float(np.abs(np.diff(actions, axis=0)).mean()) if len(actions) > 1 else 0.0
        grades.append(one.meta.score - weight * change)
    return grades


def _peak_reward(group: Sequence[EpisodeRows], options: Mapping[str, float]) -> Sequence[float]:
    """The best single reward of the episode: how near it came, whatever it did before or after."""
    best = []
    for one in group:
        rewards = one.columns["rewards"][~one.columns["actions_is_pad"].astype(bool)]
        best.append(float(rewards.max()) if len(rewards) else 0.0)
    return best


GRADERS: Mapping[str, Grader] = {
    "rank@1": Grader(columns=(), grade=_rank),
    "smoothness@1": Grader(columns=("executed_actions", "actions_is_pad"), grade=_smoothness),
    "peak_reward@1": Grader(columns=("rewards", "actions_is_pad"), grade=_peak_reward),
}
