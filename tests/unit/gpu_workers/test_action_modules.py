from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.gpu_workers.conftest import MakeConfig, wide_statistics
from vla_platform.gpu_workers.action_modules.base import ActionModule, mean_over_valid
from vla_platform.gpu_workers.action_modules.build import build_action_module
from vla_platform.gpu_workers.algorithms.sft import Samples, sft_loss
from vla_platform.gpu_workers.backbone import FeatureKind
from vla_platform.gpu_workers.features import VLAFeature
from vla_platform.gpu_workers.slot_state import SlotConfig
from vla_platform.specs import FlowMatchingModule, OFTModule

OFT = OFTModule(chunk=5)
FLOW = FlowMatchingModule(chunk=5, hidden_dim=32, num_layers=3, num_heads=2)


def build(config: SlotConfig, seed: int = 0) -> ActionModule:
    return build_action_module(
        config.action_module,
        config.schema,
        feature_dim=128,
        seed=seed,
        normalization=config.normalization,
        state_statistics=config.statistics["state"],
        action_statistics=config.statistics["action"],
    )


def make_samples(module: ActionModule, num: int, *, seed: int = 0, length: int = 32) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    schema = module.schema
    if module.feature_kind is FeatureKind.QUERIES:
        values, mask = torch.randn(num, schema.chunk, 128, generator=generator), None
    else:
        values = torch.randn(num, length, 128, generator=generator)
        mask = torch.arange(length)[None].expand(num, -1) >= torch.arange(num)[:, None]
    return Samples(
        VLAFeature(module.feature_kind, values, mask),
        torch.randn(num, schema.state_dim, generator=generator),
        torch.rand(num, schema.chunk, schema.action_dim, generator=generator),
        torch.rand(num, schema.chunk, generator=generator) < 0.7,
    )


def loss_of(module: ActionModule, samples: Samples) -> torch.Tensor:
    return module.loss(
        samples.feature,
        samples.state,
        samples.actions,
        samples.valid,
        drawn=module.draw(samples.num_rows, torch.Generator().manual_seed(0)),
    )


@pytest.mark.parametrize("spec", [OFT, FLOW], ids=["oft", "flow"])
def test_a_seed_fixes_the_module_and_nobody_elses_numbers(
    make_config: MakeConfig, spec: OFTModule | FlowMatchingModule
) -> None:
    config = make_config(module=spec)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, second, other = build(config, 1), build(config, 1), build(config, 2)
    assert torch.equal(expected, torch.rand(2))
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert any(
        not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("spec", [OFT, FLOW], ids=["oft", "flow"])
def test_shapes_and_gradients(
    make_config: MakeConfig, spec: OFTModule | FlowMatchingModule
) -> None:
    module = build(make_config(module=spec))
    samples = make_samples(module, 4)
    rows = loss_of(module, samples)
    rows.sum().backward()
    assert rows.shape == (4,)
    assert all(parameter.grad is not None for parameter in module.parameters())
    with torch.no_grad():
        actions = module.predict(
            samples.feature, samples.state, generator=torch.Generator().manual_seed(0)
        )
    assert actions.shape == (4, 5, 3)
    assert torch.isfinite(actions).all()


@pytest.mark.parametrize("spec", [OFT, FLOW], ids=["oft", "flow"])
def test_padded_steps_do_not_count(
    make_config: MakeConfig, spec: OFTModule | FlowMatchingModule
) -> None:
    module = build(make_config(module=spec))
    samples = make_samples(module, 4)
    expected = loss_of(module, samples)
    samples.actions[~samples.valid] = 1e6
    if isinstance(spec, OFTModule):
        assert torch.equal(expected, loss_of(module, samples))
    samples.valid[:] = False
    assert loss_of(module, samples).tolist() == [0.0] * 4


def test_mean_over_valid_ignores_what_is_not_finite() -> None:
    errors = torch.tensor([[[1.0, 3.0], [torch.nan, torch.inf]]], requires_grad=True)
    mean = mean_over_valid(errors, torch.tensor([[True, False]]))
    mean.sum().backward()
    assert mean.tolist() == [2.0]
    assert errors.grad is not None
    assert errors.grad.tolist() == [[[0.5, 0.5], [0.0, 0.0]]]


def test_microbatch_shares_add_up_to_the_batch(make_config: MakeConfig) -> None:
    module = build(make_config(module=OFT))
    samples = make_samples(module, 6)
    num_valid = int(samples.valid.sum())
    whole = sft_loss(module, samples, num_valid=num_valid)
    parts = [
        sft_loss(module, samples.rows(a, b), num_valid=num_valid)
        for a, b in ((0, 1), (1, 4), (4, 6))
    ]
    torch.testing.assert_close(whole, torch.stack(parts).sum(), rtol=1e-6, atol=1e-7)


def test_oft_keys_are_those_of_starvla(make_config: MakeConfig) -> None:
    module = build(make_config(module=OFTModule(state="none")))
    keys = {name.removesuffix(".weight") for name in module.state_dict() if "weight" in name}
    blocks = {f"model.mlp_resnet_blocks.{b}.ffn.{i}" for b in (0, 1) for i in (0, 1)}
    ends = {f"model.{name}" for name in ("layer_norm1", "fc1", "layer_norm2", "fc2")}
    assert blocks | ends == keys


def test_oft_treats_each_query_alone(make_config: MakeConfig) -> None:
    module = build(make_config(module=OFT))
    samples = make_samples(module, 1)
    noise = torch.Generator()
    before = module.predict(samples.feature, samples.state, generator=noise)
    samples.feature.values[:, 2] += 1
    after = module.predict(samples.feature, samples.state, generator=noise)
    changed = (before != after).any(dim=2)[0].tolist()
    assert changed == [False, False, True, False, False]


def test_flow_matching_ignores_masked_context(make_config: MakeConfig) -> None:
    module = build(make_config(module=FLOW))
    samples = make_samples(module, 3)
    assert samples.feature.mask is not None
    expected = loss_of(module, samples)
    samples.feature.values[~samples.feature.mask] = 100.0
    assert torch.equal(expected, loss_of(module, samples))


def test_flow_matching_learns_a_fixed_action(make_config: MakeConfig) -> None:
    """From noise, four Euler steps reach what was trained: t runs 0 (noise) to 1 (data)."""
    module = build(make_config(module=FLOW))
    samples = make_samples(module, 8)
    samples.actions[:] = torch.tensor([0.5, -0.5, 1.0])
    samples.valid[:] = True
    noise = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        drawn = module.draw(samples.num_rows, noise)
        sft_loss(module, samples, num_valid=40, drawn=drawn).backward()
        optimizer.step()
    with torch.no_grad():
        actions = module.predict(samples.feature, samples.state, generator=noise)
    assert float((actions - samples.actions).abs().mean()) < 0.15


def test_state_goes_into_the_prompt_as_bins(make_config: MakeConfig) -> None:
    module = build(make_config(module=OFTModule(state="prompt")))
    state = np.array([[-2.0, 2.0], [0.0, 99.0]], np.float32)
    assert module.prompts(["go", "go"], state) == [
        "go [STATE] 0 255 [ACTION]",
        "go [STATE] 128 255 [ACTION]",
    ]


def test_statistics_travel_in_the_payload(make_config: MakeConfig) -> None:
    config = make_config(module=OFT)
    other = {"state": wide_statistics(2, 9.0), "action": wide_statistics(3, 9.0)}
    module = build(make_config(module=OFT, statistics=other))
    module.load_state_dict(build(config).state_dict())
    assert module.action_normalizer.scale.tolist() == [2.0] * 3
