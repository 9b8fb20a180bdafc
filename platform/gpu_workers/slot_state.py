"""What a slot is made from and what is in it, as plain data: its configuration and its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy.typing as npt

from vla_platform.gpu_workers.normalization import Normalization, Statistics
from vla_platform.schema import Schema
from vla_platform.specs import ActionModuleSpec, AdamWSpec, AlgorithmSpec

STATE_VERSION = 1
MixedPrecision = Literal["no", "bf16", "fp16"]
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class SlotConfig:
    """Everything that a policy's numbers depend on besides its data."""

    policy_key: str
    schema: Schema
    action_module: ActionModuleSpec
    optimizer: AdamWSpec
    total_steps: int
    seed: int
    trainable: tuple[str, ...] = ("head", "state_encoder")
    statistics: Mapping[str, Statistics | None] = field(default_factory=dict)  # state, action
    normalization: Normalization = "min_max"
    algorithm: AlgorithmSpec | None = None  # of reinforcement learning; None: fine-tuning


@dataclass(frozen=True)
class SlotState:
    """A slot as plain data: what a checkpoint holds.

    module     the payload: weights and normalisation statistics.
    optimizer  Adam's moments by parameter name and the states of the random generators.
    scalars    counters and the gradient scaler, as JSON.
    """

    module: Arrays
    optimizer: Arrays
    scalars: dict[str, Any]
