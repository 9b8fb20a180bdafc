"""Losses of policy-gradient updates: PPO's clipped surrogate, its value loss, and plain REINFORCE.

Everything is a mean over what is executed (`valid`), and 0, never NaN, where nothing is.
Shapes: B rows, H chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HUBER_DELTA = 10.0


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0  # caps the loss of bad actions that became likely; None: off
    chunk_ratio: bool = False  # one ratio per chunk (its log-probabilities summed)
    value_weight: float = 0.5
    value_clip: float | None = 0.2
    entropy_weight: float = 0.0
    surrogate: bool = True  # False: log-probability times advantage, without ratio (REINFORCE)


@dataclass(frozen=True)
class RolloutSamples:
    """Recorded decisions as tensors, on the device of the module."""

    log_prob: Tensor  # (B, H), of the behaviour policy or the actor's forward
    advantages: Tensor  # (B, H)
    returns: Tensor | None  # (B,), targets of the value head; None: it is not trained
    values: Tensor | None  # (B,), what the value head said then
    valid: Tensor  # (B, H) bool

    def rows(self, index: Tensor) -> RolloutSamples:
        return RolloutSamples(
            self.log_prob[index],
            self.advantages[index],
            None if self.returns is None else self.returns[index],
            None if self.values is None else self.values[index],
            self.valid[index],
        )


@dataclass(frozen=True)
class Totals:
    """What the means of a batch are over, where it is computed in parts."""

    actions: Tensor  # valid ones, scalar
    rows: Tensor  # with a valid one, scalar

    @classmethod
    def of(cls, valid: Tensor) -> Totals:
        return cls(valid.sum(), valid.any(dim=1).sum())

    @classmethod
    def counted(cls, valid: Sequence[int], device: torch.device) -> Totals:
        """From the number of valid actions of each row."""
        totals = torch.tensor([sum(valid), sum(map(bool, valid))], device=device)
        return cls(totals[0], totals[1])


@dataclass(frozen=True)
class PolicyLoss:
    """A loss to differentiate, and what to watch. Scalars; of a part, its share of the batch's."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    approx_kl: Tensor  # of behaviour to actor (Schulman's k3 estimator), never negative
    clip_fraction: Tensor


def policy_loss(
    log_prob: Tensor,
    entropy: Tensor,
    value: Tensor,
    samples: RolloutSamples,
    config: PolicyLossConfig,
    totals: Totals | None = None,
) -> PolicyLoss:
    """PPO (Schulman et al. 2017, eq. 7 and 9), with dual clip (Ye et al. 2020, eq. 5).

    log_prob, entropy (B, H) and value (B,) are the actor's, with gradients. With the `totals` of a
    whole batch the result is the share of these rows: shares add up to the batch's losses.
    """
    totals = totals or Totals.of(samples.valid)
    valid, advantages = samples.valid, samples.advantages
    difference = torch.where(valid, log_prob - samples.log_prob, torch.zeros_like(log_prob))
    if config.chunk_ratio:
        difference = difference.sum(dim=1, keepdim=True).expand_as(difference)
    ratio = torch.exp(difference)
    if config.surrogate:
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        each = torch.maximum(-advantages * ratio, -advantages * clipped)
        if config.dual_clip is not None:
            capped = torch.minimum(each, -advantages * config.dual_clip)
            each = torch.where(advantages < 0, capped, each)
        cut = ((ratio - clipped).abs() > 0).to(ratio.dtype)
    else:
        each = -advantages * log_prob
        cut = torch.zeros_like(ratio)
    policy = mean_of(each, valid, totals.actions)
    spread = mean_of(entropy, valid, totals.actions)
    total = policy - config.entropy_weight * spread
    of_value = torch.zeros((), device=log_prob.device)
    if samples.returns is not None:
        of_value = value_loss(
            value, samples.returns, samples.values, valid.any(dim=1), clip=config.value_clip,
            num_rows=totals.rows,
        )  # fmt: skip
        total = total + config.value_weight * of_value
    with torch.no_grad():
        kl = mean_of(torch.exp(difference) - 1 - difference, valid, totals.actions)
        clipped_share = mean_of(cut, valid, totals.actions)
    return PolicyLoss(total, policy, of_value, spread, kl, clipped_share)


def value_loss(
    value: Tensor, returns: Tensor, old: Tensor | None, valid: Tensor, *, clip: float | None,
    num_rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Huber loss towards the returns; with `clip`, steps away from `old` earn nothing.

    The mean over valid rows, or the share of a batch with `num_rows` of them.
    """
    huber = torch.nn.functional.huber_loss
    each = huber(value, returns, reduction="none", delta=HUBER_DELTA)
    if clip is not None and old is not None:
        near = old + (value - old).clamp(-clip, clip)
        each = torch.maximum(each, huber(near, returns, reduction="none", delta=HUBER_DELTA))
    return mean_of(each, valid, num_rows)


def mean_of(each: Tensor, valid: Tensor, total: Tensor | None = None) -> Tensor:
    """Mean over what is valid; 0 where nothing is, also where the rest is not finite (PF-31).

    With `total`, the number of valid ones in a whole batch, the share of this part of it.
    """
    kept = torch.where(valid, each, torch.zeros_like(each))
    return kept.sum() / (valid.sum() if total is None else total).clamp(min=1)
