"""Advantage-weighted regression (Peng et al. 2019, "Advantage-Weighted Regression", eq. 10).

Each decision is imitated with weight w = min(exp(A / temperature), max_weight): what went better
than expected counts more, and nothing has to be known of the policy that acted. The likelihood is
the module's own regression loss, so it fits every action module. Shapes: B rows, H chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from vla_platform.gpu_workers.action_modules.base import ActionModule, Drawn
from vla_platform.gpu_workers.algorithms.minibatches import MAX_TOKENS, Descent, descend
from vla_platform.gpu_workers.algorithms.policy_gradient import PolicyUpdate
from vla_platform.gpu_workers.algorithms.ppo import Totals, value_loss
from vla_platform.gpu_workers.algorithms.sft import Samples
from vla_platform.gpu_workers.ranks.share import BatchShare
from vla_platform.specs import AWRSpec


@dataclass(frozen=True)
class WeightedSamples:
    """B recorded decisions, and how much better than expected each turned out."""

    samples: Samples
    advantages: Tensor  # (B,)
    returns: Tensor | None  # (B,), targets of the value head; None: it is not trained

    @property
    def num_rows(self) -> int:
        return len(self.advantages)

    def rows(self, index: Tensor) -> WeightedSamples:
        return WeightedSamples(
            self.samples.at(index),
            self.advantages[index],
            None if self.returns is None else self.returns[index],
        )

    @property
    def valid(self) -> Tensor:
        return self.samples.valid

    @property
    def lengths(self) -> list[int]:
        return self.samples.feature.lengths

    def trimmed(self) -> WeightedSamples:
        return replace(self, samples=replace(self.samples, feature=self.samples.feature.trimmed()))


@dataclass(frozen=True)
class AWRLoss:
    """Scalars; `total` has the gradient. Of a part, its share of the batch's."""

    total: Tensor
    policy: Tensor
    value: Tensor
    clip_fraction: Tensor  # of rows whose weight was cut


def awr_loss(
    module: ActionModule,
    part: WeightedSamples,
    algorithm: AWRSpec,
    *,
    drawn: Drawn = (),
    totals: Totals | None = None,
) -> AWRLoss:
    """The mean over valid actions of w times the module's loss, and the value head's loss.

    With the `totals` of a whole batch, the share of these rows.
    """
    samples = part.samples
    each = module.loss(samples.feature, samples.state, samples.actions, samples.valid, drawn=drawn)
    exact = torch.exp(part.advantages / algorithm.temperature)
    weight = exact.clamp(max=algorithm.max_weight)
    totals = totals or Totals.of(samples.valid)
    num_valid = samples.valid.sum(dim=1).to(each.dtype)
    policy = (weight * num_valid * each).sum() / totals.actions.clamp(min=1)
    value = torch.zeros((), device=each.device)
    if part.returns is not None:
        said = module.value(samples.feature, samples.state)
        value = value_loss(said, part.returns, None, num_valid > 0, clip=None, num_rows=totals.rows)
    total = policy + algorithm.value_weight * value
    cut = ((exact > weight) & (num_valid > 0)).sum() / totals.rows.clamp(min=1)
    return AWRLoss(total, policy, value, cut)


def run_awr_update(
    module: ActionModule,
    given: WeightedSamples | None,
    algorithm: AWRSpec,
    *,
    share: BatchShare,
    generator: Generator,
    descent: Descent,
    max_tokens: int = MAX_TOKENS,
) -> PolicyUpdate:
    """All epochs of an update on the rows of `share` that are here (None: there is none)."""

    def loss_of(part: WeightedSamples, totals: Totals, drawn: Drawn) -> AWRLoss:
        return awr_loss(module, part, algorithm, drawn=drawn, totals=totals)

    found = descend(
        given, loss_of, kind=AWRLoss, share=share,
        epochs=algorithm.epochs, minibatches=algorithm.minibatches, generator=generator,
        descent=descent, device=module.device, max_tokens=max_tokens,
        draw=lambda num_rows: module.draw(num_rows, generator),
    )  # fmt: skip
    return PolicyUpdate(
        loss=found.mean("total"),
        policy_loss=found.mean("policy"),
        value_loss=found.mean("value"),
        entropy=0.0,
        approx_kl=0.0,
        clip_fraction=found.mean("clip_fraction"),
        grad_norm=found.grad_norm,
        num_rows=share.num_rows,
        optimizer_steps=found.steps,
        num_passes=found.passes,
        stopped_early=False,
    )
