"""An RL update by policy gradient: PPO, GRPO and REINFORCE over the decisions of one rollout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Generator, Tensor

from vla_platform.gpu_workers.action_modules.base import ActionModule, Drawn
from vla_platform.gpu_workers.algorithms.minibatches import MAX_TOKENS, Descent, descend
from vla_platform.gpu_workers.algorithms.ppo import (
    PolicyLoss,
    PolicyLossConfig,
    RolloutSamples,
    Totals,
    policy_loss,
)
from vla_platform.gpu_workers.features import VLAFeature
from vla_platform.gpu_workers.ranks.share import BatchShare
from vla_platform.specs import GRPOSpec, PPOSpec, ReinforceSpec


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

    @property
    def valid(self) -> Tensor:
        return self.rollout.valid

    @property
    def lengths(self) -> list[int]:
        return self.feature.lengths

    def trimmed(self) -> PolicySamples:
        return replace(self, feature=self.feature.trimmed())

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
    given: PolicySamples | None,
    algorithm: PolicyGradientSpec,
    *,
    share: BatchShare,
    generator: Generator,
    descent: Descent,
    max_tokens: int = MAX_TOKENS,
) -> PolicyUpdate:
    """All epochs of an update on the rows of `share` that are here (None: there is none)."""
    config = loss_config(algorithm)
    epochs, minibatches, target = 1, 1, None
    if not isinstance(algorithm, ReinforceSpec):
        epochs, minibatches = algorithm.epochs, algorithm.minibatches
        target = algorithm.target_kl

    def loss_of(part: PolicySamples, totals: Totals, _: Drawn) -> PolicyLoss:
        judged = module.evaluate(part.feature, part.state, part.latent)
        return policy_loss(
            judged.log_prob, judged.entropy, judged.value, part.rollout, config, totals
        )

    found = descend(
        given, loss_of, kind=PolicyLoss, share=share,
        epochs=epochs, minibatches=minibatches, generator=generator,
        descent=descent, device=module.device, max_tokens=max_tokens,
        stops=lambda loss: target is not None and float(loss.approx_kl) > target,
    )  # fmt: skip
    return PolicyUpdate(
        loss=found.mean("total"),
        policy_loss=found.mean("policy"),
        value_loss=found.mean("value"),
        entropy=found.mean("entropy"),
        approx_kl=found.mean("approx_kl"),
        clip_fraction=found.mean("clip_fraction"),
        grad_norm=found.grad_norm,
        num_rows=share.num_rows,
        optimizer_steps=found.steps,
        num_passes=found.passes,
        stopped_early=found.stopped,
    )
