"""From accepted rows to micro-batches on ranks, on metadata alone.

The plan is pure arithmetic over lengths: which rows a rank trains together is decided without a
tensor, and the packer of a rank then fetches only those rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vla_platform.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class RowMeta:
    """One row that could be trained."""

    row: int
    tokens: int  # what it costs
    source: str = ""  # data source, for shares of a batch


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Rows of one micro-batch of one rank, in ascending order."""

    rank: int
    rows: tuple[int, ...]
    tokens: int


def pack(rows: Sequence[RowMeta], *, num_ranks: int, max_tokens: int) -> list[Assignment]:
    """Spread rows over ranks evenly by tokens, in micro-batches of at most `max_tokens`.

    Longest first onto the rank with the least (Graham 1969: within 4/3 of the best). Every rank
    gets the same number of micro-batches, for a collective waits for all; some may be empty.
    A row over `max_tokens` is a micro-batch of its own. Equal input, equal plan.
    """
    load = [(0, rank) for rank in range(num_ranks)]
    of: dict[int, list[RowMeta]] = {rank: [] for rank in range(num_ranks)}
    for row in sorted(rows, key=lambda one: (-one.tokens, one.row)):
        tokens, rank = heapq.heappop(load)
        of[rank].append(row)
        heapq.heappush(load, (tokens + row.tokens, rank))
    packed = {rank: _first_fit(mine, max_tokens) for rank, mine in of.items()}
    deepest = max((len(batches) for batches in packed.values()), default=0)
    plan = []
    for at in range(deepest):
        for rank in range(num_ranks):
            batch = packed[rank][at] if at < len(packed[rank]) else []
            plan.append(
                Assignment(
                    rank=rank,
                    rows=tuple(sorted(one.row for one in batch)),
                    tokens=sum(one.tokens for one in batch),
                )
            )
    return plan


def _first_fit(rows: Sequence[RowMeta], max_tokens: int) -> list[list[RowMeta]]:
    """Each row into the first micro-batch that has room; rows come longest first."""
    batches: list[list[RowMeta]] = []
    loads: list[int] = []
    for row in rows:
        for at, load in enumerate(loads):
            if load + row.tokens <= max_tokens:
                batches[at].append(row)
                loads[at] += row.tokens
                break
        else:
            batches.append([row])
            loads.append(row.tokens)
    return batches


@dataclass(frozen=True, kw_only=True)
class Yield:
    """A batch that every data source has given its share of."""

    rows: tuple[RowMeta, ...]
    left: tuple[RowMeta, ...]  # for the next batch


def yield_batch(
    rows: Sequence[RowMeta], *, shares: Mapping[str, float], batch_size: int
) -> Yield | None:
    """The oldest rows of each source by its share of `batch_size`; None while one lacks rows.

    Shares are relative; what rounding leaves over goes to the largest. Raises `SpecError` for
    shares that are not positive.
    """
    if not shares or any(share <= 0 for share in shares.values()):
        raise SpecError("shares are positive numbers, one for each data source", problems=[])
    total = sum(shares.values())
    quota = {source: int(batch_size * share / total) for source, share in shares.items()}
    largest = max(shares, key=lambda source: (shares[source], source))
    quota[largest] += batch_size - sum(quota.values())
    taken: list[RowMeta] = []
    for source, count in quota.items():
        mine = [row for row in rows if row.source == source][:count]
        if len(mine) < count:
            return None
        taken.extend(mine)
    chosen = {row.row for row in taken}
    return Yield(
        rows=tuple(sorted(taken, key=lambda one: one.row)),
        left=tuple(row for row in rows if row.row not in chosen),
    )
