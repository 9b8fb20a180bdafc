"""RL updates and the actor's forward, on the columns of a rollout.

As in `group_training`, ranks first tell each other what became of their rows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from vla_platform.errors import PlatformError, UnsoundWorkerError
from vla_platform.gpu_workers.algorithms.awr import WeightedSamples
from vla_platform.gpu_workers.algorithms.policy_gradient import PolicySamples
from vla_platform.gpu_workers.device import DeviceCheck
from vla_platform.gpu_workers.features import FeatureEncoder, stack_features
from vla_platform.gpu_workers.ranks.base import Ranks
from vla_platform.gpu_workers.ranks.share import BatchShare, OwnRows
from vla_platform.gpu_workers.rollout_samples import (
    encode_rows,
    policy_samples,
    weighted_samples,
)
from vla_platform.gpu_workers.samples import ROW, reads_state
from vla_platform.gpu_workers.slot_state import Arrays
from vla_platform.gpu_workers.slots import Slot
from vla_platform.gpu_workers.training_items import MISFITS, PolicyResult, TrainItem
from vla_platform.specs import AWRSpec
from vla_storage.errors import CodedError


class PolicyTraining:
    """`max_tokens` bounds one pass of a module."""

    def __init__(
        self,
        encoder: FeatureEncoder,
        *,
        ranks: Ranks,
        max_tokens: int,
        check_device: DeviceCheck,
    ) -> None:
        self._encoder = encoder
        self._ranks = ranks
        self._max_tokens = max_tokens
        self._check_device = check_device

    def train(self, slot: Slot, item: TrainItem) -> PolicyResult | Exception:
        """One update; an error is of the item's own rows, or of its policy."""
        begun = time.perf_counter()
        samples: PolicySamples | WeightedSamples | None = None
        own, num_forwards = OwnRows(), 0
        wrong: Exception | None = item.problem
        try:
            if wrong is None and item.is_here(self._ranks.rank):
                weighted = isinstance(slot.config.algorithm, AWRSpec)
                read = weighted_samples if weighted else policy_samples
                samples, num_forwards = read(item.columns, slot.module, self._encoder)
                own = _own_decisions(item.columns, samples)
        except (CodedError, *MISFITS) as error:
            wrong = self._misfit(item, error)
        told = self._ranks.exchange((own, num_forwards, wrong))
        if any(error is not None for *_, error in told):
            return next(error for *_, error in told if error is not None)
        share = BatchShare.joined([own for own, *_ in told], rank=self._ranks.rank)
        try:
            update = slot.update_policy(samples, max_tokens=self._max_tokens, share=share)
        except (CodedError, *MISFITS) as error:
            return self._misfit(item, error)
        return PolicyResult(
            policy_key=item.policy_key,
            policy_version=slot.policy_version,
            backbone_forwards=sum(forwards for _, forwards, _ in told),
            cost_s=self._ranks.num_ranks * (time.perf_counter() - begun),
            **asdict(update),
        )

    def _misfit(self, item: TrainItem, error: Exception) -> Exception:
        """What is wrong with one tenant's rows. Raises what is nobody's fault."""
        if isinstance(error, UnsoundWorkerError):
            raise error
        if isinstance(error, CodedError):
            return error
        self._check_device(error)
        if self._ranks.num_ranks == 1:
            return error
        # Ranks tell each other coded errors: others may not survive the way.
        return PlatformError(
            f"the data do not fit {item.policy_key}: {error}", policy_key=item.policy_key
        )

    @torch.no_grad()
    def actor_forward(self, slot: Slot, columns: Mapping[str, Any]) -> Arrays:
        """What an actor says of a rollout: `actor_value` (R,), and of drawn actions
        `actor_log_prob` (R, H).

        Rows without a feature ended an episode for good: their value is 0.
        """
        module = slot.module.eval()
        num_rows = len(columns["is_transition"])
        rows = np.arange(num_rows)
        if "feature" in columns:
            rows = np.flatnonzero([len(feature) > 0 for feature in columns["feature"]])
        features, _ = encode_rows(columns, module, self._encoder, rows)
        device = self._encoder.backbone.device
        state = None
        if reads_state(module.schema):
            chosen = np.asarray(columns["state"])[rows]
            state = torch.tensor(chosen, dtype=torch.float32, device=device)
        feature = stack_features(features, module.feature_kind)
        value = np.zeros(num_rows, np.float32)
        found: Arrays = {"actor_value": value}
        if "latent" in columns:
            latent = torch.tensor(
                np.asarray(columns["latent"])[rows], dtype=torch.float32, device=device
            )
            judged = module.evaluate(feature, state, latent)
            log_prob = np.zeros((num_rows, slot.config.schema.chunk), np.float32)
            log_prob[rows], value[rows] = judged.log_prob.cpu().numpy(), judged.value.cpu().numpy()
            found["actor_log_prob"] = log_prob
        else:
            value[rows] = module.value(feature, state).cpu().numpy()
        # Termination has no future, whatever the value head makes of what was seen last.
        ended = np.asarray(columns["next_row"])[np.asarray(columns["terminated"], np.bool_)]
        value[ended] = 0.0
        return found


def _own_decisions(columns: Mapping[str, Any], samples: PolicySamples | WeightedSamples) -> OwnRows:
    """The rows of `samples`, by their numbers in the partition."""
    rows = np.flatnonzero(columns["is_transition"])
    if ROW in columns:
        rows = np.asarray(columns[ROW])[rows]
    return OwnRows(
        rows=tuple(rows.tolist()),
        valid=tuple(samples.valid.sum(dim=1).tolist()),
        lengths=tuple(samples.lengths),
    )
