"""Group training: each policy ends with the bits that it would have alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.gpu_workers.conftest import Columns, MakeConfig, make_columns
from vla_platform.errors import (
    DataError,
    DeviceLostError,
    ModuleLoadError,
    NotFoundError,
    PlatformError,
)
from vla_platform.gpu_workers.backbone import Backbone, digest_of
from vla_platform.gpu_workers.feature_cache import FeatureCache
from vla_platform.gpu_workers.slot_state import SlotConfig, SlotState
from vla_platform.gpu_workers.training import TrainingModelService
from vla_platform.gpu_workers.training_items import TrainItem, TrainResult
from vla_platform.schema import Schema


def train_alone(backbone: Backbone, config: SlotConfig, batches: list[Columns]) -> SlotState:
    service = TrainingModelService(backbone)
    service.mount(config)
    for batch in batches:
        service.train_batch(config.policy_key, batch)
    return service.save(config.policy_key)


def assert_equal_states(expected: SlotState, actual: SlotState) -> None:
    for wanted, got in (
        (expected.module, actual.module),
        (expected.optimizer, actual.optimizer),
    ):
        assert wanted.keys() == got.keys()
        for name in wanted:
            np.testing.assert_array_equal(wanted[name], got[name], err_msg=name)
    assert expected.scalars == actual.scalars


@pytest.mark.parametrize("cached", [False, True], ids=["no_cache", "cache"])
def test_a_group_update_equals_training_alone(
    backbone: Backbone, three_tenants: list[SlotConfig], cached: bool
) -> None:
    """Parameters, moments, generators: bit-equal, for changing groups, orders and cache hits."""
    batches = {c.policy_key: [make_columns(c, s % 3) for s in range(5)] for c in three_tenants}
    service = TrainingModelService(backbone, cache=FeatureCache() if cached else None)
    for config in three_tenants:
        service.mount(config)
    for step in range(5):
        items = [TrainItem(key, batches[key][step]) for key in batches]
        for part in (items[: step % 3], items[step % 3 :][::-1]):
            outcomes = service.train_group(part)
            assert all(isinstance(outcome, TrainResult) for outcome in outcomes)

    for config in three_tenants:
        alone = train_alone(backbone, config, batches[config.policy_key])
        assert_equal_states(alone, service.save(config.policy_key))


def test_jobs_of_one_policy_in_a_group_follow_each_other(
    backbone: Backbone, make_config: MakeConfig
) -> None:
    config = make_config()
    batches = [make_columns(config, seed) for seed in range(3)]
    service = TrainingModelService(backbone)
    service.mount(config)
    outcomes = service.train_group([TrainItem(config.policy_key, batch) for batch in batches])
    assert [o.step for o in outcomes if isinstance(o, TrainResult)] == [1, 2, 3]
    expected = train_alone(backbone, config, batches)
    assert_equal_states(expected, service.save(config.policy_key))


def test_results_tell_what_was_shared(backbone: Backbone, make_config: MakeConfig) -> None:
    a, b = make_config("a"), make_config("b", seed=1)
    service = TrainingModelService(backbone, cache=FeatureCache())
    service.mount(a)
    service.mount(b)
    columns = make_columns(a, 0, prompt="reach the red block")
    first = service.train_group([TrainItem("a/task", columns), TrainItem("b/task", columns)])
    again = service.train_batch("a/task", columns)
    assert isinstance(first[0], TrainResult)
    assert isinstance(first[1], TrainResult)
    assert (first[0].group_size, first[0].backbone_forwards) == (2, 1)
    assert [(r.cache_hits, r.cache_misses) for r in (first[0], first[1])] == [(0, 3), (3, 0)]
    assert (again.cache_hits, again.backbone_forwards, again.samples) == (3, 0, 3)
    assert (again.step, again.policy_version, again.policy_key) == (2, 2, "a/task")


def test_pf11_each_row_meets_its_own_module(backbone: Backbone, make_config: MakeConfig) -> None:
    """Same signature, same rows, other weights: each loss is that of the policy's own module."""
    a, b = make_config("a", seed=1), make_config("b", seed=2)
    columns = make_columns(a, 0)
    service = TrainingModelService(backbone)
    service.mount(a)
    service.mount(b)
    group = service.train_group([TrainItem("b/task", columns), TrainItem("a/task", columns)])
    losses = {o.policy_key: o.loss for o in group if isinstance(o, TrainResult)}
    assert a.schema.signature == b.schema.signature
    assert losses["a/task"] != losses["b/task"]
    for config in (a, b):
        alone = TrainingModelService(backbone)
        alone.mount(config)
        expected = alone.train_batch(config.policy_key, columns).loss
        assert expected == losses[config.policy_key]


def test_digests_that_a_tenant_sends_name_no_pixels_of_others(
    backbone: Backbone, make_config: MakeConfig
) -> None:
    """Tenant b claims the digest of a's frames for noise of its own, before a trains."""
    a, b = make_config("a", seed=1), make_config("b", seed=2)
    columns = make_columns(a, 0) | {"frame_digest": np.zeros((3, len(a.schema.cameras), 16))}
    noise = {**columns, "images": make_columns(a, 9)["images"]}
    expected = train_alone(backbone, a, [columns])
    service = TrainingModelService(backbone, cache=FeatureCache())
    for config, batch in ((b, noise), (a, columns)):
        service.mount(config)
        service.train_batch(config.policy_key, batch)
    assert_equal_states(expected, service.save(a.policy_key))


def test_pf16_exactly_the_trained_policy_changes(
    backbone: Backbone, make_config: MakeConfig
) -> None:
    configs = [make_config("a", seed=1), make_config("b", seed=2)]
    service = TrainingModelService(backbone)
    slots = {config.policy_key: service.mount(config) for config in configs}
    for key in ("a/task", "b/task", "a/task"):
        before = {name: digest_of(slot.module) for name, slot in slots.items()}
        for seed in range(3):
            service.train_batch(key, make_columns(configs[0], seed))
        after = {name: digest_of(slot.module) for name, slot in slots.items()}
        assert [key] == [name for name in before if before[name] != after[name]]


class MovingNorm(torch.nn.Module):
    """A final norm that drifts and drops out as soon as somebody leaves evaluation mode."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.batch_norm = torch.nn.BatchNorm1d(128)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        moved = self.batch_norm(self.norm(hidden).transpose(1, 2)).transpose(1, 2)
        return self.dropout(moved)


def test_pf18_the_backbone_stays_frozen(make_tenants: Callable[..., list[SlotConfig]]) -> None:
    """100 mixed steps of three tenants on a base with BatchNorm and dropout."""
    plain = Backbone.load("tiny-random")
    plain._model.model.language_model.norm = MovingNorm(plain._model.model.language_model.norm)
    backbone = Backbone(plain._model, plain.canonicalizer, name="moving")
    three_tenants = make_tenants(backbone)
    service = TrainingModelService(backbone, cache=FeatureCache())
    for config in three_tenants:
        service.mount(config)
    rounds = [[make_columns(c, seed, num=2) for c in three_tenants] for seed in range(2)]
    before = backbone.digest
    first = service.heldout_loss("a/task", rounds[0][0])
    assert first == service.heldout_loss("a/task", rounds[0][0])
    for step in range(34):
        service.train_group(
            [
                TrainItem(config.policy_key, columns)
                for config, columns in zip(three_tenants, rounds[step % 2], strict=True)
            ]
        )
        if step == 3:
            backbone._model.train()  # whoever does this, the next forward ends it
            service.encoder.cache.clear()  # type: ignore[union-attr]
    service.slot("b/task").module.train()
    backbone.verify()
    assert before == digest_of(backbone._model)
    assert sum(service.slot(c.policy_key).step for c in three_tenants) >= 100


@pytest.mark.parametrize(("column", "value"), [("actions", np.nan), ("state", np.inf)])
def test_f16_nan_data_of_one_leaves_the_other_bit_equal(
    backbone: Backbone, make_config: MakeConfig, column: str, value: float
) -> None:
    a, b = make_config("a"), make_config("b", cameras=("top", "wrist"), seed=1)
    batches = [make_columns(b, seed) for seed in range(3)]
    service = TrainingModelService(backbone)
    service.mount(a)
    service.mount(b)
    before = service.save("a/task")
    for batch in batches:
        bad = make_columns(a, 5)
        bad[column][2, ...] = value
        outcome = service.train_group([TrainItem("a/task", bad), TrainItem("b/task", batch)])
        assert isinstance(outcome[0], DataError)
        place = {key: outcome[0].details[key] for key in ("column", "episode", "frame")}
        assert place == {"column": column, "episode": 9, "frame": 20}
        assert "episode 9, frame 20" in str(outcome[0])
    assert_equal_states(before, service.save("a/task"))
    assert_equal_states(train_alone(backbone, b, batches), service.save("b/task"))


def _without(columns: Columns, name: str) -> Columns:
    return {key: value for key, value in columns.items() if key != name}


def test_malformed_columns_are_named(backbone: Backbone, make_config: MakeConfig) -> None:
    config = make_config()
    service = TrainingModelService(backbone)
    service.mount(config)
    good = make_columns(config, 0)
    bad = [
        (_without(good, "images"), "'images' is missing"),
        (_without(good, "state"), "'state' is missing"),
        (good | {"actions": good["actions"][:, :2]}, "'actions' has shape"),
        (good | {"images": good["images"].astype(np.float32)}, "not uint8"),
        (good | {"prompt": np.full((3, 4), 0xFF, np.uint8)}, "not UTF-8"),
        (good | {"prompt": good["prompt"][:1]}, "not bytes of 3 rows"),
        ({key: value[:0] for key, value in good.items()}, "no rows"),
    ]
    outcomes = service.train_group([TrainItem("a/task", columns) for columns, _ in bad])
    for (_, message), outcome in zip(bad, outcomes, strict=True):
        assert isinstance(outcome, DataError)
        assert message in str(outcome)


def test_heldout_loss_is_repeatable_and_changes_nothing(
    backbone: Backbone, three_tenants: list[SlotConfig]
) -> None:
    service = TrainingModelService(backbone)
    for config in three_tenants:
        slot = service.mount(config)
        columns = make_columns(config, 3)
        service.train_batch(config.policy_key, columns)
        before = slot.state()
        losses = {service.heldout_loss(config.policy_key, columns) for _ in range(3)}
        assert len(losses) == 1
        assert_equal_states(before, slot.state())


def test_training_lowers_the_heldout_loss_of_seen_rows(
    backbone: Backbone, three_tenants: list[SlotConfig]
) -> None:
    service = TrainingModelService(backbone, cache=FeatureCache())
    for config in three_tenants:
        service.mount(config)
        columns = make_columns(config, 0, num=4)
        before = service.heldout_loss(config.policy_key, columns)
        for _ in range(20):
            service.train_batch(config.policy_key, columns)
        assert service.heldout_loss(config.policy_key, columns) < before


def test_read_only_columns_are_taken(backbone: Backbone, make_config: MakeConfig) -> None:
    config = make_config()
    service = TrainingModelService(backbone)
    service.mount(config)
    columns = make_columns(config, 0)
    for array in columns.values():
        array.flags.writeable = False
    assert service.train_batch("a/task", columns).step == 1


def test_unknown_policies_and_foreign_base_models(
    backbone: Backbone, make_config: MakeConfig
) -> None:
    """B17: a module of another base model joins nothing."""
    config = make_config()
    service = TrainingModelService(backbone)
    [outcome] = service.train_group([TrainItem("a/task", make_columns(config, 0))])
    assert isinstance(outcome, NotFoundError)
    foreign = Schema.from_dict(config.schema.to_dict() | {"base_digest": "0" * 64})
    with pytest.raises(ModuleLoadError, match="base model"):
        service.mount(make_config().__class__(**{**vars(config), "schema": foreign}))
    service.mount(config)
    assert service.mounted == ("a/task",)
    service.unmount("a/task")
    service.unmount("a/task")
    assert service.mounted == ()


class MemoryLimit:
    """A forward fails on more than `most` rows, as a device without memory does."""

    def __init__(self, service: TrainingModelService, most: int) -> None:
        self._encode, self._most = service.encoder.encode, most
        service.encoder.encode = self  # type: ignore[method-assign, assignment]

    def __call__(self, rows: Any, kinds: Any) -> Any:
        if len(rows) > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._encode(rows, kinds)


def test_f11_a_batch_that_fills_the_memory_fails_alone(
    backbone: Backbone, make_config: MakeConfig
) -> None:
    a, b = make_config("a"), make_config("b", seed=1)
    good = make_columns(b, 1)
    large = {name: np.concatenate([one, one]) for name, one in make_columns(a, 0).items()}
    service = TrainingModelService(backbone)
    service.mount(a)
    service.mount(b)
    before = service.save("a/task")
    MemoryLimit(service, len(good["actions"]))
    failed, done = service.train_group([TrainItem("a/task", large), TrainItem("b/task", good)])
    assert isinstance(failed, PlatformError)
    assert "out of memory" in str(failed)
    assert isinstance(done, TrainResult)
    assert_equal_states(before, service.save("a/task"))
    assert_equal_states(train_alone(backbone, b, [good]), service.save("b/task"))


def test_f12_a_broken_device_is_nobodys_fault(backbone: Backbone, make_config: MakeConfig) -> None:
    """The worker has to go; its jobs move, and no tenant's run fails."""
    service = TrainingModelService(backbone, is_alive=lambda device: False)
    config = make_config()
    service.mount(config)
    MemoryLimit(service, 0)
    with pytest.raises(DeviceLostError):
        service.train_group([TrainItem("a/task", make_columns(config, 0))])
