"""Order of samples."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_platform.datasets.sample_order import samples_at


@given(
    seed=st.integers(0, 2**32 - 1),
    num_samples=st.integers(1, 40),
    cuts=st.lists(st.integers(1, 25), min_size=1, max_size=12),
)
def test_pf22_any_cut_into_batches_gives_the_same_order(
    seed: int, num_samples: int, cuts: list[int]
) -> None:
    whole = samples_at(seed=seed, num_samples=num_samples, start=0, count=sum(cuts))
    pieces, start = [], 0
    for count in cuts:
        pieces += samples_at(seed=seed, num_samples=num_samples, start=start, count=count)
        start += count
    assert whole == pieces


@given(seed=st.integers(0, 2**32 - 1), num_samples=st.integers(1, 60))
def test_every_epoch_is_a_permutation(seed: int, num_samples: int) -> None:
    order = samples_at(seed=seed, num_samples=num_samples, start=0, count=3 * num_samples)
    for epoch in range(3):
        part = order[epoch * num_samples : (epoch + 1) * num_samples]
        assert list(range(num_samples)) == sorted(part)


def test_epochs_and_seeds_differ() -> None:
    first, second = (samples_at(seed=0, num_samples=100, start=s, count=100) for s in (0, 100))
    assert first != second
    assert first != samples_at(seed=1, num_samples=100, start=0, count=100)


def test_order_is_pinned_across_processes_and_versions() -> None:
    script = (
        "from vla_platform.datasets.sample_order import samples_at;"
        "print(samples_at(seed=7, num_samples=9, start=4, count=12))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(samples_at(seed=7, num_samples=9, start=4, count=12))
    assert samples_at(seed=7, num_samples=9, start=0, count=12) == [
        6,
        3,
        4,
        0,
        2,
        8,
        7,
        5,
        1,
        1,
        3,
        2,
    ]


@pytest.mark.parametrize(("num_samples", "start"), [(0, 0), (5, -1)])
def test_impossible_requests_are_refused(num_samples: int, start: int) -> None:
    with pytest.raises(ValueError, match="num_samples"):
        samples_at(seed=0, num_samples=num_samples, start=start, count=1)
