"""The columns of a rollout, as tensors for an RL update: only its decisions, checked.

Where the rollout kept the features of its predictions they are used as they are (encode once);
otherwise the rows are encoded again, which gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vla_platform.errors import DataError
from vla_platform.gpu_workers.action_modules.base import ActionModule
from vla_platform.gpu_workers.algorithms.awr import WeightedSamples
from vla_platform.gpu_workers.algorithms.policy_gradient import PolicySamples
from vla_platform.gpu_workers.algorithms.ppo import RolloutSamples
from vla_platform.gpu_workers.algorithms.sft import Samples
from vla_platform.gpu_workers.features import FeatureEncoder, stack_features
from vla_platform.gpu_workers.samples import ROW, reads_state, rows_of
from vla_platform.schema import Schema
from vla_platform.specs import AlgorithmSpec, AWRSpec

Columns = Mapping[str, Any]

TRAINING_COLUMNS = ("latent", "log_prob", "advantages", "trained", "state", "is_transition")
OPTIONAL_COLUMNS = ("returns", "value", "feature", "actor_log_prob", "actor_value")
WEIGHTED_COLUMNS = ("actions", "advantages", "trained", "state", "is_transition")
WEIGHTED_OPTIONAL = ("returns", "feature")
ACTOR_COLUMNS = ("latent", "state", "is_transition", "next_row", "terminated", "feature")
"""What the actor's forward reads, beside the fallback."""
FALLBACK_COLUMNS = ("images", "prompt", "state")
"""What the rows are encoded from where no features were kept."""


def columns_of(algorithm: AlgorithmSpec) -> tuple[str, ...]:
    """What an update reads, beside the fallback: what it needs, and what it uses if it is there."""
    if isinstance(algorithm, AWRSpec):
        return (*WEIGHTED_COLUMNS, *WEIGHTED_OPTIONAL)
    return (*TRAINING_COLUMNS, *OPTIONAL_COLUMNS)


def encode_rows(
    columns: Columns, module: ActionModule, encoder: FeatureEncoder, rows: npt.NDArray[np.int64]
) -> tuple[list[torch.Tensor], int]:
    """Features of the chosen rows, and how many backbone forwards they cost."""
    device = encoder.backbone.device
    if "feature" in columns:
        kept = [np.asarray(columns["feature"][row], np.float32) for row in rows]
        return [torch.from_numpy(array.copy()).to(device) for array in kept], 0
    chosen = {name: np.asarray(columns[name])[rows] for name in FALLBACK_COLUMNS if name in columns}
    encoded = encoder.encode(rows_of(chosen, module), [module.feature_kind] * len(rows))
    return encoded.features, encoded.num_forwards


class Decisions:
    """The rows of a rollout that decided something, column by column as checked tensors."""

    def __init__(
        self, columns: Columns, needed: tuple[str, ...], schema: Schema, device: torch.device
    ) -> None:
        """Raises `DataError` where a column is missing, or there is no decision."""
        for name in needed:
            if name not in columns and not (name == "state" and not reads_state(schema)):
                raise DataError(f"column {name!r} is missing", column=name)
        self.rows = np.flatnonzero(columns["is_transition"])
        if not len(self.rows):
            raise DataError("the rollout has no decision", column="is_transition")
        self._columns, self._device = columns, device
        self._schema = schema

    def tensor(self, name: str) -> torch.Tensor:
        """Raises `DataError` where a number is not finite."""
        chosen = np.asarray(self._columns[name], np.float32)[self.rows]
        if not np.isfinite(chosen).all():
            row = int(self.rows[np.argwhere(~np.isfinite(chosen))[0, 0]])
            if ROW in self._columns:
                row = int(self._columns[ROW][row])
            raise DataError(f"column {name!r} is not finite at row {row}", column=name, row=row)
        return torch.from_numpy(chosen.copy()).to(self._device)

    def trained(self) -> torch.Tensor:
        chosen = np.asarray(self._columns["trained"], np.bool_)[self.rows]
        return torch.from_numpy(chosen.copy()).to(self._device)

    def state(self) -> torch.Tensor | None:
        return self.tensor("state") if reads_state(self._schema) else None


def weighted_samples(
    columns: Columns, module: ActionModule, encoder: FeatureEncoder
) -> tuple[WeightedSamples, int]:
    """Recorded decisions with their advantages, and the backbone forwards that it took.

    A decision's advantage is the mean over its trained actions. Raises `DataError`.
    """
    decisions = Decisions(columns, WEIGHTED_COLUMNS, module.schema, encoder.backbone.device)
    features, num_forwards = encode_rows(columns, module, encoder, decisions.rows)
    trained, advantages = decisions.trained(), decisions.tensor("advantages")
    kept = torch.where(trained, advantages, torch.zeros_like(advantages))
    samples = Samples(
        feature=stack_features(features, module.feature_kind),
        state=decisions.state(),
        actions=decisions.tensor("actions"),
        valid=trained,
    )
    return WeightedSamples(
        samples=samples,
        advantages=kept.sum(dim=1) / trained.sum(dim=1).clamp(min=1),
        returns=decisions.tensor("returns") if "returns" in columns else None,
    ), num_forwards


def policy_samples(
    columns: Columns, module: ActionModule, encoder: FeatureEncoder
) -> tuple[PolicySamples, int]:
    """The decisions of a rollout, and the backbone forwards that it took to have their features.

    Raises `DataError` where a column is missing or not finite.
    """
    if not columns:
        raise DataError("column 'latent' is missing", column="latent")
    device = encoder.backbone.device
    decisions = Decisions(columns, TRAINING_COLUMNS, module.schema, device)
    rows, tensor = decisions.rows, decisions.tensor
    features, num_forwards = encode_rows(columns, module, encoder, rows)
    old = "actor_log_prob" if "actor_log_prob" in columns else "log_prob"
    values = "actor_value" if "actor_value" in columns else "value"
    samples = PolicySamples(
        feature=stack_features(features, module.feature_kind),
        state=decisions.state(),
        latent=tensor("latent"),
        rollout=RolloutSamples(
            log_prob=tensor(old),
            advantages=tensor("advantages"),
            returns=tensor("returns") if "returns" in columns else None,
            values=tensor(values) if values in columns else None,
            valid=decisions.trained(),
        ),
    )
    return samples, num_forwards
