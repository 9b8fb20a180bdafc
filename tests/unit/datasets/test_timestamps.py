"""Time comparison."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_platform.datasets.timestamps import TOLERANCE_S, nearest, offsets_beyond


@given(frame=st.integers(0, 200_000), fps=st.sampled_from([10, 15, 30, 50, 60, 29.97]))
def test_pf44_offset_of_exactly_the_tolerance_is_accepted(frame: int, fps: float) -> None:
    expected = np.array([frame / fps])
    for sign in (-1, 1):
        times = expected + sign * TOLERANCE_S
        assert not offsets_beyond(times - expected, times, single=False).any()
        stored = times.astype(np.float32).astype(np.float64)
        assert not offsets_beyond(stored - expected, stored, single=True).any()


@pytest.mark.parametrize("offset", [1.1e-4, -1.1e-4, np.nan, np.inf, 1e9])
def test_larger_offsets_are_beyond(offset: float) -> None:
    times = np.array([2.0])
    assert offsets_beyond(np.array([offset]), times, single=True).tolist() == [True]


@given(
    times=st.lists(st.floats(0, 100), min_size=1, max_size=30, unique=True).map(sorted),
    wanted=st.lists(st.floats(-5, 105), min_size=1, max_size=30),
)
def test_nearest_equals_brute_force(times: list[float], wanted: list[float]) -> None:
    values, targets = np.array(times), np.array(wanted)
    found = nearest(values, targets)
    best = np.abs(values[None] - targets[:, None]).min(axis=1)
    np.testing.assert_array_equal(best, np.abs(values[found] - targets))
