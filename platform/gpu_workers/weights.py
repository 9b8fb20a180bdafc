"""A version of a policy: its tensors, and the module that they belong in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from vla_platform.control.prepared import Prepared
from vla_platform.errors import ModuleLoadError
from vla_platform.gpu_workers.action_modules.base import ActionModule
from vla_platform.gpu_workers.action_modules.build import build_action_module
from vla_platform.gpu_workers.action_modules.stochastic import trained_by_rl
from vla_platform.gpu_workers.normalization import Normalization
from vla_platform.gpu_workers.slot_state import SlotConfig
from vla_platform.schema import Schema
from vla_platform.specs import ActionModuleSpec
from vla_storage import tensors

Tensors = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class ModuleMeta:
    """What a policy's tensors belong in."""

    schema: Schema
    action_module: ActionModuleSpec
    normalization: Normalization = "min_max"

    @classmethod
    def of(cls, known: SlotConfig | Prepared) -> ModuleMeta:
        return cls(
            schema=known.schema,
            action_module=known.action_module,
            normalization=known.normalization,
        )


@dataclass(frozen=True)
class Weights:
    """One version of a policy. `digest` is the SHA-256 of the tensors' file."""

    version: int
    tensors: Tensors
    meta: ModuleMeta
    digest: str


def module_of(weights: Weights, *, feature_dim: int, name: str) -> ActionModule:
    """The module that a version's tensors belong in, on the CPU, for acting only.

    Raises `ModuleLoadError` naming `name`, whose weights they are.
    """
    meta = weights.meta
    module = build_action_module(
        meta.action_module,
        meta.schema,
        feature_dim=feature_dim,
        seed=0,
        normalization=meta.normalization,
        state_statistics=None,
        action_statistics=None,
        rl=True,
    )
    try:
        state = {k: torch.tensor(v) for k, v in weights.tensors.items()}
        if not trained_by_rl(state):
            state |= {k: v for k, v in module.state_dict().items() if trained_by_rl([k])}
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ModuleLoadError(
            f"the weights of {name} do not fit its module: {error}", policy_key=name
        ) from error
    return module.eval().requires_grad_(False)


def digest_of_tensors(arrays: Tensors) -> str:
    """The module digest that answers carry: equal tensors, equal digest."""
    return hashlib.sha256(tensors.encode(arrays)).hexdigest()
