from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

from tests.unit.gpu_workers.conftest import MakeConfig, make_columns
from vla_platform.errors import DivergedError, ModuleLoadError
from vla_platform.gpu_workers.backbone import Backbone
from vla_platform.gpu_workers.schedule import learning_rate
from vla_platform.gpu_workers.slot_state import SlotConfig, SlotState
from vla_platform.gpu_workers.training import TrainingModelService
from vla_platform.specs import AdamWSpec, FlowMatchingModule, OFTModule, ScheduleSpec

DROPOUT = FlowMatchingModule(chunk=4, hidden_dim=32, num_layers=2, dropout=0.3)


def equal_states(a: SlotState, b: SlotState) -> bool:
    def equal(x: dict[str, Any], y: dict[str, Any]) -> bool:
        return x.keys() == y.keys() and all(np.array_equal(x[k], y[k]) for k in x)

    return equal(a.module, b.module) and equal(a.optimizer, b.optimizer) and a.scalars == b.scalars


@pytest.mark.parametrize("module", [OFTModule(), DROPOUT], ids=["oft", "flow_with_dropout"])
def test_resumed_equals_undisturbed(
    backbone: Backbone, make_config: MakeConfig, module: OFTModule | FlowMatchingModule
) -> None:
    """State out, through arrays and JSON, into a fresh slot: the same bits from there on."""
    config = make_config(module=module)
    batches = [make_columns(config, seed) for seed in range(6)]
    whole = TrainingModelService(backbone)
    whole.mount(config)
    expected = [whole.train_batch(config.policy_key, batch).loss for batch in batches]

    first = TrainingModelService(backbone)
    first.mount(config)
    losses = [first.train_batch(config.policy_key, batch).loss for batch in batches[:3]]
    saved = first.save(config.policy_key)
    first.train_batch(config.policy_key, batches[0])  # what is lost must not reach into the state
    travelled = SlotState(saved.module, saved.optimizer, json.loads(json.dumps(saved.scalars)))
    torch.rand(7)
    second = TrainingModelService(backbone)
    second.mount(config, state=travelled)
    losses += [second.train_batch(config.policy_key, batch).loss for batch in batches[3:]]

    assert expected == losses
    assert equal_states(whole.save(config.policy_key), second.save(config.policy_key))


def test_mounting_again_starts_anew(backbone: Backbone, make_config: MakeConfig) -> None:
    config = make_config()
    service = TrainingModelService(backbone)
    fresh = service.mount(config).state()
    service.train_batch(config.policy_key, make_columns(config, 0))
    assert equal_states(fresh, service.mount(config).state())


def test_pf31_a_batch_of_padding_changes_nothing(
    backbone: Backbone, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(optimizer=AdamWSpec(weight_decay=0.1))
    service = TrainingModelService(backbone)
    service.mount(config)
    service.train_batch(config.policy_key, make_columns(config, 0))
    before = service.save(config.policy_key)
    columns = make_columns(config, 1)
    columns["actions_is_pad"][:] = True

    result = service.train_batch(config.policy_key, columns)

    after = service.save(config.policy_key)
    assert (result.loss, result.skipped, result.policy_version, result.step) == (0.0, True, 1, 2)
    assert all(np.array_equal(before.module[name], after.module[name]) for name in before.module)
    assert all(np.array_equal(before.optimizer[k], after.optimizer[k]) for k in before.optimizer)
    assert "nothing to learn" in caplog.text
    assert service.heldout_loss(config.policy_key, columns) == 0.0


def test_a_diverging_step_is_not_applied(backbone: Backbone, make_config: MakeConfig) -> None:
    config = make_config(module=DROPOUT)
    service = TrainingModelService(backbone)
    slot = service.mount(config)
    service.train_batch(config.policy_key, make_columns(config, 0))
    before = slot.state()
    columns = make_columns(config, 1)
    columns["actions"][0, 0] = 3e38  # finite, but its square is not
    columns["actions_is_pad"][:] = False
    with pytest.raises(DivergedError, match="step 1"):
        service.train_batch(config.policy_key, columns)
    assert equal_states(before, slot.state())


@pytest.mark.parametrize("part", ["head", "state_encoder"])
def test_only_the_trainable_part_changes(
    backbone: Backbone, make_config: MakeConfig, part: str
) -> None:
    config = make_config(trainable=(part,))
    service = TrainingModelService(backbone)
    before = service.mount(config).export_params()
    service.train_batch(config.policy_key, make_columns(config, 0))
    after = service.export_params(config.policy_key)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {
        name
        for name in before
        if name.startswith("state_encoder." if part == "state_encoder" else "model.")
    }


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_accumulation_equals_the_whole_batch(
    backbone: Backbone, make_config: MakeConfig, parts: int
) -> None:
    """The parts hold different numbers of valid steps; sums differ in their order only."""
    config = make_config(optimizer=AdamWSpec(grad_clip=None))
    columns = make_columns(config, 0, num=6)
    whole, cut = TrainingModelService(backbone), TrainingModelService(backbone)
    whole.mount(config)
    cut.mount(config)
    expected = whole.train_batch(config.policy_key, columns)
    result = cut.train_batch(config.policy_key, columns, num_microbatches=parts)
    assert expected.loss == pytest.approx(result.loss, rel=1e-5)
    assert expected.grad_norm == pytest.approx(result.grad_norm, rel=1e-5)


def test_exported_params_do_not_follow_training(
    backbone: Backbone, make_config: MakeConfig
) -> None:
    config = make_config()
    service = TrainingModelService(backbone)
    service.mount(config)
    exported = service.export_params(config.policy_key)
    copies = {name: array.copy() for name, array in exported.items()}
    service.train_batch(config.policy_key, make_columns(config, 0))
    assert all(np.array_equal(exported[name], copies[name]) for name in copies)


def test_a_payload_starts_another_policy(backbone: Backbone, make_config: MakeConfig) -> None:
    config = make_config()
    service = TrainingModelService(backbone)
    service.mount(config)
    service.train_batch(config.policy_key, make_columns(config, 0))
    payload = service.export_params(config.policy_key)
    other = service.mount(make_config("b", seed=9), params=payload)
    assert all(np.array_equal(payload[name], other.export_params()[name]) for name in payload)
    assert (other.step, other.policy_version) == (0, 0)


def test_what_does_not_fit_is_refused(backbone: Backbone, make_config: MakeConfig) -> None:
    """B17: checked again where it is loaded."""
    config: SlotConfig = make_config()
    service = TrainingModelService(backbone)
    saved = service.mount(config).state()
    wider = make_config(action_dim=4)
    with pytest.raises(ModuleLoadError, match="another schema"):
        service.mount(wider, state=saved)
    with pytest.raises(ModuleLoadError, match="instead of"):
        service.mount(wider, params=saved.module)
    with pytest.raises(ModuleLoadError, match="does not fit"):
        service.mount(config, params={})
    with pytest.raises(ModuleLoadError, match="version"):
        service.mount(config, state=SlotState(saved.module, saved.optimizer, {"version": 99}))
    assert service.slot(config.policy_key).config == config


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps one precision per process; give this test its own."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_bfloat16_autocast_keeps_float32_weights(
    backbone: Backbone, make_config: MakeConfig
) -> None:
    config = make_config()
    service = TrainingModelService(backbone, mixed_precision="bf16")
    slot = service.mount(config)
    losses = [
        service.train_batch(config.policy_key, make_columns(config, 0)).loss for _ in range(9)
    ]
    assert losses[-1] < losses[0]
    assert {parameter.dtype for parameter in slot.module.parameters()} == {torch.float32}


def test_schedules() -> None:
    cosine = AdamWSpec(lr=0.1, schedule=ScheduleSpec(kind="cosine", warmup_steps=2, min_lr=0.01))
    rates = [learning_rate(cosine, step, 12) for step in range(14)]
    assert rates[:3] == pytest.approx([0.05, 0.1, 0.1])
    assert rates[7] == pytest.approx(0.055)
    assert rates[12:] == pytest.approx([0.01, 0.01])
    linear = AdamWSpec(lr=0.1, schedule=ScheduleSpec(kind="linear"))
    assert learning_rate(linear, 5, 10) == pytest.approx(0.05)
    constant = AdamWSpec(lr=0.1, schedule=ScheduleSpec(kind="constant"))
    assert learning_rate(constant, 999, 10) == 0.1
