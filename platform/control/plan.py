"""The plan of an SFT workload: what each position of its sequence of training jobs is.

Pure arithmetic, so that any process finds the same job at the same position: held-out losses before
the first step, every `evaluate_every` steps and after the last one; optimizer steps in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from vla_platform.specs import SFTSpec


class Domain(StrEnum):
    TRAIN = "train"
    """One optimizer step on one batch of demonstrations."""
    HELDOUT = "heldout"
    """The loss on the held-out frames; nothing is changed."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One position of the plan."""

    domain: Domain
    step: int  # optimizer steps done once this position is through
    first_sample: int = 0  # sample counter of the batch's first row


@dataclass(frozen=True, kw_only=True)
class Plan:
    steps: int
    batch_size: int
    evaluate_every: int | None  # None: no held-out data

    @classmethod
    def of(cls, spec: SFTSpec, *, num_samples: int, num_heldout: int) -> Plan:
        """The plan for `num_samples` training frames. One epoch shows every frame once."""
        steps = spec.steps or ceil((spec.epochs or 1) * num_samples / spec.batch_size)
        every = min(spec.evaluate_every or steps, steps) if num_heldout else None
        return cls(steps=steps, batch_size=spec.batch_size, evaluate_every=every)

    @property
    def positions(self) -> int:
        if self.evaluate_every is None:
            return self.steps
        whole, rest = divmod(self.steps, self.evaluate_every)
        return self.steps + whole + 1 + bool(rest)

    def place(self, position: int) -> Place:
        """Raises `IndexError` outside `0 <= position < positions`."""
        if not 0 <= position < self.positions:
            raise IndexError(position)
        if self.evaluate_every is None:
            return self._train(position + 1)
        block, offset = divmod(position, self.evaluate_every + 1)
        step = block * self.evaluate_every + offset
        if offset == 0 or step > self.steps:
            return Place(domain=Domain.HELDOUT, step=min(step, self.steps))
        return self._train(step)

    def _train(self, step: int) -> Place:
        return Place(domain=Domain.TRAIN, step=step, first_sample=(step - 1) * self.batch_size)
