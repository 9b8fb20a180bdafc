"""Advantage arithmetic against numbers worked out by hand and a slow reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_platform.errors import DataError
from vla_platform.rl.advantages import (
    Level,
    Rows,
    discounted_returns,
    generalized_advantages,
    group_relative,
    normalized,
    over_rows,
    returns_with_baseline,
)

GAMMA, LAM = 0.99, 0.95


def rows_of(episodes: list[tuple[list[list[float]], str]], *, chunk: int = 1) -> Rows:
    """Episodes as lists of chunks of rewards, with how they end."""
    rewards, valid, next_row, transition, terminated = [], [], [], [], []
    for chunks, end in episodes:
        for number, chunk_rewards in enumerate(chunks):
            padded = chunk_rewards + [0.0] * (chunk - len(chunk_rewards))
            rewards.append(padded)
            valid.append([at < len(chunk_rewards) for at in range(chunk)])
            next_row.append(len(rewards))
            transition.append(True)
            terminated.append(end == "terminated" and number == len(chunks) - 1)
        rewards.append([0.0] * chunk)
        valid.append([False] * chunk)
        next_row.append(-1)
        transition.append(False)
        terminated.append(False)
    return Rows(
        rewards=np.array(rewards),
        valid=np.array(valid),
        next_row=np.array(next_row),
        is_transition=np.array(transition),
        terminated=np.array(terminated),
    )


def test_truncation_bootstraps_from_the_true_final_observation_pf30() -> None:
    """Five steps of no reward, cut at the limit, V(final) = 10; another episode follows."""
    rows = rows_of([([[0.0]] * 5, "truncated"), ([[100.0]] * 3, "terminated")])
    values = np.zeros(10)
    values[5] = 10.0
    found = generalized_advantages(rows, values, gamma=GAMMA, lam=LAM)
    delta = GAMMA * 10.0  # of the last step alone; all others are 0
    expected = [(GAMMA * LAM) ** (4 - step) * delta for step in range(5)]
    np.testing.assert_allclose(found.advantages[:5, 0], expected, rtol=1e-12)
    assert found.advantages[4, 0] == pytest.approx(9.9)
    assert found.advantages[5, 0] == 0.0


def test_termination_bootstraps_nothing() -> None:
    rows = rows_of([([[0.0]] * 5, "terminated")])
    values = np.zeros(6)
    values[5] = 10.0
    assert not generalized_advantages(rows, values, gamma=GAMMA, lam=LAM).advantages.any()


def test_two_steps_by_hand() -> None:
    rows = rows_of([([[1.0], [2.0]], "terminated")])
    values = np.array([0.5, 0.25, 7.0])
    found = generalized_advantages(rows, values, gamma=0.9, lam=0.5)
    last = 2.0 - 0.25
    first = 1.0 + 0.9 * 0.25 - 0.5 + 0.9 * 0.5 * last
    np.testing.assert_allclose(found.advantages[:2, 0], [first, last])
    np.testing.assert_allclose(found.returns, [first + 0.5, last + 0.25, 0.0])


def test_the_steps_of_a_chunk_are_credited_with_what_follows_them() -> None:
    rows = rows_of([([[1.0, 2.0], [4.0]], "terminated")], chunk=2)
    found = generalized_advantages(rows, np.zeros(3), gamma=0.5, lam=1.0, level=Level.STEP)
    # From the chunk's start: 1 + 0.5*2 + 0.25*4 = 3; the second action is not owed the first's 1.
    np.testing.assert_allclose(found.advantages, [[3.0, 2.0], [4.0, 0.0], [0.0, 0.0]])


def test_chunk_level_counts_chunks() -> None:
    rows = rows_of([([[1.0, 2.0], [4.0]], "terminated")], chunk=2)
    found = generalized_advantages(rows, np.zeros(3), gamma=0.5, lam=1.0, level=Level.CHUNK)
    np.testing.assert_allclose(found.advantages, [[5.0, 5.0], [4.0, 0.0], [0.0, 0.0]])


EPISODES = st.lists(
    st.tuples(
        st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=3), min_size=1, max_size=5),
        st.sampled_from(["terminated", "truncated"]),
    ),
    min_size=1,
    max_size=4,
)


@given(episodes=EPISODES, level=st.sampled_from(Level), data=st.data())
def test_gae_equals_the_sum_of_its_definition(
    episodes: list[tuple[list[list[float]], str]], level: Level, data: st.DataObject
) -> None:
    """A_t = sum over l of (gamma lambda)^l times delta; each episode alone."""
    rows = rows_of(episodes, chunk=3)
    num = len(rows.next_row)
    values = np.array(data.draw(st.lists(st.floats(-3, 3), min_size=num, max_size=num)))
    found = generalized_advantages(rows, values, gamma=GAMMA, lam=LAM, level=level)
    row = 0
    for chunks, end in episodes:
        rewards, discounts = [], []
        for chunk in chunks:
            if level is Level.CHUNK:
                rewards.append(sum(chunk))
                discounts.append(GAMMA)
            else:
                rewards.append(sum(GAMMA**k * one for k, one in enumerate(chunk)))
                discounts.append(GAMMA ** len(chunk))
        for start in range(len(chunks)):
            total, weight = 0.0, 1.0
            for at in range(start, len(chunks)):
                dead = end == "terminated" and at == len(chunks) - 1
                following = 0.0 if dead else values[row + at + 1]
                delta = rewards[at] + discounts[at] * following - values[row + at]
                total += weight * delta
                weight *= discounts[at] * LAM
            assert found.advantages[row + start, 0] == pytest.approx(total, abs=1e-9)
            assert found.returns[row + start] == pytest.approx(total + values[row + start])
        row += len(chunks) + 1


@given(episodes=EPISODES)
def test_with_lambda_one_the_advantage_is_return_less_value(
    episodes: list[tuple[list[list[float]], str]],
) -> None:
    rows = rows_of(episodes, chunk=3)
    values = np.linspace(-1, 1, len(rows.next_row))
    found = generalized_advantages(rows, values, gamma=GAMMA, lam=1.0)
    expected = discounted_returns(rows, gamma=GAMMA, values=values)
    np.testing.assert_allclose(found.returns, expected, atol=1e-9)


def test_reinforce_subtracts_the_mean_return() -> None:
    rows = rows_of([([[1.0], [1.0]], "terminated"), ([[4.0]], "terminated")])
    found = returns_with_baseline(rows, gamma=1.0)
    np.testing.assert_allclose(found.returns, [2, 1, 0, 4, 0])
    expected = [2 - 7 / 3, 1 - 7 / 3, 0, 4 - 7 / 3, 0]
    np.testing.assert_allclose(found.advantages[:, 0], expected)


def test_group_relative_by_hand_and_its_corners_b16_b40() -> None:
    scores = np.array([1.0, 0.0, 1.0, 0.0, 5.0, 2.0, 2.0])
    groups = np.array([0, 0, 0, 0, 1, 2, 2])
    found = group_relative(scores, groups)
    std = np.std([1, 0, 1, 0], ddof=1)
    np.testing.assert_allclose(found[:4], np.array([0.5, -0.5, 0.5, -0.5]) / (std + 1e-6))
    assert list(found[4:]) == [0.0, 0.0, 0.0]  # a group of one, and one of equal scores
    np.testing.assert_allclose(group_relative(scores, groups, scale=False)[:2], [0.5, -0.5])


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-1e6, 1e6)), min_size=1, max_size=30))
def test_group_relative_is_finite_and_centred(pairs: list[tuple[int, float]]) -> None:
    groups, scores = (np.array(side) for side in zip(*pairs, strict=True))
    found = group_relative(scores.astype(float), groups)
    assert np.isfinite(found).all()
    for group in np.unique(groups):
        assert abs(found[groups == group].sum()) < 1e-6


def test_episode_advantages_reach_executed_actions_only() -> None:
    rows = rows_of([([[0.0, 0.0], [0.0]], "terminated")], chunk=2)
    spread = over_rows(np.array([2.0]), np.array([0, 0, 0]), rows)
    np.testing.assert_allclose(spread, [[2, 2], [2, 0], [0, 0]])


def test_normalizing_leaves_equal_numbers_alone() -> None:
    valid = np.array([[True, True], [True, False]])
    equal = np.full((2, 2), 3.0)
    np.testing.assert_allclose(normalized(equal, valid), equal)
    found = normalized(np.array([[1.0, 2.0], [3.0, 99.0]]), valid)
    assert found[valid].mean() == pytest.approx(0.0, abs=1e-12)
    assert found[1, 1] == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rewards_and_values_that_are_not_finite_are_refused_b39(bad: float) -> None:
    with pytest.raises(DataError, match="reward in row 1"):
        rows_of([([[0.0], [bad]], "terminated")])
    rows = rows_of([([[0.0]], "terminated")])
    with pytest.raises(DataError, match="value of row 1"):
        generalized_advantages(rows, np.array([0.0, bad]), gamma=GAMMA, lam=LAM)


def test_a_decision_without_a_following_row_is_refused_b41() -> None:
    with pytest.raises(DataError, match="no next row"):
        Rows(
            rewards=np.zeros((1, 1)),
            valid=np.ones((1, 1), bool),
            next_row=np.array([-1]),
            is_transition=np.array([True]),
            terminated=np.array([False]),
        )
