"""The gradients of a slot, added up over all ranks in one go.

One flat buffer per slot holds the gradients, which of them there are, what else is added up, and
whether a rank has failed: one collective per optimizer step. Ranks that fail come to it as well, so
that nobody waits for them, and all of them give the step up. Who fails after it is lost: the others
have taken the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from vla_platform.errors import (
    DivergedError,
    RankFailedError,
    RankLostError,
    UnsoundWorkerError,
)
from vla_platform.gpu_workers.ranks.base import Ranks

MOST_NUMBERS = 8


class GradientSum:
    def __init__(self, parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
        self._parameters = list(parameters)
        self._ranks = ranks
        self._buffer: _Buffer | None = None  # a slot that only acts needs none

    def __call__(self, numbers: Tensor) -> Tensor:
        """Sum gradients in place, and return the sum of `numbers`, (N,) with N up to 8.

        Raises `RankFailedError` where another rank has failed. A gradient that no rank has stays
        absent: the optimizer leaves such a parameter alone.
        """
        if self._ranks.num_ranks == 1:
            return numbers
        try:
            buffer = self._emptied()
            buffer.fill(self._parameters, numbers)
        except Exception:
            self.abandon()
            raise
        self._ranks.add_up(buffer.all)
        with taken_by_all(self._ranks):
            if float(buffer.failed) > 0:
                raise RankFailedError("another rank has failed: this step is given up")
            buffer.hand_back(self._parameters)
            return buffer.numbers[: len(numbers)].clone()

    def abandon(self) -> None:
        """This rank has failed: the others' steps are given up."""
        if self._ranks.num_ranks == 1:
            return
        for parameter in self._parameters:
            parameter.grad = None  # the buffer has to fit
        try:
            buffer = self._emptied()
            buffer.failed.fill_(1.0)
        except RuntimeError as error:
            raise RankLostError(f"a failed rank cannot tell the others: {error}") from error
        self._ranks.add_up(buffer.all)

    def _emptied(self) -> _Buffer:
        if self._buffer is None:
            self._buffer = _Buffer(self._parameters)
        self._buffer.all.zero_()
        return self._buffer


@contextlib.contextmanager
def taken_by_all(ranks: Ranks) -> Iterator[None]:
    """A step after its sum: what fails within, and not on all ranks alike, makes them differ."""
    try:
        yield
    except (DivergedError, RankFailedError, UnsoundWorkerError):
        raise
    except Exception as error:
        if ranks.num_ranks == 1:
            raise
        raise RankLostError(f"a step that other ranks have taken has failed: {error!r}") from error


class _Buffer:
    """`all`, and views of its parts."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        room = sum(sizes) + len(sizes) + MOST_NUMBERS + 1
        self.all = torch.zeros(room, dtype=torch.float32, device=parameters[0].device)
        parts = torch.split(self.all, [*sizes, len(sizes), MOST_NUMBERS, 1])
        *self._gradients, self._present, self.numbers, self.failed = parts

    def fill(self, parameters: list[nn.Parameter], numbers: Tensor) -> None:
        for at, (parameter, place) in enumerate(self._places(parameters)):
            if parameter.grad is not None:
                place.copy_(parameter.grad)
                self._present[at] = 1.0
        self.numbers[: len(numbers)] = numbers

    def hand_back(self, parameters: list[nn.Parameter]) -> None:
        present = self._present.tolist()
        for there, (parameter, place) in zip(present, self._places(parameters), strict=True):
            parameter.grad = place.clone() if there else None

    def _places(self, parameters: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for parameter, place in zip(parameters, self._gradients, strict=True):
            yield parameter, place.view_as(parameter)
