"""Ranks as threads of one process: for tests.

accelerate keeps one accumulation state per process, so micro-batches are for real ranks.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from torch import Tensor

from vla_platform.errors import RankLostError
from vla_platform.gpu_workers.ranks.base import Ranks

WAIT_S = 60.0
T = TypeVar("T")


class Meeting:
    """Where the threads find each other."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=WAIT_S)
        self.values: list[Any] = [None] * num_ranks


class MemoryRanks(Ranks):
    """One of them. Nobody leads: each thread makes the same calls."""

    def __init__(self, meeting: Meeting, *, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.num_ranks = len(meeting.values)

    def exchange(self, value: T) -> list[T]:
        meeting = self._meeting
        try:
            meeting.values[self.rank] = value
            meeting.barrier.wait()
            found = list(meeting.values)
            meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankLostError("a rank does not come") from error
        return found

    def add_up(self, numbers: Tensor) -> None:
        first, *others = self.exchange(numbers.clone())
        for one in others:
            first = first + one
        numbers.copy_(first)

    def hand_out(self, numbers: Tensor) -> None:
        numbers.copy_(self.exchange(numbers.clone())[0])
