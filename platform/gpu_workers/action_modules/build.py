"""From a spec to a module, the same for the same seed."""

from __future__ import annotations

import torch

from vla_platform.gpu_workers.action_modules.base import ActionModule
from vla_platform.gpu_workers.action_modules.flow_matching import FlowMatchingActionModule
from vla_platform.gpu_workers.action_modules.oft import OFTActionModule
from vla_platform.gpu_workers.normalization import Normalization, Statistics
from vla_platform.schema import Schema
from vla_platform.specs import ActionModuleSpec, OFTModule


def build_action_module(
    spec: ActionModuleSpec,
    schema: Schema,
    *,
    feature_dim: int,
    seed: int,
    normalization: Normalization,
    state_statistics: Statistics | None,
    action_statistics: Statistics | None,
    rl: bool = False,
) -> ActionModule:
    """A module on the CPU, initialised from `seed`; nobody else's random numbers are touched.

    With `rl` it can also sample and judge its samples, which adds parameters under `rl.`.
    """
    kind = OFTActionModule if isinstance(spec, OFTModule) else FlowMatchingActionModule
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = kind(
            spec,  # type: ignore[arg-type]
            schema,
            feature_dim=feature_dim,
            normalization=normalization,
            state_statistics=state_statistics,
            action_statistics=action_statistics,
        )
        if rl:
            module.add_rl_heads(feature_dim, initial_log_std=spec.initial_log_std)
        return module
