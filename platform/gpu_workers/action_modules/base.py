"""What every action module is: backbone features and proprioception in, an action chunk out.

A module belongs to one policy. Everything that a checkpoint of it needs is in its `state_dict`:
weights and, as buffers, the normalisation statistics. Modules compute in float32 whatever the
backbone's type is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor, nn

from vla_platform.errors import UnsupportedError
from vla_platform.gpu_workers.action_modules.stochastic import Evaluated, RLHeads, Sampled
from vla_platform.gpu_workers.backbone import FeatureKind
from vla_platform.gpu_workers.canonical import state_prompt
from vla_platform.gpu_workers.features import VLAFeature
from vla_platform.gpu_workers.normalization import Normalization, Normalizer, Statistics
from vla_platform.schema import Schema

STATE_BINS = 256
Drawn = tuple[Tensor, ...]
"""Random numbers of a loss, each with leading B."""


class ActionModule(nn.Module, ABC):
    """Base of all action modules. Shapes: B rows, H chunk, A action and S state dimensions."""

    feature_kind: ClassVar[FeatureKind]
    uses_dropout = False
    """Whether a training forward draws from torch's global generator."""
    state_encoder: nn.Sequential | None

    def __init__(
        self,
        schema: Schema,
        *,
        normalization: Normalization,
        state_statistics: Statistics | None,
        action_statistics: Statistics | None,
    ) -> None:
        super().__init__()
        self.schema = schema
        self.rl: RLHeads | None = None
        self.action_normalizer = Normalizer(normalization, action_statistics, dim=schema.action_dim)
        self.state_normalizer = (
            Normalizer(normalization, state_statistics, dim=schema.state_dim)
            if schema.state_input != "none" and schema.state_dim
            else None
        )

    def _state_encoder(self, hidden_dim: int, output_dim: int) -> nn.Sequential | None:
        """None where the module's state goes into the prompt, or there is none."""
        schema = self.schema
        if schema.state_input != "encoder" or not schema.state_dim:
            return None
        return nn.Sequential(
            nn.Linear(schema.state_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, output_dim)
        )

    def _encoded_state(self, state: Tensor | None) -> Tensor | None:
        """(B, D) of `state` (B, S); None without an encoder."""
        if self.state_encoder is None:
            return None
        assert state is not None and self.state_normalizer is not None
        encoded: Tensor = self.state_encoder(self.state_normalizer.normalize(state))
        return encoded

    @property
    def num_queries(self) -> int:
        """Query tokens that the module's rows carry in their prompt."""
        return self.schema.chunk if self.feature_kind is FeatureKind.QUERIES else 0

    @abstractmethod
    def loss(
        self,
        feature: VLAFeature,
        state: Tensor | None,
        actions: Tensor,
        valid: Tensor,
        *,
        drawn: Drawn = (),
    ) -> Tensor:
        """Mean loss of each row over its valid steps, (B,); 0 for a row without any.

        state (B, S) and actions (B, H, A) in raw units; valid (B, H), false where padded; `drawn`
        is what `draw` gave for these rows.
        """

    def draw(self, num_rows: int, generator: Generator) -> Drawn:
        """What the loss of `num_rows` rows takes from chance, on the generator's device.

        Whoever has only some rows of a batch draws for all of it, and picks: a row's loss is then
        the same whoever computes it.
        """
        return ()

    @property
    def draws_noise(self) -> bool:
        """Whether `act` starts from noise of the shape of the actions."""
        return False

    @abstractmethod
    def act(self, feature: VLAFeature, state: Tensor | None, noise: Tensor | None) -> Tensor:
        """Action chunks in raw units, (B, H, A), a function of its arguments alone; `noise`
        (B, H, A) where the module draws. Also runs under `torch.func` for several modules."""

    def predict(self, feature: VLAFeature, state: Tensor | None, *, generator: Generator) -> Tensor:
        """Action chunks in raw units, (B, H, A), with noise from `generator`."""
        noise = None
        if self.draws_noise:
            shape = (feature.num_rows, self.schema.chunk, self.schema.action_dim)
            noise = torch.randn(shape, generator=generator, device=generator.device)
            noise = noise.to(self.device)
        return self.act(feature, state, noise)

    def add_rl_heads(self, feature_dim: int, *, initial_log_std: float) -> None:
        """Make the module a distribution over chunks with a value; for reinforcement learning.

        New heads are the same whoever adds them, so that a fine-tuned policy acts in its first
        rollout as its slot will judge it.
        """
        state_dim = self.schema.state_dim if self.state_normalizer is not None else 0
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            heads = RLHeads(
                feature_dim=feature_dim,
                state_dim=state_dim,
                action_dim=self.schema.action_dim,
                initial_log_std=initial_log_std,
            )
        self.rl = heads.to(self.device)

    @property
    @abstractmethod
    def sample_noise_shape(self) -> tuple[int, int, int]:
        """(K, H, A) of the noise that one row of `sample` takes."""

    @abstractmethod
    def sample(self, feature: VLAFeature, state: Tensor | None, noise: Tensor) -> Sampled:
        """Draw chunks; `noise` (B, K, H, A) is standard normal. Needs `add_rl_heads`."""

    @abstractmethod
    def evaluate(self, feature: VLAFeature, state: Tensor | None, latent: Tensor) -> Evaluated:
        """What this module says of recorded chunks, with gradients. latent: see `Sampled`."""

    def _heads(self) -> RLHeads:
        if self.rl is None:
            raise UnsupportedError("this policy was not trained by RL: it draws no samples")
        return self.rl

    def value(self, feature: VLAFeature, state: Tensor | None) -> Tensor:
        """What is expected of these observations, (B,). Needs `add_rl_heads`."""
        normalized = None
        if self.state_normalizer is not None:
            assert state is not None
            normalized = self.state_normalizer.normalize(state)
        return self._heads().values(feature, normalized)

    def prompts(self, prompts: list[str], state: npt.NDArray[np.float32] | None) -> list[str]:
        """The text of each row: the task, with the state's bins where the schema says `prompt`."""
        if self.schema.state_input != "prompt" or state is None or self.state_normalizer is None:
            return prompts
        scaled = self.state_normalizer.normalize(torch.tensor(state, device=self.device)).cpu()
        edges = np.linspace(-1, 1, STATE_BINS + 1)[:-1]
        bins = np.clip(np.digitize(scaled.numpy(), edges) - 1, 0, STATE_BINS - 1)
        return [state_prompt(text, row) for text, row in zip(prompts, bins, strict=True)]

    @property
    def device(self) -> torch.device:
        return self.action_normalizer.centre.device

    def select_trainable(self, parts: Iterable[str]) -> None:
        """Let gradients reach the named parts (`head`, `state_encoder`) and no others."""
        chosen = set(parts)
        for name, parameter in self.named_parameters():
            part = "state_encoder" if name.startswith("state_encoder.") else "head"
            parameter.requires_grad_(part in chosen or name.startswith("rl."))


def mean_over_valid(errors: Tensor, valid: Tensor) -> Tensor:
    """Errors (B, H, A) to the mean over each row's valid steps, (B,); 0 where there is none."""
    weight = valid.to(errors.dtype)
    steps = weight.sum(dim=1)
    # `where`, not a product: 0 x NaN in a padded step would still be NaN.
    kept = torch.where(valid[..., None], errors, torch.zeros_like(errors))
    return kept.mean(dim=2).sum(dim=1) / steps.clamp(min=1)
