"""Rewards that were computed after the rollout take the environment's place. Pure functions.

Shapes: R rows, H chunk, E episodes; `valid` (R, H) marks executed actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.errors import DataError
from vla_platform.rl.groups import EpisodeMeta

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

GRADE = "grade"
"""Column (R,): each row's episode's grade."""
TEACHER_LOG_PROB = "teacher_log_prob"
"""Column (R, H): what the teacher says of the actions that were drawn."""
SCORE_COLUMNS = (GRADE, TEACHER_LOG_PROB)


def rescored(
    columns: Mapping[str, Array], episodes: Sequence[EpisodeMeta]
) -> tuple[dict[str, Array], list[EpisodeMeta]]:
    """The columns with `rewards` by whichever score is among them, and the episodes with the sums
    of these as their scores. Raises `DataError` where a score is not finite."""
    valid = ~columns["actions_is_pad"].astype(bool) & columns["is_transition"][:, None].astype(bool)
    if GRADE in columns:
        rewards = at_the_end(columns[GRADE], columns["episode"], valid)
    else:
        student = columns["actor_log_prob" if "actor_log_prob" in columns else "log_prob"]
        rewards = reverse_kl(columns[TEACHER_LOG_PROB], student, valid)
    totals = sums_of(rewards, columns["episode"])
    again = [replace(one, score=totals[one.episode]) for one in episodes]
    return {**columns, "rewards": rewards}, again


def at_the_end(grade: Array, episode: Array, valid: Array) -> Floats:
    """An episode's grade as the reward of its last executed action. Shape: (R, H)."""
    rewards = np.zeros(valid.shape)
    for one in np.unique(episode):
        places = np.argwhere(valid & (episode == one)[:, None])
        if len(places):
            row, action = places[-1]
            if not np.isfinite(grade[row]):
                raise DataError(f"the grade of episode {one} is not finite", column=GRADE)
            rewards[row, action] = grade[row]
    return rewards


def reverse_kl(teacher_log_prob: Array, log_prob: Array, valid: Array) -> Floats:
    """log p_teacher(a) - log p_student(a), whose mean over the student's own actions is minus the
    KL divergence of student from teacher (Agarwal et al. 2024, "On-Policy Distillation of Language
    Models", reverse KL). Shape: (R, H), zero where not valid."""
    difference = teacher_log_prob.astype(np.float64) - log_prob.astype(np.float64)
    kept = np.where(valid, difference, 0.0)
    if not np.isfinite(kept).all():
        row = int(np.argwhere(~np.isfinite(kept))[0, 0])
        raise DataError(
            f"the teacher's log-probability of row {row} is not finite",
            column=TEACHER_LOG_PROB, row=row,
        )  # fmt: skip
    return kept


def sums_of(rewards: Array, episode: Array) -> dict[int, float]:
    """Each episode's total. rewards (R, H), episode (R,)."""
    return {int(one): float(rewards[episode == one].sum()) for one in np.unique(episode)}
