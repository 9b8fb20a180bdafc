"""What reinforcement learning adds to an action module: a distribution over chunks, and a value.

OFT becomes a Gaussian around its regression: one learned log standard deviation per action
dimension (as StarVLA's and RLinf's OFT policies). Flow matching becomes a chain of Gaussians: noise
is injected after every Euler step, x_{k+1} ~ N(x_k + v/S, exp(log_std)^2 / S), so that the
likelihood of a recorded chain is exact (StarVLA's GR00T policy; here at every step instead of one).
Both live in normalised units, where the latent of a chunk is recorded: the sample itself, or the
chain. The value head reads the backbone's features; all of it is the tenant's own.

Shapes: B rows, H chunk, A action dimension, S Euler steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vla_platform.gpu_workers.features import VLAFeature

RL_PREFIX = "rl."
VALUE_WIDTH = 256
_LOG_2_PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Sampled:
    """Drawn chunks, and what training must know of the draw."""

    actions: Tensor  # (B, H, A), raw units
    latent: Tensor  # (B, K, H, A): what `evaluate` takes; K is 1, or S + 1 of a chain
    log_prob: Tensor  # (B, H)
    value: Tensor  # (B,)


@dataclass(frozen=True)
class Evaluated:
    """What the present module says of recorded chunks."""

    log_prob: Tensor  # (B, H)
    entropy: Tensor  # (B, H)
    value: Tensor  # (B,)


class RLHeads(nn.Module):
    """Spread of the actions, and the value of an observation."""

    def __init__(
        self, *, feature_dim: int, state_dim: int, action_dim: int, initial_log_std: float
    ) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.full((action_dim,), initial_log_std))
        self.value = nn.Sequential(
            nn.LayerNorm(feature_dim + state_dim),
            nn.Linear(feature_dim + state_dim, VALUE_WIDTH),
            nn.GELU(),
            nn.Linear(VALUE_WIDTH, 1),
        )
        last = self.value[-1]
        assert isinstance(last, nn.Linear)
        nn.init.normal_(last.weight, std=0.02)
        nn.init.zeros_(last.bias)

    def values(self, feature: VLAFeature, state: Tensor | None) -> Tensor:
        """(B,) from the mean over a row's own tokens; `state` is normalised."""
        tokens = feature.values.float()
        if feature.mask is None:
            pooled = tokens.mean(dim=1)
        else:
            weight = feature.mask.to(tokens.dtype)[..., None]
            pooled = (tokens * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)
        if state is not None:
            pooled = torch.cat([pooled, state], dim=-1)
        value: Tensor = self.value(pooled)
        return value[:, 0]


def trained_by_rl(names: Iterable[str]) -> bool:
    """Whether a payload with tensors of these names has the heads."""
    return any(name.startswith(RL_PREFIX) for name in names)


def gaussian_log_prob(x: Tensor, mean: Tensor, log_std: Tensor, varies: Tensor) -> Tensor:
    """log N(x; mean, exp(log_std)^2), summed over the action dimensions that vary. (..., H)."""
    scaled = (x - mean) * torch.exp(-log_std)
    each = -0.5 * (scaled**2 + _LOG_2_PI) - log_std
    return torch.where(varies, each, torch.zeros_like(each)).sum(dim=-1)


def gaussian_entropy(log_std: Tensor, varies: Tensor) -> Tensor:
    """Of one action step, a scalar."""
    each = 0.5 * (1 + _LOG_2_PI) + log_std
    return torch.where(varies, each, torch.zeros_like(each)).sum()
