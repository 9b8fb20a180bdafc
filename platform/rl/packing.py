"""From accepted rows to micro-batches on ranks, on metadata alone.

Pure arithmetic over lengths: who trains which rows, and which of them together, is decided without
a tensor, so that a rank fetches its own rows only. A batch is the same whatever the number of ranks
and however it is cut: ranks and micro-batches add up shares of its loss.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class RowMeta:
    """One row that is trained."""

    row: int
    tokens: int  # what it costs


def accepted(
    is_transition: npt.NDArray[Any], trained: npt.NDArray[Any], tokens: Sequence[int]
) -> list[RowMeta]:
    """The rows with an action to train: no final observation, nothing of a rejected group.

    is_transition (R,), trained (R, H), tokens (R,).
    """
    chosen = is_transition.astype(bool) & trained.astype(bool).any(axis=1)
    return [RowMeta(row=row, tokens=tokens[row]) for row in np.flatnonzero(chosen).tolist()]


def assign(rows: Sequence[RowMeta], *, num_ranks: int) -> list[tuple[RowMeta, ...]]:
    """Each rank's rows, ascending, even by tokens.

    Longest first onto the rank with the least (Graham 1969: within 4/3 of the best). Equal rows,
    equal assignment, in whatever order they come.
    """
    load = [(0, rank) for rank in range(num_ranks)]
    of: list[list[RowMeta]] = [[] for _ in range(num_ranks)]
    for row in sorted(rows, key=lambda one: (-one.tokens, one.row)):
        tokens, rank = heapq.heappop(load)
        of[rank].append(row)
        heapq.heappush(load, (tokens + row.tokens, rank))
    return [tuple(sorted(mine, key=lambda one: one.row)) for mine in of]


def micro_batches(tokens: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Places 0 to N-1 of a batch cut into parts of at most `max_tokens`, each ascending.

    Longest first into the first part with room, so parts are few, and rows of like length meet and
    need little padding. A row over `max_tokens` is a part of its own.
    """
    parts: list[list[int]] = []
    loads: list[int] = []
    for place in sorted(range(len(tokens)), key=lambda place: (-tokens[place], place)):
        for at, load in enumerate(loads):
            if load + tokens[place] <= max_tokens:
                parts[at].append(place)
                loads[at] += tokens[place]
                break
        else:
            parts.append([place])
            loads.append(tokens[place])
    return [sorted(part) for part in parts]
