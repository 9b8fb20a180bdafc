"""An RL update: epochs of minibatches over the decisions of one rollout.

The order of rows is drawn from the policy's own generator, so an update is a function of the slot
and the samples alone, whoever else is on the device. A minibatch too long for one pass is packed
into several, whose gradients add up to its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Generator, Tensor

from vla_platform.gpu_workers.action_modules.base import ActionModule
from vla_platform.gpu_workers.algorithms.ppo import (
    PolicyLoss,
    PolicyLossConfig,
    RolloutSamples,
    Totals,
    policy_loss,
)
from vla_platform.gpu_workers.features import VLAFeature
from vla_platform.rl.packing import micro_batches
from vla_platform.specs import GRPOSpec, PPOSpec, ReinforceSpec

MAX_TOKENS = 1 << 15
"""Feature tokens of one pass of a module, unless a worker's settings say otherwise."""


@dataclass(frozen=True)
class PolicySamples:
    """B decisions: what was seen, what was drawn, and how it turned out."""

    feature: VLAFeature
    state: Tensor | None  # (B, S)
    latent: Tensor  # (B, K, H, A)
    rollout: RolloutSamples

    @property
    def num_rows(self) -> int:
        return len(self.latent)

    def passes(self, max_tokens: int) -> Iterator[PolicySamples]:
        """These rows in parts of at most `max_tokens` tokens, without needless padding."""
        for part in micro_batches(self.feature.lengths, max_tokens=max_tokens):
            found = self
            if len(part) < self.num_rows:
                found = self.rows(torch.tensor(part, device=self.latent.device))
            yield replace(found, feature=found.feature.trimmed())

    def rows(self, index: Tensor) -> PolicySamples:
        return PolicySamples(
            self.feature.at(index),
            None if self.state is None else self.state[index],
            self.latent[index],
            self.rollout.rows(index),
        )


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate:
    """Means over the minibatches of the last epoch that was begun."""

    loss: float
    policy_loss: float
    value_loss: float
    entropy: float
    approx_kl: float
    clip_fraction: float
    grad_norm: float
    num_rows: int
    optimizer_steps: int
    num_passes: int  # forward and backward passes of the module, of all epochs
    stopped_early: bool  # the divergence passed `target_kl`
    lr: float = 0.0
    step: int = 0


PolicyGradientSpec = PPOSpec | GRPOSpec | ReinforceSpec


class Descent(Protocol):
    """How an update goes down its losses."""

    def add(self, share: Tensor) -> None:
        """Add the gradient of a part of the next step's loss."""

    def step(self) -> float:
        """Take the step; returns the norm of its gradient."""

    def discard(self) -> None:
        """Forget what was added: no step is taken."""


def loss_config(algorithm: PolicyGradientSpec) -> PolicyLossConfig:
    """What the losses need of a spec."""
    if isinstance(algorithm, ReinforceSpec):
        return PolicyLossConfig(surrogate=False, entropy_weight=algorithm.entropy_weight)
    config = PolicyLossConfig(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        chunk_ratio=algorithm.ratio == "chunk",
        entropy_weight=algorithm.entropy_weight,
        value_weight=0.0,
        value_clip=None,
    )
    if isinstance(algorithm, PPOSpec):
        return PolicyLossConfig(
            **{
                **config.__dict__,
                "value_weight": algorithm.value_weight,
                "value_clip": algorithm.value_clip,
            }
        )
    return config


def run_policy_update(
    module: ActionModule,
    samples: PolicySamples,
    algorithm: PolicyGradientSpec,
    *,
    generator: Generator,
    descent: Descent,
    max_tokens: int = MAX_TOKENS,
) -> PolicyUpdate:
    """All epochs of an update. A minibatch in which nothing is valid takes no step (PF-31)."""
    config = loss_config(algorithm)
    epochs, minibatches, target = 1, 1, None
    if not isinstance(algorithm, ReinforceSpec):
        epochs, minibatches = algorithm.epochs, algorithm.minibatches
        target = algorithm.target_kl
    found: list[PolicyLoss] = []
    norms: list[float] = []
    steps = num_passes = 0
    stopped = False
    for _ in range(epochs):
        if stopped:
            break
        found, norms = [], []
        order = torch.randperm(samples.num_rows, generator=generator)
        for index in torch.tensor_split(order, min(minibatches, samples.num_rows)):
            part = samples.rows(index.to(samples.latent.device))
            if not bool(part.rollout.valid.any()):
                continue
            totals = Totals.of(part.rollout.valid)
            shares: list[PolicyLoss] = []
            for one in part.passes(max_tokens):
                judged = module.evaluate(one.feature, one.state, one.latent)
                share = policy_loss(
                    judged.log_prob, judged.entropy, judged.value, one.rollout, config, totals
                )
                descent.add(share.total)
                shares.append(share)
            num_passes += len(shares)
            found.append(sum_of(shares))
            if target is not None and float(found[-1].approx_kl) > target:
                descent.discard()
                stopped = True
                break
            norms.append(descent.step())
            steps += 1
    return PolicyUpdate(
        loss=mean_over([loss.total for loss in found]),
        policy_loss=mean_over([loss.policy for loss in found]),
        value_loss=mean_over([loss.value for loss in found]),
        entropy=mean_over([loss.entropy for loss in found]),
        approx_kl=mean_over([loss.approx_kl for loss in found]),
        clip_fraction=mean_over([loss.clip_fraction for loss in found]),
        grad_norm=sum(norms) / len(norms) if norms else 0.0,
        num_rows=samples.num_rows,
        optimizer_steps=steps,
        num_passes=num_passes,
        stopped_early=stopped,
    )


def sum_of(shares: list[PolicyLoss]) -> PolicyLoss:
    """What a batch's parts say together, without gradients."""
    each = [[getattr(one, field.name) for one in shares] for field in fields(PolicyLoss)]
    return PolicyLoss(*(torch.stack([value.detach() for value in found]).sum() for found in each))


def mean_over(values: list[Tensor]) -> float:
    return float(torch.stack([value.detach() for value in values]).mean()) if values else 0.0
