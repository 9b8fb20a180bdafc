from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vla_platform.errors import SpecError
from vla_platform.rl.shares import quotas


@given(
    shares=st.lists(st.floats(0.01, 100), min_size=1, max_size=8),
    size=st.integers(1, 200),
)
def test_places_are_given_out_once_and_by_share(shares: list[float], size: int) -> None:
    assume(len(shares) <= size)
    found = quotas(shares, size)
    assert sum(found) == size
    assert min(found) >= 1
    exact = [size * share / sum(shares) for share in shares]
    if min(exact) >= 1:
        assert all(abs(one - wanted) < 1 for one, wanted in zip(found, exact, strict=True))
    for one, other in zip(range(len(shares)), range(1, len(shares)), strict=False):
        if shares[one] > shares[other]:
            assert found[one] >= found[other]


def test_quotas_by_hand() -> None:
    assert quotas([1, 1], 8) == [4, 4]
    assert quotas([1, 2], 5) == [2, 3]
    assert quotas([1, 1, 1], 8) == [3, 3, 2]
    assert quotas([100, 1], 8) == [7, 1]


@pytest.mark.parametrize(("shares", "size"), [([], 4), ([0.0, 1.0], 4), ([1, 1, 1], 2)])
def test_shares_that_cannot_be_given_are_refused(shares: list[float], size: int) -> None:
    with pytest.raises(SpecError, match="positive shares"):
        quotas(shares, size)
