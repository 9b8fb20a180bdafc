"""Advantage-weighted regression (Peng et al. 2019, "Advantage-Weighted Regression", eq. 10).

Each decision is imitated with weight w = min(exp(A / temperature), max_weight): what went better
than expected counts more, and nothing has to be known of the policy that acted. The likelihood is
the module's own regression loss, so it fits every action module. Shapes: B rows, H chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Generator, Tensor

from vla_platform.gpu_workers.action_modules.base import ActionModule
from vla_platform.gpu_workers.algorithms.policy_gradient import (
    MAX_TOKENS,
    Descent,
    PolicyUpdate,
    mean_over,
)
from vla_platform.gpu_workers.algorithms.ppo import Totals, value_loss
from vla_platform.gpu_workers.algorithms.sft import Samples
from vla_platform.rl.packing import micro_batches
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

    def passes(self, max_tokens: int) -> Iterator[WeightedSamples]:
        """These rows in parts of at most `max_tokens` tokens, without needless padding."""
        for part in micro_batches(self.samples.feature.lengths, max_tokens=max_tokens):
            found = self
            if len(part) < self.num_rows:
                found = self.rows(torch.tensor(part, device=self.advantages.device))
            trimmed = replace(found.samples, feature=found.samples.feature.trimmed())
            yield replace(found, samples=trimmed)


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
    generator: Generator,
    totals: Totals | None = None,
) -> AWRLoss:
    """The mean over valid actions of w times the module's loss, and the value head's loss.

    With the `totals` of a whole batch, the share of these rows.
    """
    samples = part.samples
    each = module.loss(
        samples.feature, samples.state, samples.actions, samples.valid, generator=generator
    )
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
    given: WeightedSamples,
    algorithm: AWRSpec,
    *,
    generator: Generator,
    descent: Descent,
    max_tokens: int = MAX_TOKENS,
) -> PolicyUpdate:
    """All epochs of an update. A minibatch in which nothing is valid takes no step (PF-31)."""
    found: list[AWRLoss] = []
    norms: list[float] = []
    steps = num_passes = 0
    for _ in range(algorithm.epochs):
        found, norms = [], []
        order = torch.randperm(given.num_rows, generator=generator)
        for index in torch.tensor_split(order, min(algorithm.minibatches, given.num_rows)):
            part = given.rows(index.to(given.advantages.device))
            if not bool(part.samples.valid.any()):
                continue
            totals = Totals.of(part.samples.valid)
            shares: list[AWRLoss] = []
            for one in part.passes(max_tokens):
                share = awr_loss(module, one, algorithm, generator=generator, totals=totals)
                descent.add(share.total)
                shares.append(share)
            num_passes += len(shares)
            found.append(_sum_of(shares))
            norms.append(descent.step())
            steps += 1
    return PolicyUpdate(
        loss=mean_over([loss.total for loss in found]),
        policy_loss=mean_over([loss.policy for loss in found]),
        value_loss=mean_over([loss.value for loss in found]),
        entropy=0.0,
        approx_kl=0.0,
        clip_fraction=mean_over([loss.clip_fraction for loss in found]),
        grad_norm=sum(norms) / len(norms) if norms else 0.0,
        num_rows=given.num_rows,
        optimizer_steps=steps,
        num_passes=num_passes,
        stopped_early=False,
    )


def _sum_of(shares: list[AWRLoss]) -> AWRLoss:
    each = [[getattr(one, field.name).detach() for one in shares] for field in fields(AWRLoss)]
    return AWRLoss(*(torch.stack(found).sum() for found in each))
