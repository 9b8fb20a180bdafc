"""What training needs of the other ranks of its worker, whoever carries it.

Rank 0 leads: it has the ledger, the checkpoints and the group; the others do what it says. What
ranks tell each other is metadata (`exchange`); gradients are added up (`add_up`). Every rank makes
the same calls in the same order, whatever becomes of its own rows.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from vla_platform.gpu_workers.ranks.commands import Command

T = TypeVar("T")


class Ranks(ABC):
    """The ranks of a worker, as one of them sees them. Not thread-safe within a command."""

    rank: int
    num_ranks: int

    def lead(self, command: Callable[[], Command]) -> contextlib.AbstractContextManager[list[Any]]:
        """Within it all ranks do what `command` returns; afterwards the list holds what the others
        answered, in rank order. Does nothing, and asks for no command, where nobody follows.

        Raises `RankLostError` where a rank is gone: this process can train no more.
        """
        return contextlib.nullcontext([])

    @abstractmethod
    def exchange(self, value: T) -> list[T]:
        """What each rank has given, in rank order: metadata."""

    @abstractmethod
    def add_up(self, numbers: Tensor) -> None:
        """Put the sum over all ranks into `numbers`: the same bits on each of them."""

    @abstractmethod
    def hand_out(self, numbers: Tensor) -> None:
        """Put what rank 0 has into everybody's `numbers`."""


class Alone(Ranks):
    """One rank: a worker without followers."""

    rank = 0
    num_ranks = 1

    def exchange(self, value: T) -> list[T]:
        return [value]

    def add_up(self, numbers: Tensor) -> None:
        return None

    def hand_out(self, numbers: Tensor) -> None:
        return None
