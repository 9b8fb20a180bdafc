"""Supervised fine-tuning: the module's own loss on demonstrations, averaged over valid steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vla_platform.gpu_workers.action_modules.base import ActionModule, Drawn
from vla_platform.gpu_workers.features import VLAFeature


@dataclass(frozen=True)
class Samples:
    """B demonstrations of one tenant: state (B, S), actions (B, H, A), valid (B, H)."""

    feature: VLAFeature
    state: Tensor | None
    actions: Tensor
    valid: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.actions)

    def at(self, index: Tensor) -> Samples:
        """The rows of `index`, (N,)."""
        return Samples(
            self.feature.at(index),
            None if self.state is None else self.state[index],
            self.actions[index],
            self.valid[index],
        )

    def rows(self, start: int, stop: int) -> Samples:
        return Samples(
            self.feature.rows(start, stop),
            None if self.state is None else self.state[start:stop],
            self.actions[start:stop],
            self.valid[start:stop],
        )


def sft_loss(
    module: ActionModule, samples: Samples, *, num_valid: int, drawn: Drawn = ()
) -> Tensor:
    """This part's share of the batch loss, a scalar.

    `num_valid` counts the valid steps of the whole batch, so that the shares of its micro-batches
    add up to the mean over valid steps however they are cut (a mean of means would not).
    """
    rows = module.loss(samples.feature, samples.state, samples.actions, samples.valid, drawn=drawn)
    weight = samples.valid.sum(dim=1).to(rows.dtype)
    return (rows * weight).sum() / max(num_valid, 1)
