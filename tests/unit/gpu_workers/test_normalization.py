"""PF-43, B46: one normaliser, safe on constant dimensions, strict on wrong statistics."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vla_platform.datasets.statistics import Statistics
from vla_platform.errors import DataError
from vla_platform.gpu_workers.normalization import Q99_LIMIT, Normalization, Normalizer

KINDS: tuple[Normalization, ...] = get_args(Normalization)


def statistics_of(rows: object) -> Statistics:
    return Statistics.compute(np.asarray(rows, np.float64), key="action")


@pytest.mark.parametrize("kind", KINDS)
def test_pf43_a_constant_dimension_round_trips(kind: Normalization) -> None:
    rows = np.stack([np.linspace(-1, 1, 50), np.full(50, 0.3)], axis=1)
    normalizer = Normalizer(kind, statistics_of(rows), dim=2)
    scaled = normalizer.normalize(torch.tensor(rows, dtype=torch.float32))
    assert torch.isfinite(scaled).all()
    assert float(scaled[:, 1].abs().max()) == 0.0
    whatever = normalizer.denormalize(torch.randn(4, 2))
    assert [np.float32(0.3)] * 4 == whatever[:, 1].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_float32_rounding_of_a_constant_is_no_spread(kind: Normalization) -> None:
    rows = np.array([[100.0], [np.nextafter(np.float32(100), np.float32(101))]])
    assert Normalizer(kind, statistics_of(rows), dim=1).varies.tolist() == [False]


def test_min_max_maps_to_one() -> None:
    normalizer = Normalizer("min_max", statistics_of([[2.0], [6.0]]), dim=1)
    assert normalizer.normalize(torch.tensor([[2.0], [4.0], [6.0]])).tolist() == [
        [-1.0],
        [0.0],
        [1.0],
    ]


def test_q99_limits_outliers() -> None:
    normalizer = Normalizer("q99", statistics_of(np.linspace(0, 1, 101)[:, None]), dim=1)
    assert pytest.approx(float(normalizer.normalize(torch.tensor([[50.0]])))) == Q99_LIMIT


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(
    rows=hnp.arrays(np.float32, (6, 3), elements=st.floats(-1e3, 1e3, width=32)),
)
def test_inside_the_data_denormalize_inverts(kind: Normalization, rows: np.ndarray) -> None:
    normalizer = Normalizer(kind, statistics_of(rows), dim=3)
    values = torch.tensor(rows)
    if kind == "q99":  # outside the quantiles the limit bites
        values = values.clamp(
            normalizer.centre - normalizer.scale, normalizer.centre + normalizer.scale
        )
    back = normalizer.denormalize(normalizer.normalize(values))
    assert torch.isfinite(back).all()
    torch.testing.assert_close(values, back, rtol=1e-4, atol=5e-3)


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("min_max", "min", [9.0, 0.0], "min above max in dimension 0"),
        ("q99", "q01", [0.0, 9.0], "q01 above q99 in dimension 1"),
        ("mean_std", "std", [-1.0, 1.0], "negative"),
        ("mean_std", "mean", [np.nan, 1.0], "not finite"),
        ("min_max", "max", [1.0], "the schema wants"),
    ],
)
def test_b46_wrong_statistics_are_refused(
    kind: Normalization, name: str, value: list[float], message: str
) -> None:
    good = statistics_of([[0.0, 0.0], [1.0, 1.0]])
    with pytest.raises(DataError, match=message):
        Normalizer(kind, replace(good, **{name: np.array(value)}), dim=2)


def test_b46_missing_statistics_are_refused() -> None:
    with pytest.raises(DataError, match="lack 'max'"):
        Normalizer("min_max", SimpleNamespace(min=np.zeros(1)), dim=1)  # type: ignore[arg-type]
