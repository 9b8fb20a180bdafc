from __future__ import annotations

import numpy as np
import pytest

from vla_platform.errors import DataError, SpecError
from vla_platform.rl.groups import (
    SCORE_HOOKS,
    SHAPE_HOOKS,
    EpisodeMeta,
    find_hook,
    judge,
    without_zero_groups,
)


def episodes(*groups: list[bool]) -> list[EpisodeMeta]:
    return [
        EpisodeMeta(
            episode=10 * group + at, group=group, success=success, score=float(success), num_steps=9
        )
        for group, successes in enumerate(groups)
        for at, success in enumerate(successes)
    ]


def test_groups_outside_the_pass_rates_are_rejected_whole() -> None:
    every = episodes([True, True], [True, False], [False, False])
    verdict = judge(every, lowest=0.1, highest=0.9)
    assert verdict.rejected == (0, 2)
    assert [one.group for one in verdict.kept] == [1, 1]
    assert verdict.pass_rates == {0: 1.0, 1: 0.5, 2: 0.0}
    assert judge(every).rejected == ()


def test_groups_without_advantage_are_left_out() -> None:
    every = episodes([True, True], [True, False])
    mask, empty = without_zero_groups(every, np.array([0.0, 0.0, 0.7, -0.7]))
    assert (list(mask), empty) == ([False, False, True, True], (0,))


def test_hooks_rewrite_scores_and_advantages() -> None:
    every = episodes([True, False])
    shorter = find_hook("length_penalty@1", SCORE_HOOKS)(every, {"per_step": 0.1})
    assert [one.score for one in shorter] == pytest.approx([0.1, -0.9])
    scored = find_hook("success_score@1", SCORE_HOOKS)(every, {"reward": 5.0})
    assert [one.score for one in scored] == [5.0, 0.0]
    clipped = find_hook("clip@1", SHAPE_HOOKS)(every, np.array([9.0, -9.0]), {"limit": 2.0})
    assert list(clipped) == [2.0, -2.0]
    better = find_hook("positive_only@1", SHAPE_HOOKS)(every, np.array([1.0, -1.0]), {})
    assert list(better) == [1.0, 0.0]


def test_an_unknown_hook_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SpecError, match="length_penalty@1"):
        find_hook("lenght_penalty@1", SCORE_HOOKS)


def test_a_score_that_is_not_finite_is_refused_b39() -> None:
    with pytest.raises(DataError, match="not finite"):
        EpisodeMeta(episode=0, group=0, success=True, score=float("nan"), num_steps=1)
