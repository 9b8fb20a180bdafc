"""Graders see whole groups and the columns they ask for; what they return is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from vla_platform.errors import DataError
from vla_platform.rl.graders import GRADERS, EpisodeRows, Grader, grade_episodes
from vla_platform.rl.groups import EpisodeMeta

H = 2


def metas(*scores: float, groups: Sequence[int] | None = None) -> list[EpisodeMeta]:
    return [
        EpisodeMeta(
            episode=at,
            group=groups[at] if groups else 0,
            success=score > 0,
            score=score,
            num_steps=3,
        )
        for at, score in enumerate(scores)
    ]


def rows(num: int, per_episode: int = 2) -> dict[str, Any]:
    """Episodes of so many decisions, each with a row for what it saw last."""
    episode = np.repeat(np.arange(num), per_episode + 1)
    return {
        "episode": episode,
        "is_transition": np.tile([True] * per_episode + [False], num),
    }


def test_a_grader_sees_whole_groups_and_its_own_columns_only() -> None:
    seen: list[tuple[list[int], list[list[float]]]] = []

    def grade(group: Sequence[EpisodeRows], options: Mapping[str, float]) -> list[float]:
        assert all(one.columns.keys() == {"x"} for one in group)
        seen.append(
            ([one.meta.episode for one in group], [list(one.columns["x"]) for one in group])
        )
        return [options["base"] + one.meta.episode for one in group]

    columns = {**rows(3), "x": np.arange(9.0), "secret": np.zeros(9)}
    grader = Grader(columns=("x",), grade=grade)
    found = grade_episodes(grader, metas(0, 0, 0, groups=[1, 0, 1]), columns, {"base": 10.0})
    assert found == {0: 10.0, 1: 11.0, 2: 12.0}
    assert seen == [([1], [[3, 4]]), ([0, 2], [[0, 1], [6, 7]])]


@pytest.mark.parametrize("bad", [[1.0], [1.0, float("nan")], [[1.0, 2.0]], [1.0, float("inf")]])
def test_what_is_no_number_for_each_is_refused_b39(bad: Any) -> None:
    grader = Grader(columns=(), grade=lambda group, options: bad)
    with pytest.raises(DataError, match="not 2 finite numbers"):
        grade_episodes(grader, metas(0, 0), rows(2), {})


def test_ranks_by_hand() -> None:
    found = grade_episodes(GRADERS["rank@1"], metas(5, 1, 5, 9), rows(4), {})
    assert [found[at] for at in range(4)] == pytest.approx([0.5, 0.0, 0.5, 1.0])
    assert grade_episodes(GRADERS["rank@1"], metas(3), rows(1), {}) == {0: 0.0}


def test_smoothness_counts_executed_actions_in_order() -> None:
    columns = rows(1) | {
        "executed_actions": np.array([[[0.0], [1.0]], [[3.0], [99.0]], [[0.0], [0.0]]]),
        "actions_is_pad": np.array([[False, False], [False, True], [True, True]]),
    }
    found = grade_episodes(GRADERS["smoothness@1"], metas(2.0), columns, {"weight": 2.0})
    assert found == {0: pytest.approx(2.0 - 2.0 * (1 + 2) / 2)}


def test_peak_reward_is_the_best_executed_one() -> None:
    columns = rows(1) | {
        "rewards": np.array([[-3.0, -1.0], [-2.0, 50.0], [7.0, 7.0]]),
        "actions_is_pad": np.array([[False, False], [False, True], [True, True]]),
    }
    assert grade_episodes(GRADERS["peak_reward@1"], metas(0.0), columns, {}) == {0: -1.0}
