"""Grades and teachers take the place of the environment's rewards, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vla_platform.errors import DataError
from vla_platform.rl.groups import EpisodeMeta
from vla_platform.rl.rewards import GRADE, TEACHER_LOG_PROB, rescored


def columns(**more: Any) -> dict[str, Any]:
    """Two episodes of two decisions and an end each; the last chunk of each is cut short."""
    return {
        "rewards": np.arange(12.0).reshape(6, 2),
        "actions_is_pad": np.array([[0, 0], [0, 1], [1, 1]] * 2, bool),
        "is_transition": np.array([True, True, False] * 2),
        "episode": np.repeat([0, 1], 3),
        **more,
    }


def metas() -> list[EpisodeMeta]:
    return [
        EpisodeMeta(episode=at, group=0, success=True, score=99.0, num_steps=3) for at in (0, 1)
    ]


def test_a_grade_is_the_reward_of_the_last_executed_action() -> None:
    found, episodes = rescored(columns(**{GRADE: np.repeat([0.5, -2.0], 3)}), metas())
    expected = np.zeros((6, 2))
    expected[1, 0], expected[4, 0] = 0.5, -2.0
    np.testing.assert_array_equal(found["rewards"], expected)
    assert [one.score for one in episodes] == [0.5, -2.0]


def test_a_teachers_reward_is_minus_the_pointwise_divergence() -> None:
    student, teacher = np.full((6, 2), -1.0), np.full((6, 2), -1.5)
    teacher[5] = np.nan  # of a row without a decision
    given = columns(log_prob=student, **{TEACHER_LOG_PROB: teacher})
    found, episodes = rescored(given, metas())
    valid = ~given["actions_is_pad"] & given["is_transition"][:, None]
    np.testing.assert_allclose(found["rewards"], np.where(valid, -0.5, 0.0))
    assert [one.score for one in episodes] == pytest.approx([-1.5, -1.5])


def test_the_actors_forward_is_the_student_where_there_is_one() -> None:
    given = columns(
        log_prob=np.zeros((6, 2)), actor_log_prob=np.ones((6, 2)),
        **{TEACHER_LOG_PROB: np.ones((6, 2))},
    )  # fmt: skip
    assert not rescored(given, metas())[0]["rewards"].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_refused_b39(bad: float) -> None:
    with pytest.raises(DataError, match="grade of episode 0"):
        rescored(columns(**{GRADE: np.array([bad] * 3 + [1.0] * 3)}), metas())
    teacher = np.zeros((6, 2))
    teacher[3, 1] = bad
    given = columns(log_prob=np.zeros((6, 2)), **{TEACHER_LOG_PROB: teacher})
    with pytest.raises(DataError, match="of row 3"):
        rescored(given, metas())
