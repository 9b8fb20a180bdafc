"""The gradients of a slot, added up over all ranks in one go.

One flat buffer per slot holds the gradients, which of them there are, what else is added up, and
whether a rank has failed: one collective per optimizer step. Ranks that fail come to it as well, so
that nobody waits for them, and all of them give the step up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from vla_platform.errors import RankFailedError
from vla_platform.gpu_workers.ranks.base import Ranks

MOST_NUMBERS = 8


class GradientSum:
    def __init__(self, parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
        self._parameters = list(parameters)
        self._ranks = ranks
        if ranks.num_ranks == 1:
            return
        sizes = [parameter.numel() for parameter in self._parameters]
        device = self._parameters[0].device
        room = sum(sizes) + len(sizes) + MOST_NUMBERS + 1
        self._buffer = torch.zeros(room, dtype=torch.float32, device=device)
        places = list(torch.split(self._buffer, [*sizes, len(sizes), MOST_NUMBERS, 1]))
        *self._gradients, self._present, self._numbers, self._failed = places

    def __call__(self, numbers: Tensor) -> Tensor:
        """Sum gradients in place, and return the sum of `numbers`, (N,) with N up to 8.

        Raises `RankFailedError` where another rank has failed. A gradient that no rank has stays
        absent: the optimizer leaves such a parameter alone.
        """
        if self._ranks.num_ranks == 1:
            return numbers
        self._buffer.zero_()
        for at, (parameter, place) in enumerate(self._places()):
            if parameter.grad is not None:
                place.copy_(parameter.grad)
                self._present[at] = 1.0
        self._numbers[: len(numbers)] = numbers
        self._sum()
        present = self._present.tolist()
        for there, (parameter, place) in zip(present, self._places(), strict=True):
            parameter.grad = place.clone() if there else None
        return self._numbers[: len(numbers)].clone()

    def abandon(self) -> None:
        """This rank has failed: the others' steps are given up."""
        if self._ranks.num_ranks == 1:
            return
        self._buffer.zero_()
        self._failed.fill_(1.0)
        self._ranks.add_up(self._buffer)

    def _sum(self) -> None:
        self._ranks.add_up(self._buffer)
        if float(self._failed) > 0:
            raise RankFailedError("another rank has failed: this step is given up")

    def _places(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for parameter, place in zip(self._parameters, self._gradients, strict=True):
            yield parameter, place.view_as(parameter)
