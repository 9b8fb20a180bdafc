from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_platform.errors import SpecError
from vla_platform.rl.packing import RowMeta, pack, yield_batch


def rows(*tokens: int, source: str = "") -> list[RowMeta]:
    return [RowMeta(row=at, tokens=count, source=source) for at, count in enumerate(tokens)]


@given(
    tokens=st.lists(st.integers(1, 100), max_size=60),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(20, 300),
)
def test_every_row_is_packed_once_within_the_limit(
    tokens: list[int], num_ranks: int, max_tokens: int
) -> None:
    plan = pack(rows(*tokens), num_ranks=num_ranks, max_tokens=max_tokens)
    assert sorted(row for one in plan for row in one.rows) == list(range(len(tokens)))
    for one in plan:
        assert one.tokens == sum(tokens[row] for row in one.rows)
        assert one.tokens <= max_tokens or len(one.rows) == 1
    counts = [sum(one.rank == rank for one in plan) for rank in range(num_ranks)]
    assert len(set(counts)) == 1
    loads = [sum(one.tokens for one in plan if one.rank == rank) for rank in range(num_ranks)]
    assert max(loads) - min(loads) <= max(tokens, default=0)


def test_equal_input_gives_an_equal_plan() -> None:
    given_rows = rows(5, 5, 5, 9, 1)
    plan = pack(given_rows, num_ranks=2, max_tokens=10)
    assert plan == pack(list(reversed(given_rows)), num_ranks=2, max_tokens=10)


def test_a_batch_waits_until_every_source_has_given_its_share() -> None:
    some = [RowMeta(row=at, tokens=1, source="abb"[at % 3]) for at in range(9)]
    assert yield_batch(some, shares={"a": 1, "b": 1}, batch_size=8) is None
    found = yield_batch(some, shares={"a": 1, "b": 2}, batch_size=6)
    assert found is not None
    assert [row.source for row in found.rows].count("a") == 2
    assert len(found.left) == 3


def test_what_rounding_leaves_over_goes_to_the_largest() -> None:
    some = [RowMeta(row=at, tokens=1, source="ab"[at % 2]) for at in range(20)]
    found = yield_batch(some, shares={"a": 1, "b": 2}, batch_size=5)
    assert found is not None
    assert [row.source for row in found.rows].count("b") == 4


def test_shares_are_positive() -> None:
    with pytest.raises(SpecError, match="positive"):
        yield_batch(rows(1), shares={"a": 0.0}, batch_size=1)
