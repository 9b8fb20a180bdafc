"""What ranks tell each other of a group before anything is computed from it, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from vla_platform.errors import RankFailedError, RankLostError
from vla_platform.gpu_workers.ranks.share import BatchShare, OwnRows
from vla_storage.errors import CodedError

O = TypeVar("O")  # noqa: E741


@dataclass(frozen=True)
class ItemTold:
    """An item whose rows are in order on this rank."""

    own: OwnRows
    hits: int  # of its rows here whose features were kept


@dataclass(frozen=True, kw_only=True)
class GroupTold:
    """One rank's part of a group."""

    items: tuple[ItemTold | CodedError, ...]
    failed: bool  # it has no features: for want of memory, most likely
    num_forwards: int
    forward_ms: float
    misses: int


class GroupHeard:
    """What all ranks have told, in rank order, as one of them hears it."""

    def __init__(self, told: Sequence[GroupTold], *, rank: int) -> None:
        self._told = told
        self._rank = rank
        self.failed = any(one.failed for one in told)
        self.num_forwards = sum(one.num_forwards for one in told)
        self.forward_ms = max(one.forward_ms for one in told)
        self.forward_s = sum(one.forward_ms for one in told) / 1000  # of all devices
        self.misses = sum(one.misses for one in told)
        self.size = sum(self.error(at) is None for at in range(len(told[0].items)))

    def error(self, at: int) -> CodedError | None:
        """What is wrong with an item on the first rank on which something is."""
        found = (one.items[at] for one in self._told)
        return next((one for one in found if isinstance(one, CodedError)), None)

    def share(self, at: int) -> BatchShare:
        """This rank's share of an item without an error."""
        return BatchShare.joined([one.own for one in self._of(at)], rank=self._rank)

    def hits(self, at: int) -> int:
        return sum(one.hits for one in self._of(at))

    def _of(self, at: int) -> list[ItemTold]:
        found = (one.items[at] for one in self._told)
        return [one for one in found if isinstance(one, ItemTold)]


def explained(outcome: O, answers: Sequence[CodedError | None]) -> O | CodedError:
    """An outcome, with the error of the rank that has failed where this one only heard of it.

    Raises `RankLostError` where another has failed in what this one has done.
    """
    failed = next((one for one in answers if one is not None), None)
    if failed is not None and not isinstance(outcome, Exception):
        raise RankLostError(f"a rank has failed in what others have done: {failed}") from failed
    if not isinstance(outcome, RankFailedError):
        return outcome
    own = (one for one in answers if one is not None and not isinstance(one, RankFailedError))
    return next(own, outcome)
