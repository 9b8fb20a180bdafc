"""OFT: a regression head on the hidden states of the action queries, one action per query.

Architecture and layer names of StarVLA's `L1RegressionActionHead` (QwenOFT): LayerNorm, Linear to
2 D, ReLU, residual blocks x + ReLU(Linear(LayerNorm(x))), LayerNorm, Linear to A; no mixing over
time; loss is the mean L1 of normalised actions. Proprioception, where a state encoder is asked
for, is added to every query.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from vla_platform.gpu_workers.action_modules.base import ActionModule, Drawn, mean_over_valid
from vla_platform.gpu_workers.action_modules.stochastic import (
    Evaluated,
    Sampled,
    gaussian_entropy,
    gaussian_log_prob,
)
from vla_platform.gpu_workers.backbone import FeatureKind
from vla_platform.gpu_workers.features import VLAFeature
from vla_platform.gpu_workers.normalization import Normalization, Statistics
from vla_platform.schema import Schema
from vla_platform.specs import OFTModule


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.ffn(x)
        return added


class RegressionHead(nn.Module):
    """(..., D) to (..., A)."""

    def __init__(self, input_dim: int, hidden_dim: int, action_dim: int, num_blocks: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(input_dim)
        self.fc1 = nn.Linear(input_dim, hidden_dim)
        self.mlp_resnet_blocks = nn.ModuleList(
            [ResidualBlock(hidden_dim) for _ in range(num_blocks)]
        )
        self.layer_norm2 = nn.LayerNorm(hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, action_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        actions: Tensor = self.fc2(self.layer_norm2(x))
        return actions


class OFTActionModule(ActionModule):
    feature_kind: ClassVar[FeatureKind] = FeatureKind.QUERIES

    def __init__(
        self,
        spec: OFTModule,
        schema: Schema,
        *,
        feature_dim: int,
        normalization: Normalization,
        state_statistics: Statistics | None,
        action_statistics: Statistics | None,
    ) -> None:
        super().__init__(
            schema,
            normalization=normalization,
            state_statistics=state_statistics,
            action_statistics=action_statistics,
        )
        width = spec.hidden_dim or 2 * feature_dim
        self.model = RegressionHead(feature_dim, width, schema.action_dim, spec.num_blocks)
        self.state_encoder = self._state_encoder(width, feature_dim)

    def normalized_actions(self, feature: VLAFeature, state: Tensor | None) -> Tensor:
        queries = feature.values.float()
        encoded = self._encoded_state(state)
        if encoded is not None:
            queries = queries + encoded[:, None]
        actions: Tensor = self.model(queries)
        return actions

    def loss(
        self,
        feature: VLAFeature,
        state: Tensor | None,
        actions: Tensor,
        valid: Tensor,
        *,
        drawn: Drawn = (),
    ) -> Tensor:
        target = self.action_normalizer.normalize(actions)
        errors = (self.normalized_actions(feature, state) - target).abs()
        return mean_over_valid(errors, valid)

    @property
    def sample_noise_shape(self) -> tuple[int, int, int]:
        return (1, self.schema.chunk, self.schema.action_dim)

    def sample(self, feature: VLAFeature, state: Tensor | None, noise: Tensor) -> Sampled:
        heads = self._heads()
        mean = self.normalized_actions(feature, state)
        drawn = mean + noise[:, 0] * torch.exp(heads.log_std)
        varies = self.action_normalizer.varies
        return Sampled(
            actions=self.action_normalizer.denormalize(drawn),
            latent=drawn[:, None],
            log_prob=gaussian_log_prob(drawn, mean, heads.log_std, varies),
            value=self.value(feature, state),
        )

    def evaluate(self, feature: VLAFeature, state: Tensor | None, latent: Tensor) -> Evaluated:
        log_std, varies = self._heads().log_std, self.action_normalizer.varies
        mean = self.normalized_actions(feature, state)
        log_prob = gaussian_log_prob(latent[:, 0], mean, log_std, varies)
        entropy = gaussian_entropy(log_std, varies).expand_as(log_prob)
        return Evaluated(log_prob, entropy, self.value(feature, state))

    def act(self, feature: VLAFeature, state: Tensor | None, noise: Tensor | None) -> Tensor:
        return self.action_normalizer.denormalize(self.normalized_actions(feature, state))
