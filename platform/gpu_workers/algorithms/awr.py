"""Advantage-weighted regression (Peng et al. 2019, "Advantage-Weighted Regression", eq. 10).

Each decision is imitated with weight w = min(exp(A / temperature), max_weight): what went better
than expected counts more, and nothing has to be known of the policy that acted. The likelihood is
the module's own regression loss, so it fits every action module. Shapes: B rows, H chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from vla_platform.gpu_workers.action_modules.base import ActionModule
from vla_platform.gpu_workers.algorithms.policy_gradient import PolicyUpdate, Step, mean_over
from vla_platform.gpu_workers.algorithms.ppo import value_loss
from vla_platform.gpu_workers.algorithms.sft import Samples
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


@dataclass(frozen=True)
class AWRLoss:
    """Scalars; `total` has the gradient."""

    total: Tensor
    policy: Tensor
    value: Tensor
    clip_fraction: Tensor  # of rows whose weight was cut


def awr_loss(
    module: ActionModule, part: WeightedSamples, algorithm: AWRSpec, *, generator: Generator
) -> AWRLoss:
    """The mean over valid actions of w times the module's loss, and the value head's loss."""
    samples = part.samples
    each = module.loss(
        samples.feature, samples.state, samples.actions, samples.valid, generator=generator
    )
    exact = torch.exp(part.advantages / algorithm.temperature)
    weight = exact.clamp(max=algorithm.max_weight)
    num_valid = samples.valid.sum(dim=1).to(each.dtype)
    policy = (weight * num_valid * each).sum() / num_valid.sum().clamp(min=1)
    value = torch.zeros((), device=each.device)
    if part.returns is not None:
        said = module.value(samples.feature, samples.state)
        value = value_loss(said, part.returns, None, num_valid > 0, clip=None)
    total = policy + algorithm.value_weight * value
    return AWRLoss(total, policy, value, (exact > weight).float().mean())


def run_awr_update(
    module: ActionModule,
    given: WeightedSamples,
    algorithm: AWRSpec,
    *,
    generator: Generator,
    step: Step,
) -> PolicyUpdate:
    """All epochs of an update. A minibatch in which nothing is valid takes no step (PF-31)."""
    found: list[AWRLoss] = []
    norms: list[float] = []
    steps = 0
    for _ in range(algorithm.epochs):
        found, norms = [], []
        order = torch.randperm(given.num_rows, generator=generator)
        for index in torch.tensor_split(order, min(algorithm.minibatches, given.num_rows)):
            part = given.rows(index.to(given.advantages.device))
            if not bool(part.samples.valid.any()):
                continue
            loss = awr_loss(module, part, algorithm, generator=generator)
            found.append(loss)
            norms.append(step(loss.total))
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
        stopped_early=False,
    )
