"""Which rows of a batch a rank has, on metadata alone.

Every rank knows of every row how many of its actions are valid and how long its feature is, and so
draws the same minibatches and cuts them into the same passes; it computes its own rows of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vla_platform.rl.packing import micro_batches


@dataclass(frozen=True, kw_only=True)
class OwnRows:
    """What one rank tells the others of its rows."""

    rows: tuple[int, ...] = ()  # numbers that no other rank's rows have, ascending
    valid: tuple[int, ...] = ()  # valid actions of each
    lengths: tuple[int, ...] = ()  # feature tokens of each


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some rows of a batch that are computed together, and those of them that are here."""

    num_rows: int  # wherever they are
    at: tuple[int, ...]  # which of them are here
    own: tuple[int, ...]  # the same rows' places among the rank's own

    @property
    def is_whole(self) -> bool:
        return len(self.at) == self.num_rows


@dataclass(frozen=True)
class BatchShare:
    """A batch, and the places of the rows that are here, both ascending by row."""

    valid: tuple[int, ...]
    lengths: tuple[int, ...]
    places: tuple[int, ...]

    @classmethod
    def whole(cls, valid: Sequence[int], lengths: Sequence[int]) -> BatchShare:
        """All rows are here."""
        return cls(tuple(valid), tuple(lengths), tuple(range(len(valid))))

    @classmethod
    def joined(cls, told: Sequence[OwnRows], *, rank: int) -> BatchShare:
        """What all ranks have told, in rank order, as `rank` sees it."""
        if len(told) == 1:
            return cls.whole(told[0].valid, told[0].lengths)
        rows = sorted(
            (row, valid, length, of)
            for of, one in enumerate(told)
            for row, valid, length in zip(one.rows, one.valid, one.lengths, strict=True)
        )
        return cls(
            tuple(valid for _, valid, _, _ in rows),
            tuple(length for _, _, length, _ in rows),
            tuple(place for place, (*_, of) in enumerate(rows) if of == rank),
        )

    @property
    def num_rows(self) -> int:
        return len(self.valid)

    @property
    def num_valid(self) -> int:
        return sum(self.valid)

    @cached_property
    def _own(self) -> dict[int, int]:
        return {place: own for own, place in enumerate(self.places)}

    def part(self, places: Sequence[int]) -> Part:
        """The rows at these places, in this order."""
        here = [(at, self._own[place]) for at, place in enumerate(places) if place in self._own]
        return Part(
            num_rows=len(places),
            at=tuple(at for at, _ in here),
            own=tuple(own for _, own in here),
        )

    def passes(self, places: Sequence[int], *, max_tokens: int) -> list[Part]:
        """These rows in parts of at most `max_tokens` tokens: the same parts on every rank."""
        lengths = [self.lengths[place] for place in places]
        return [
            self.part([places[at] for at in part])
            for part in micro_batches(lengths, max_tokens=max_tokens)
        ]


def spread(homes: Sequence[int], *, num_ranks: int) -> list[tuple[int, ...]]:
    """Each rank's rows of a batch of alike rows, ascending; their numbers differ by 1 at most.

    A row goes to the rank that the number of its content, `homes`, names, for that rank has seen
    its frames before and may have kept their features; who would get too many gives its last ones
    to those with too few.
    """
    num_rows = len(homes)
    room = [num_rows // num_ranks + (rank < num_rows % num_ranks) for rank in range(num_ranks)]
    of: list[list[int]] = [[] for _ in range(num_ranks)]
    left: list[int] = []
    for row, home in enumerate(homes):
        mine = of[home % num_ranks]
        if len(mine) < room[home % num_ranks]:
            mine.append(row)
        else:
            left.append(row)
    for rank, mine in enumerate(of):
        missing = room[rank] - len(mine)
        mine += left[:missing]
        del left[:missing]
    return [tuple(sorted(mine)) for mine in of]
