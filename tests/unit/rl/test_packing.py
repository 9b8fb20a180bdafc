from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vla_platform.rl.packing import RowMeta, accepted, assign, micro_batches

TOKENS = st.lists(st.integers(1, 100), max_size=60)


@given(tokens=TOKENS, max_tokens=st.integers(20, 300))
def test_every_row_is_in_one_part_within_the_limit(tokens: list[int], max_tokens: int) -> None:
    parts = micro_batches(tokens, max_tokens=max_tokens)
    assert sorted(place for part in parts for place in part) == list(range(len(tokens)))
    for part in parts:
        assert part == sorted(part)
        assert sum(tokens[place] for place in part) <= max_tokens or len(part) == 1
    if len(parts) > 1:  # first fit leaves no two parts that would fit into one
        loads = sorted(sum(tokens[place] for place in part) for part in parts)
        assert loads[0] + loads[1] > max_tokens


@given(tokens=TOKENS, num_ranks=st.integers(1, 8), seed=st.randoms(use_true_random=False))
def test_ranks_share_the_rows_evenly_and_the_same_way_on_each(
    tokens: list[int], num_ranks: int, seed: object
) -> None:
    rows = [RowMeta(row=at, tokens=count) for at, count in enumerate(tokens)]
    found = assign(rows, num_ranks=num_ranks)
    assert sorted(one.row for mine in found for one in mine) == list(range(len(tokens)))
    loads = [sum(one.tokens for one in mine) for mine in found]
    assert max(loads) - min(loads) <= max(tokens, default=0)
    shuffled = list(rows)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    assert found == assign(shuffled, num_ranks=num_ranks)


def test_a_batch_that_fits_stays_as_it_is() -> None:
    assert micro_batches([5, 9, 5], max_tokens=19) == [[0, 1, 2]]
    assert micro_batches([5, 9, 5, 30], max_tokens=14) == [[3], [0, 1], [2]]
    assert micro_batches([], max_tokens=14) == []


def test_only_rows_with_something_to_train_are_accepted() -> None:
    trained = np.array([[1, 1], [0, 0], [0, 1], [1, 1]], bool)
    found = accepted(np.array([True, True, True, False]), trained, [7, 7, 9, 7])
    assert found == [RowMeta(row=0, tokens=7), RowMeta(row=2, tokens=9)]
