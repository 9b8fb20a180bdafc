"""Epochs of minibatches over the decisions of one update, whatever their loss is.

The order of rows is drawn from the policy's own generator, so an update is a function of the slot
and the samples alone, whoever else is on the device. A minibatch too long for one pass is packed
into several, whose gradients add up to its own. One in which nothing is valid takes no step
(PF-31).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Generator, Tensor

from vla_platform.gpu_workers.algorithms.ppo import Totals
from vla_platform.rl.packing import micro_batches

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
    """A dataclass of scalars; those of a part are its share of the batch's."""

    @property
    def total(self) -> Tensor: ...  # with the gradient


class Descent(Protocol):
    """How an update goes down its losses."""

    def add(self, share: Tensor) -> None:
        """Add the gradient of a part of the next step's loss."""

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
    given: R,
    loss_of: Callable[[R, Totals], L],
    *,
    epochs: int,
    minibatches: int,
    generator: Generator,
    descent: Descent,
    max_tokens: int = MAX_TOKENS,
    stops: Callable[[L], bool] = lambda loss: False,
) -> Descended[L]:
    """`loss_of(part, totals)` is a part's share of the loss of the batch that has these totals.
    `stops(loss)` ends the update before the step of that minibatch."""
    found = Descended[L]([], [])
    for _ in range(epochs):
        found.losses, found.norms = [], []
        order = torch.randperm(len(given.valid), generator=generator)
        for index in torch.tensor_split(order, min(minibatches, len(given.valid))):
            batch = given.rows(index.to(given.valid.device))
            if not bool(batch.valid.any()):
                continue
            totals = Totals.of(batch.valid)
            shares: list[L] = []
            for part in passes(batch, max_tokens=max_tokens):
                share = loss_of(part, totals)
                descent.add(share.total)
                shares.append(share)
            found.passes += len(shares)
            found.losses.append(sum_of(shares))
            if stops(found.losses[-1]):
                descent.discard()
                found.stopped = True
                return found
            found.norms.append(descent.step())
            found.steps += 1
    return found


def passes(batch: R, *, max_tokens: int) -> Iterator[R]:
    """These rows in parts of at most `max_tokens` tokens, without needless padding."""
    for part in micro_batches(batch.lengths, max_tokens=max_tokens):
        whole = len(part) == len(batch.valid)
        index = torch.tensor(part, device=batch.valid.device)
        yield (batch if whole else batch.rows(index)).trimmed()


def sum_of(shares: list[L]) -> L:
    """What a batch's parts say together, without gradients."""
    kind: Any = type(shares[0])
    each = [[getattr(one, field.name).detach() for one in shares] for field in fields(kind)]
    total: L = kind(*(torch.stack(found).sum() for found in each))
    return total
