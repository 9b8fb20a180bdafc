from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from vla_platform.gpu_workers.ranks.share import BatchShare, OwnRows, spread

NUM_RANKS = st.integers(1, 8)


@given(homes=st.lists(st.integers(0, 2**64 - 1), max_size=80), num_ranks=NUM_RANKS)
def test_every_row_of_a_batch_is_on_one_rank_and_ranks_have_equally_many(
    homes: list[int], num_ranks: int
) -> None:
    shares = spread(homes, num_ranks=num_ranks)
    assert sorted(row for mine in shares for row in mine) == list(range(len(homes)))
    assert all(list(mine) == sorted(mine) for mine in shares)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert shares == spread(homes, num_ranks=num_ranks)


@given(
    homes=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=80, unique=True),
    num_ranks=NUM_RANKS,
    order=st.randoms(use_true_random=False),
)
def test_only_who_has_too_many_gives_rows_away(
    homes: list[int], num_ranks: int, order: object
) -> None:
    """So most rows come to the rank that kept their features, in whatever batch they come."""
    shares = spread(homes, num_ranks=num_ranks)
    wanted = Counter(home % num_ranks for home in homes)
    for rank, mine in enumerate(shares):
        at_home = sum(homes[row] % num_ranks == rank for row in mine)
        assert at_home == min(wanted[rank], len(mine))
    shuffled = list(homes)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    again = spread(shuffled, num_ranks=num_ranks)
    assert [len(mine) for mine in again] == [len(mine) for mine in shares]


@st.composite
def told(draw: st.DrawFn) -> list[OwnRows]:
    """Any rows on any ranks."""
    numbers = draw(st.lists(st.integers(0, 500), unique=True, max_size=40))
    num_ranks = draw(NUM_RANKS)
    of: list[list[int]] = [[] for _ in range(num_ranks)]
    for number in sorted(numbers):
        of[draw(st.integers(0, num_ranks - 1))].append(number)
    # Told by the number, so that a row can be known again.
    return [OwnRows(rows=tuple(r), valid=tuple(r), lengths=tuple(n + 1 for n in r)) for r in of]


@settings(deadline=None)
@given(ranks=told(), max_tokens=st.integers(1, 2000), order=st.randoms(use_true_random=False))
def test_ranks_compute_the_same_passes_and_every_row_of_them_once(
    ranks: list[OwnRows], max_tokens: int, order: object
) -> None:
    shares = [BatchShare.joined(ranks, rank=rank) for rank in range(len(ranks))]
    rows = sorted(row for one in ranks for row in one.rows)
    assert all(share.valid == tuple(rows) for share in shares)
    assert all(share.num_valid == sum(rows) for share in shares)
    places = list(range(len(rows)))
    order.shuffle(places)  # type: ignore[attr-defined]
    cut = [share.passes(places, max_tokens=max_tokens) for share in shares]
    assert len({tuple(part.num_rows for part in parts) for parts in cut}) == 1
    done: list[int] = []
    for parts in zip(*cut, strict=True):
        at = sorted(place for part in parts for place in part.at)
        assert at == list(range(parts[0].num_rows))
        for rank, part in enumerate(parts):
            done += [ranks[rank].rows[own] for own in part.own]
    assert sorted(done) == rows


@given(valid=st.lists(st.integers(0, 8), min_size=1, max_size=30), num_parts=st.integers(1, 5))
def test_one_rank_has_every_part_whole(valid: list[int], num_parts: int) -> None:
    share = BatchShare.whole(valid, [1] * len(valid))
    bounds = [len(valid) * at // num_parts for at in range(num_parts + 1)]
    for start, stop in itertools.pairwise(bounds):
        part = share.part(range(start, stop))
        assert part.is_whole
        assert part.own == tuple(range(start, stop))
