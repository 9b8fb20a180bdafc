"""The interval of a success rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_platform.envs.intervals import wilson_interval


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    # 81 of 263: Newcombe 1998, table I, method 3
    [
        (5, 10, 0.2366, 0.7634),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_published_values(successes: int, episodes: int, low: float, high: float) -> None:
    assert pytest.approx((low, high), abs=1e-4) == wilson_interval(successes, episodes)


@given(st.integers(1, 5000), st.data())
def test_the_rate_lies_within(episodes: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, episodes))
    low, high = wilson_interval(successes, episodes)
    assert 0.0 <= low <= successes / episodes <= high <= 1.0
    mirrored = wilson_interval(episodes - successes, episodes)
    assert pytest.approx((low, high)) == (1 - mirrored[1], 1 - mirrored[0])


@pytest.mark.parametrize(("successes", "episodes"), [(1, 0), (-1, 5), (6, 5)])
def test_no_proportion(successes: int, episodes: int) -> None:
    with pytest.raises(ValueError, match="proportion"):
        wilson_interval(successes, episodes)
