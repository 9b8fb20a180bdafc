"""GR00T-style flow matching: a DiT turns noise into an action chunk in a few Euler steps.

As in StarVLA's QwenGR00T: t goes from 0 (noise) to 1 (data); u ~ Beta(1.5, 1) limited to 0.999,
t = (0.999 - u) / 0.999; x_t = (1 - t) noise + t actions; the target is actions - noise; loss is the
mean square. The token sequence is [state] + future tokens + action tokens; each sample is used
with several noise draws, which multiplies the head's work only.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from vla_platform.gpu_workers.action_modules.base import ActionModule, Drawn, mean_over_valid
from vla_platform.gpu_workers.action_modules.dit import DiT, sinusoid
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
from vla_platform.specs import FlowMatchingModule

NUM_TIME_BUCKETS = 1000
BETA_ALPHA = 1.5  # the other parameter is 1: then u = uniform^(1 / alpha) is an exact draw
MAX_NOISE = 0.999


class ActionEncoder(nn.Module):
    """Noisy actions (B, H, A) and their noise bucket (B,) to tokens (B, H, W)."""

    def __init__(self, action_dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.action = nn.Linear(action_dim, width)
        self.mix = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, width)

    def forward(self, actions: Tensor, bucket: Tensor) -> Tensor:
        embedded = self.action(actions)
        time = sinusoid(bucket, self.width)[:, None].expand_as(embedded)
        mixed = functional.silu(self.mix(torch.cat([embedded, time], dim=-1)))
        tokens: Tensor = self.out(mixed)
        return tokens


class FlowMatchingActionModule(ActionModule):
    feature_kind: ClassVar[FeatureKind] = FeatureKind.HIDDEN

    def __init__(
        self,
        spec: FlowMatchingModule,
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
        width = spec.hidden_dim
        self.spec = spec
        self.uses_dropout = spec.dropout > 0
        self.action_encoder = ActionEncoder(schema.action_dim, width)
        self.position = nn.Parameter(0.02 * torch.randn(schema.chunk, width))
        self.future = nn.Parameter(0.02 * torch.randn(spec.num_future_tokens, width))
        self.state_encoder = self._state_encoder(width, width)
        self.dit = DiT(width, feature_dim, spec.num_layers, spec.num_heads, spec.dropout)
        self.action_decoder = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, schema.action_dim)
        )

    def velocity(
        self, noisy: Tensor, time: Tensor, feature: VLAFeature, state: Tensor | None
    ) -> Tensor:
        """Predicted actions - noise, (B, H, A), for `noisy` (B, H, A) at `time` (B,)."""
        bucket = (time * NUM_TIME_BUCKETS).long()
        num = len(noisy)
        tokens = [self.future.expand(num, -1, -1)]
        encoded = self._encoded_state(state)
        if encoded is not None:
            tokens.insert(0, encoded[:, None])
        tokens.append(self.action_encoder(noisy, bucket) + self.position)
        output = self.dit(torch.cat(tokens, dim=1), bucket, feature.values.float(), feature.mask)
        velocity: Tensor = self.action_decoder(output[:, -self.schema.chunk :])
        return velocity

    def loss(
        self,
        feature: VLAFeature,
        state: Tensor | None,
        actions: Tensor,
        valid: Tensor,
        *,
        drawn: Drawn = (),
    ) -> Tensor:
        repeats = self.spec.repeated_diffusion_steps
        num = len(actions)
        target = self.action_normalizer.normalize(actions).repeat(repeats, 1, 1)
        uniform, noise = (each.transpose(0, 1).flatten(0, 1) for each in drawn)
        noise = noise.to(target.device)
        level = (uniform.to(target.device) ** (1 / BETA_ALPHA)).clamp(max=MAX_NOISE)
        time = (MAX_NOISE - level) / MAX_NOISE
        at = time[:, None, None]
        repeated = VLAFeature(
            feature.kind,
            feature.values.repeat(repeats, 1, 1),
            None if feature.mask is None else feature.mask.repeat(repeats, 1),
        )
        velocity = self.velocity(
            (1 - at) * noise + at * target,
            time,
            repeated,
            None if state is None else state.repeat(repeats, 1),
        )
        errors = (velocity - (target - noise)) ** 2
        rows = mean_over_valid(errors, valid.repeat(repeats, 1))
        return rows.view(repeats, num).mean(dim=0)

    def draw(self, num_rows: int, generator: Generator) -> Drawn:
        repeats, schema = self.spec.repeated_diffusion_steps, self.schema
        shape = (repeats * num_rows, schema.chunk, schema.action_dim)
        uniform = torch.rand(shape[0], generator=generator, device=generator.device)
        noise = torch.randn(shape, generator=generator, device=generator.device)
        by_repeat = (each.view(repeats, num_rows, *each.shape[1:]) for each in (uniform, noise))
        return tuple(each.transpose(0, 1) for each in by_repeat)

    @property
    def draws_noise(self) -> bool:
        return True

    @property
    def sample_noise_shape(self) -> tuple[int, int, int]:
        return (self.spec.num_inference_steps + 1, self.schema.chunk, self.schema.action_dim)

    def sample(self, feature: VLAFeature, state: Tensor | None, noise: Tensor) -> Sampled:
        steps = self.spec.num_inference_steps
        log_std = self._step_log_std()
        chain, log_prob = [noise[:, 0]], torch.zeros(noise.shape[0], noise.shape[2])
        log_prob = log_prob.to(noise.device)
        for step in range(steps):
            mean = self._step_mean(chain[-1], step, feature, state)
            chain.append(mean + noise[:, step + 1] * torch.exp(log_std))
            varies = self.action_normalizer.varies
            log_prob = log_prob + gaussian_log_prob(chain[-1], mean, log_std, varies)
        return Sampled(
            actions=self.action_normalizer.denormalize(chain[-1]),
            latent=torch.stack(chain, dim=1),
            log_prob=log_prob,
            value=self.value(feature, state),
        )

    def evaluate(self, feature: VLAFeature, state: Tensor | None, latent: Tensor) -> Evaluated:
        steps, varies = self.spec.num_inference_steps, self.action_normalizer.varies
        log_std = self._step_log_std()
        log_prob = torch.zeros(latent.shape[0], latent.shape[2], device=latent.device)
        for step in range(steps):
            mean = self._step_mean(latent[:, step], step, feature, state)
            log_prob = log_prob + gaussian_log_prob(latent[:, step + 1], mean, log_std, varies)
        entropy = (steps * gaussian_entropy(log_std, varies)).expand_as(log_prob)
        return Evaluated(log_prob, entropy, self.value(feature, state))

    def _step_log_std(self) -> Tensor:
        """Of one Euler step: over all S steps the injected noise has the spread `log_std`."""
        return self._heads().log_std - 0.5 * math.log(self.spec.num_inference_steps)

    def _step_mean(
        self, noisy: Tensor, step: int, feature: VLAFeature, state: Tensor | None
    ) -> Tensor:
        steps = self.spec.num_inference_steps
        time = torch.full((len(noisy),), step / steps, device=noisy.device)
        return noisy + self.velocity(noisy, time, feature, state) / steps

    def act(self, feature: VLAFeature, state: Tensor | None, noise: Tensor | None) -> Tensor:
        assert noise is not None
        actions = noise
        for step in range(self.spec.num_inference_steps):
            actions = self._step_mean(actions, step, feature, state)
        return self.action_normalizer.denormalize(actions)
