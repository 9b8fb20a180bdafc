"""From features to actions, for the modules of all tenants of a batch.

Modules of one kind and shape decode together: their weights are stacked and one vectorised call
computes all (`torch.func`), with the same numbers as one after the other up to the rounding of
batched matrix products (1e-6 relative in float32). Everything else decodes one by one. A row's
result depends on its own feature, state and seed.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from vla_platform.gpu_workers.action_modules.base import ActionModule
from vla_platform.gpu_workers.features import VLAFeature, stack_features
from vla_platform.gpu_workers.module_versions import MountedModule

Floats = npt.NDArray[np.float32]
MIN_STACKED = {"cpu": 8}
"""Modules from which stacking pays. On a CPU core (measured): OFT 1.8 ms either way at 8 modules,
flow matching 66 ms one by one and 47 stacked; with fewer, its own cost is not recovered."""
MIN_STACKED_ELSEWHERE = 2
"""Where launching kernels is what costs."""
MAX_STACKS = 8


@dataclass(frozen=True)
class DecodeRow:
    """One row of a batch. `state` (S,) where the module reads one; `seed` of its own noise;
    `sample`: draw from the module's distribution, and judge the draw."""

    mounted: MountedModule
    feature: Tensor
    state: npt.NDArray[np.float32] | None
    seed: int
    sample: bool = False


@dataclass(frozen=True)
class DecodedRow:
    """One row's chunk, un-normalised, (H, A); of a sample also its latent (K, H, A), its
    log-probabilities (H,) and the value of what was seen."""

    actions: Floats
    latent: Floats | None = None
    log_prob: Floats | None = None
    value: float | None = None


@dataclass(frozen=True)
class _Inputs:
    """Rows of one module as tensors."""

    feature: VLAFeature
    state: Tensor | None
    noise: Tensor | None


class Decoder:
    """Keeps the stacks of the last few sets of modules. Not thread-safe."""

    def __init__(self, *, device: str = "cpu", min_stacked: int | None = None) -> None:
        self._min_stacked = min_stacked or MIN_STACKED.get(device, MIN_STACKED_ELSEWHERE)
        self._stacks: OrderedDict[tuple[int, ...], tuple[Any, Any, Any]] = OrderedDict()
        self.num_stacked_calls = 0

    @torch.no_grad()
    def decode(self, rows: Sequence[DecodeRow]) -> list[DecodedRow]:
        """Action chunks in the order of the rows."""
        places: dict[int, list[int]] = {}
        drawn: dict[int, list[int]] = {}
        for at, row in enumerate(rows):
            of = drawn if row.sample else places
            of.setdefault(id(row.mounted), []).append(at)
        results: list[DecodedRow | None] = [None] * len(rows)
        for found in drawn.values():
            for at, sampled in zip(found, _sampled([rows[at] for at in found]), strict=True):
                results[at] = sampled
        inputs = {key: _inputs_of([rows[at] for at in found]) for key, found in places.items()}
        groups: dict[tuple[Any, ...], list[int]] = {}
        for key, one in inputs.items():
            mounted = rows[places[key][0]].mounted
            groups.setdefault((mounted.kind, one.feature.values.shape[2:]), []).append(key)
        for members in groups.values():
            modules = [rows[places[key][0]].mounted.module for key in members]
            given = [inputs[key] for key in members]
            for key, actions in zip(members, self._group(modules, given), strict=True):
                array = actions.float().cpu().numpy()
                for number, at in enumerate(places[key]):
                    results[at] = DecodedRow(array[number])
        return [result for result in results if result is not None]

    def _group(self, modules: list[ActionModule], given: list[_Inputs]) -> list[Tensor]:
        if len(modules) < self._min_stacked:
            return [
                module.act(one.feature, one.state, one.noise)
                for module, one in zip(modules, given, strict=True)
            ]
        self.num_stacked_calls += 1
        skeleton, parameters, buffers = self._stack(modules)
        kind = given[0].feature.kind

        def act(
            parameters: Any,
            buffers: Any,
            values: Tensor,
            mask: Tensor | None,
            state: Tensor | None,
            noise: Tensor | None,
        ) -> Tensor:
            call = (VLAFeature(kind, values, mask), state, noise)
            actions: Tensor = functional_call(skeleton, (parameters, buffers), call)
            return actions

        stacked: list[Any] = [
            _stack_rows([one.feature.values for one in given], length_at=-2),
            _stack_rows([one.feature.mask for one in given], length_at=-1),
            _stack_rows([one.state for one in given]),
            _stack_rows([one.noise for one in given]),
        ]
        dims = (0, 0, *(None if tensor is None else 0 for tensor in stacked))
        with sdpa_kernel(SDPBackend.MATH):  # the only attention that vectorises
            results = vmap(act, in_dims=dims)(parameters, buffers, *stacked)
        return [result[: one.feature.num_rows] for result, one in zip(results, given, strict=True)]

    def _stack(self, modules: list[ActionModule]) -> tuple[Any, Any, Any]:
        key = tuple(id(module) for module in modules)
        found = self._stacks.get(key)
        if found is None:
            parameters, buffers = stack_module_state(list(modules))
            skeleton = _ActingModule(copy.deepcopy(modules[0]).to("meta"))
            prefixed = [
                {f"module.{name}": tensor.detach() for name, tensor in part.items()}
                for part in (parameters, buffers)
            ]
            # The modules stay referenced, so that no id is used again while it is a key here.
            skeleton.keep = modules
            found = self._stacks[key] = (skeleton, prefixed[0], prefixed[1])
            while len(self._stacks) > MAX_STACKS:
                self._stacks.popitem(last=False)
        self._stacks.move_to_end(key)
        return found


class _ActingModule(torch.nn.Module):
    """Makes `act` the forward, which is what `functional_call` calls."""

    def __init__(self, module: ActionModule) -> None:
        super().__init__()
        self.module = module
        self.keep: Sequence[ActionModule] = ()

    def forward(self, feature: VLAFeature, state: Tensor | None, noise: Tensor | None) -> Tensor:
        return self.module.act(feature, state, noise)


def _sampled(rows: list[DecodeRow]) -> list[DecodedRow]:
    """Rows of one module, each drawn with noise of its own."""
    module, device = rows[0].mounted.module, rows[0].feature.device
    shape = module.sample_noise_shape
    noise = torch.stack([row_noise(row.seed, shape) for row in rows]).to(device)
    states = [row.state for row in rows if row.state is not None]
    state = torch.from_numpy(np.stack(states)).to(device) if states else None
    feature = stack_features([row.feature for row in rows], module.feature_kind)
    drawn = module.sample(feature, state, noise)
    arrays = [
        tensor.float().cpu().numpy()
        for tensor in (drawn.actions, drawn.latent, drawn.log_prob, drawn.value)
    ]
    return [
        DecodedRow(actions, latent, log_prob, float(value))
        for actions, latent, log_prob, value in zip(*arrays, strict=True)
    ]


def row_noise(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal, on the CPU, from the row's own seed: whatever its batch mates."""
    return torch.randn(shape, generator=Generator().manual_seed(seed))


def _inputs_of(rows: list[DecodeRow]) -> _Inputs:
    module = rows[0].mounted.module
    schema, device = module.schema, rows[0].feature.device
    noise = None
    if module.draws_noise:
        shape = (schema.chunk, schema.action_dim)
        noise = torch.stack([row_noise(row.seed, shape) for row in rows]).to(device)
    states = [row.state for row in rows if row.state is not None]
    state = torch.from_numpy(np.stack(states)).to(device) if states else None
    feature = stack_features([row.feature for row in rows], module.feature_kind)
    return _Inputs(feature, state, noise)


def _stack_rows(tensors: list[Tensor | None], *, length_at: int | None = None) -> Tensor | None:
    """(M, B, ...) from M tensors of at most B rows, padded with zeros behind; and with zeros in
    front along the token dimension, as a row's own padding is."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    shape = list(present[0].shape)
    shape[0] = max(len(tensor) for tensor in present)
    if length_at is not None:
        shape[length_at] = max(tensor.shape[length_at] for tensor in present)
    if all(list(tensor.shape) == shape for tensor in present):
        return torch.stack(present)
    stacked = present[0].new_zeros((len(present), *shape))
    for at, tensor in enumerate(present):
        place = stacked[at, : len(tensor)]
        if length_at is not None:
            place = place.narrow(
                length_at, shape[length_at] - tensor.shape[length_at], tensor.shape[length_at]
            )
        place.copy_(tensor)
    return stacked
