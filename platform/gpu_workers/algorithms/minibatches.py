"""Epochs of minibatches over the decisions of one update, whatever their loss is.

The order of rows is drawn from the policy's own generator, so an update is a function of the slot
and the samples alone, whoever else is on the device. A minibatch too long for one pass is packed
into several, whose gradients add up to its own, as do those of several ranks. One in which nothing
is valid takes no step (PF-31).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Generator, Tensor

from vla_platform.gpu_workers.action_modules.base import Drawn
from vla_platform.gpu_workers.algorithms.ppo import Totals
from vla_platform.gpu_workers.ranks.share import BatchShare, Part

MAX_TOKENS = 1 << 15
"""Feature tokens of one pass of a module, unless a worker's settings say otherwise."""


class Rows(Protocol):
    """B decisions."""

    @property
    def valid(self) -> Tensor: ...  # (B, H) bool

    @property
    def lengths(self) -> list[int]: ...  # feature tokens of each row

    def rows(self, index: Tensor) -> Self: ...

    def trimmed(self) -> Self: ...  # without padding that no row needs


class Loss(Protocol):
    """A dataclass of scalars, `total` first; those of a part are its share of the batch's."""

    @property
    def total(self) -> Tensor: ...  # with the gradient


class Descent(Protocol):
    """How an update goes down its losses."""

    def add(self, share: Tensor) -> None:
        """Add the gradient of a part of the next step's loss."""

    def together(self, numbers: Tensor) -> Tensor:
        """Add up gradients and `numbers`, the loss first, over all ranks.

        Raises `DivergedError` where the loss is not finite.
        """

    def abandoned_on_error(self) -> AbstractContextManager[None]:
        """What fails within fails before `together`: no rank takes the step."""

    def step(self) -> float:
        """Take the step; returns the norm of its gradient."""

    def discard(self) -> None:
        """Forget what was added: no step is taken."""


R = TypeVar("R", bound=Rows)
L = TypeVar("L", bound=Loss)


@dataclass
class Descended(Generic[L]):
    """`losses` and `norms` are of the minibatches of the last epoch that was begun."""

    losses: list[L]
    norms: list[float]
    steps: int = 0
    passes: int = 0
    stopped: bool = False

    def mean(self, name: str) -> float:
        """Over those minibatches."""
        values = [getattr(loss, name) for loss in self.losses]
        return float(torch.stack(values).mean()) if values else 0.0

    @property
    def grad_norm(self) -> float:
        return sum(self.norms) / len(self.norms) if self.norms else 0.0


def descend(
    given: R | None,
    loss_of: Callable[[R, Totals, Drawn], L],
    *,
    kind: type[L],
    share: BatchShare,
    epochs: int,
    minibatches: int,
    generator: Generator,
    descent: Descent,
    device: torch.device,
    max_tokens: int = MAX_TOKENS,
    draw: Callable[[int], Drawn] = lambda num_rows: (),
    stops: Callable[[L], bool] = lambda loss: False,
) -> Descended[L]:
    """`given` are the rows of `share` that are here; None: there is none.

    `loss_of(part, totals, drawn)` is a part's share of the loss of the batch that has these totals,
    with what `draw` gave for its rows. `stops(loss)` ends the update before the step of that
    minibatch.
    """
    found = Descended[L]([], [])
    for _ in range(epochs):
        found.losses, found.norms = [], []
        order = torch.randperm(share.num_rows, generator=generator)
        for index in torch.tensor_split(order, min(minibatches, share.num_rows)):
            places = index.tolist()
            counts = [share.valid[place] for place in places]
            if not any(counts):
                continue
            shares = []
            with descent.abandoned_on_error():
                totals = Totals.counted(counts, device)
                parts = share.passes(places, max_tokens=max_tokens)
                for part in parts:
                    drawn = draw(part.num_rows)
                    if given is not None and part.own:
                        one = loss_of(rows_of(given, part), totals, picked(drawn, part))
                        descent.add(one.total)
                        shares.append(one)
                numbers = sum_of(shares, kind, device)
            found.passes += len(parts)
            found.losses.append(kind(*descent.together(numbers).unbind()))
            if stops(found.losses[-1]):
                descent.discard()
                found.stopped = True
                return found
            found.norms.append(descent.step())
            found.steps += 1
    return found


def rows_of(given: R, part: Part) -> R:
    """Those rows of a part that are here, without needless padding."""
    if part.own == tuple(range(len(given.valid))):
        return given.trimmed()
    return given.rows(torch.tensor(part.own, device=given.valid.device)).trimmed()


def picked(drawn: Drawn, part: Part) -> Drawn:
    """What was drawn for the rows that are here."""
    if part.is_whole:
        return drawn
    return tuple(each[torch.tensor(part.at, device=each.device)] for each in drawn)


def sum_of(shares: Sequence[L], kind: type[L], device: torch.device) -> Tensor:
    """What a batch's parts say together, without gradients, in the order of the fields."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not shares:
        return torch.zeros(len(names), device=device)
    each = [torch.stack([getattr(one, name).detach() for one in shares]).sum() for name in names]
    return torch.stack(each)
