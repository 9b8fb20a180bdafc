"""Statistics, computed and stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vla_platform.datasets import Statistics
from vla_platform.errors import DatasetError


@given(hnp.arrays(np.float32, (17, 3), elements=st.floats(-1e6, 1e6, width=32)))
def test_computed_statistics_are_ordered_and_survive_a_round_trip(rows: np.ndarray) -> None:
    found = Statistics.compute(rows, key="action")
    assert (found.min <= found.q01).all() and (found.q01 <= found.q99).all()
    assert (found.q99 <= found.max).all()
    assert (found.min <= found.mean).all() and (found.mean <= found.max).all()
    again = Statistics.from_dict(found.to_dict(), key="action", width=3)
    assert found.to_dict() == again.to_dict()


def test_values_equal_numpy() -> None:
    rows = np.random.default_rng(0).normal(size=(1000, 2))
    found = Statistics.compute(rows, key="state")
    np.testing.assert_allclose(rows.mean(0), found.mean)
    np.testing.assert_allclose(rows.std(0), found.std)
    np.testing.assert_allclose(np.quantile(rows, 0.99, axis=0), found.q99)
    assert found.count == 1000


def test_pf43_a_constant_dimension_stays_exactly_constant() -> None:
    rows = np.full((333, 1), np.float32(0.3))
    found = Statistics.compute(rows, key="action")
    expected = [float(np.float32(0.3))]
    for values in (found.min, found.max, found.mean, found.q01, found.q99):
        assert expected == values.tolist()
    assert found.std.tolist() == [0.0]


def test_rows_that_are_not_finite_do_not_count() -> None:
    rows = np.array([[1.0, 2.0], [np.nan, 5.0], [3.0, np.inf], [3.0, 4.0]])
    found = Statistics.compute(rows, key="action")
    assert (found.count, found.max.tolist()) == (2, [3.0, 4.0])
    with pytest.raises(DatasetError, match="no finite row"):
        Statistics.compute(rows[1:3], key="action")


@pytest.mark.parametrize(
    "change",
    [
        {"min": [5.0, 0.0]},
        {"mean": [float("nan"), 0.0]},
        {"count": 0},
        {"std": [-1.0, 1.0]},
        {"q99": None},
        {"max": ["a", "b"]},
    ],
)
def test_b46_broken_stored_statistics_are_refused(change: dict[str, Any]) -> None:
    good = Statistics.compute(np.arange(20.0).reshape(10, 2) / 10, key="action").to_dict()
    raw = {name: value for name, value in {**good, **change}.items() if value is not None}
    with pytest.raises(DatasetError, match="statistics of action"):
        Statistics.from_dict(raw, key="action", width=2)


def test_b45_other_width_is_refused_with_both_widths() -> None:
    raw = Statistics.compute(np.zeros((4, 7)), key="observation.state").to_dict()
    with pytest.raises(DatasetError) as caught:
        Statistics.from_dict(raw, key="observation.state", width=8)
    assert caught.value.details["statistics_width"] == 7
    assert caught.value.details["data_width"] == 8
