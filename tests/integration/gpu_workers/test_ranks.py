"""Two real ranks, gloo and the payload store between them, against one rank on the same rows."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.unit.gpu_workers.conftest import config_maker, make_columns, tenants_of  # noqa: E402
from vla_platform.control.services import payload_store  # noqa: E402
from vla_platform.errors import (  # noqa: E402
    DataError,
    DivergedError,
    ModuleLoadError,
    RankLostError,
)
from vla_platform.gpu_workers.backbone import Backbone  # noqa: E402
from vla_platform.gpu_workers.batch_rows import fetch_batch  # noqa: E402
from vla_platform.gpu_workers.ranks.commands import Source  # noqa: E402
from vla_platform.gpu_workers.ranks.leader import Team  # noqa: E402
from vla_platform.gpu_workers.samples import ROW  # noqa: E402
from vla_platform.gpu_workers.slot_state import SlotConfig  # noqa: E402
from vla_platform.gpu_workers.training import TrainingModelService, training_service  # noqa: E402
from vla_platform.gpu_workers.training_items import TrainItem, TrainResult  # noqa: E402
from vla_platform.rl.packing import RowMeta, assign  # noqa: E402
from vla_platform.settings import Settings  # noqa: E402
from vla_platform.specs import (  # noqa: E402
    AdamWSpec,
    AWRSpec,
    FlowMatchingModule,
    GRPOSpec,
    OFTModule,
    PPOSpec,
    ScheduleSpec,
)
from vla_storage.errors import PayloadNotFoundError  # noqa: E402
from vla_storage.objects import MemoryObjectStore  # noqa: E402
from vla_storage.payloads import PayloadStore  # noqa: E402

TOLERANCE = {"rtol": 1e-4, "atol": 3e-5}
"""Two ranks against one: gradients are summed in another order."""
CALM = AdamWSpec(lr=3e-3, eps=1e-2, schedule=ScheduleSpec(warmup_steps=2))
"""With Adam's usual epsilon, rounding of a gradient that is 0 would be a step of full size."""
partitions = itertools.count()


class Pair:
    """A service that leads two ranks, and one that is alone."""

    def __init__(self, team: Team, backbone: Backbone, settings: Settings, lost: list[str]) -> None:
        self.team, self.backbone, self.lost = team, backbone, lost
        self.payloads: PayloadStore = payload_store(settings, MemoryObjectStore())  # type: ignore[arg-type]
        self.both = training_service(backbone, settings, team.ranks("tiny-random"))
        self.alone = TrainingModelService(backbone)

    def mount(self, config: SlotConfig) -> None:
        self.both.mount(config)
        self.alone.mount(config)

    def put(self, columns: dict[str, Any], *, tenant: str = "a") -> str:
        partition = f"p{next(partitions)}"
        self.payloads.put(partition, tenant, columns, ttl_s=600)
        return partition

    def item(self, config: SlotConfig, columns: dict[str, Any], parts: int = 1) -> TrainItem:
        partition = self.put(columns)
        num_ranks = self.team.num_ranks
        own, source = fetch_batch(self.payloads, partition, "a", num_ranks=num_ranks)
        assert source is not None
        assert sorted(row for rows in source.rows for row in rows) == list(
            range(len(columns["actions"]))
        )
        return TrainItem(config.policy_key, own, parts, source)

    def assert_close(self, policy_key: str) -> None:
        """The same module on both ranks, bit by bit, and nearly that of one rank."""
        self.both.check_ranks(policy_key)
        expected = self.alone.export_params(policy_key)
        for name, array in self.both.export_params(policy_key).items():
            np.testing.assert_allclose(array, expected[name], err_msg=name, **TOLERANCE)


def settings_for(folder: Path, url: str, **changes: Any) -> Settings:
    return Settings.model_validate(
        {
            "redis_url": url, "payload_url": url, "signing_key_file": folder / "key",
            "var": folder, "base_models": "tiny-random", "device": "cpu", "training_ranks": 2,
            "training_watchdog_s": 60.0, "payload_spill": False, **changes,
        }
    )  # fmt: skip


@contextlib.contextmanager
def pair_of_ranks(folder: Path, url: str, **changes: Any) -> Iterator[Pair]:
    torch.set_num_threads(1)
    settings, lost = settings_for(folder, url, **changes), []
    team = Team(settings, device="cpu", on_lost=lost.append)
    try:
        backbone = Backbone.load("tiny-random")
        team.meet({"tiny-random": backbone.digest})
        yield Pair(team, backbone, settings, lost)
    finally:
        team.close()


@pytest.fixture(scope="module")
def pair(_redis_urls: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of_ranks(tmp_path_factory.mktemp("ranks"), _redis_urls["redis-payload"]) as found:
        yield found
        assert found.lost == []


def calm(config: SlotConfig) -> SlotConfig:
    """Without dropout, whose masks are each rank's own."""
    module = config.action_module
    if isinstance(module, FlowMatchingModule):
        module = module.model_copy(update={"dropout": 0.0})
    return replace(config, optimizer=CALM, action_module=module)


def test_a_group_of_tenants_trains_on_two_ranks_as_on_one(pair: Pair) -> None:
    """Different modules, cameras and chunks, micro-batches, and batches of one row."""
    configs = [calm(config) for config in tenants_of(pair.backbone)]
    for config in configs:
        pair.mount(config)
    for step, num in enumerate((5, 1, 4)):
        columns = [make_columns(config, step, num=num) for config in configs]
        parts = 1 + step
        outcomes = pair.both.train_group(
            [pair.item(config, one, parts) for config, one in zip(configs, columns, strict=True)]
        )
        expected = pair.alone.train_group(
            [
                TrainItem(config.policy_key, one, parts)
                for config, one in zip(configs, columns, strict=True)
            ]
        )
        for got, wanted in zip(outcomes, expected, strict=True):
            assert isinstance(got, TrainResult), got
            assert isinstance(wanted, TrainResult)
            assert (got.step, got.samples, got.group_size) == (step + 1, num, 3)
            assert got.loss == pytest.approx(wanted.loss, rel=1e-5)
            assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
    for config in configs:
        pair.assert_close(config.policy_key)
        pair.both.unmount(config.policy_key)


def rollout(pair: Pair, config: SlotConfig, seed: int, *, rows: int = 11) -> dict[str, Any]:
    """Decisions of the mounted policy, with the features that its inference kept."""
    slot, rng = pair.alone.slot(config.policy_key), np.random.default_rng(seed)
    schema, width = config.schema, pair.backbone.hidden_dim
    lengths = [schema.chunk] * rows
    if isinstance(config.action_module, FlowMatchingModule):
        lengths = rng.integers(3, 40, rows).tolist()
    features = [rng.normal(size=(length, width)).astype(np.float32) for length in lengths]
    noise = rng.normal(size=(rows, *slot.module.sample_noise_shape)).astype(np.float32)
    state = rng.uniform(-1, 1, (rows, schema.state_dim)).astype(np.float32)
    from vla_platform.gpu_workers.features import stack_features

    with torch.no_grad():
        drawn = slot.module.eval().sample(
            stack_features([torch.from_numpy(one) for one in features], slot.module.feature_kind),
            torch.from_numpy(state),
            torch.from_numpy(noise),
        )
    return {
        "actions": drawn.actions.numpy(), "latent": drawn.latent.numpy(),
        "log_prob": drawn.log_prob.numpy(), "state": state,
        "feature": features, "value": drawn.value.numpy(),
        "advantages": rng.normal(size=(rows, schema.chunk)).astype(np.float32),
        "returns": rng.normal(size=rows).astype(np.float32),
        "trained": rng.random((rows, schema.chunk)) > 0.3,
        "is_transition": np.ones(rows, bool),
    }  # fmt: skip


def cut(pair: Pair, columns: dict[str, Any]) -> tuple[dict[str, Any], Source]:
    """What rank 0 has of a rollout, and where the other finds its part."""
    partition = pair.put(columns)
    metas = [RowMeta(row=at, tokens=len(one)) for at, one in enumerate(columns["feature"])]
    shares = [tuple(one.row for one in mine) for mine in assign(metas, num_ranks=2)]
    source = Source(
        partition_id=partition, tenant_id="a", columns=tuple(columns), rows=tuple(shares)
    )
    own = dict(pair.payloads.get(partition, "a", sorted(columns), shares[0]))
    return {**own, ROW: np.array(shares[0])}, source


@pytest.mark.parametrize(
    "algorithm",
    [
        PPOSpec(epochs=2, minibatches=3, entropy_weight=0.01),
        GRPOSpec(epochs=2, minibatches=2),
        AWRSpec(epochs=2, minibatches=2),
    ],
    ids=lambda one: one.kind,
)
@pytest.mark.parametrize(
    "module",
    [OFTModule(), FlowMatchingModule(chunk=4, hidden_dim=32, num_layers=2)],
    ids=lambda one: one.kind,
)
def test_an_update_from_stored_rows_is_the_same_on_two_ranks(
    pair: Pair, module: Any, algorithm: Any
) -> None:
    make = config_maker(pair.backbone)
    config = make("rl", module=module, algorithm=algorithm, optimizer=CALM)
    pair.mount(config)
    for seed in range(2):
        columns = rollout(pair, config, seed)
        own, source = cut(pair, columns)
        got = pair.both.train_policy(config.policy_key, own, source=source)
        wanted = pair.alone.train_policy(config.policy_key, columns)
        assert (got.step, got.num_rows, got.optimizer_steps, got.num_passes) == (
            wanted.step, wanted.num_rows, wanted.optimizer_steps, wanted.num_passes,
        )  # fmt: skip
        for name in ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm"):
            assert getattr(got, name) == pytest.approx(getattr(wanted, name), rel=1e-3, abs=1e-5)
    pair.assert_close(config.policy_key)
    pair.both.unmount(config.policy_key)


def test_an_update_that_stops_early_stops_on_both(pair: Pair) -> None:
    algorithm = PPOSpec(epochs=50, minibatches=1, target_kl=0.01)
    make = config_maker(pair.backbone)
    config = make("stops", algorithm=algorithm, optimizer=replace_lr(CALM, 0.03))
    pair.mount(config)
    columns = rollout(pair, config, 0)
    own, source = cut(pair, columns)
    got = pair.both.train_policy(config.policy_key, own, source=source)
    wanted = pair.alone.train_policy(config.policy_key, columns)
    assert (got.stopped_early, got.optimizer_steps) == (True, wanted.optimizer_steps)
    pair.assert_close(config.policy_key)
    pair.both.unmount(config.policy_key)


def replace_lr(spec: AdamWSpec, lr: float) -> AdamWSpec:
    return spec.model_copy(update={"lr": lr})


@pytest.mark.parametrize("row", range(4))
def test_nan_of_one_tenant_is_its_own_on_whatever_rank_f16(pair: Pair, row: int) -> None:
    make = config_maker(pair.backbone)
    bad, good = make("bad", optimizer=CALM), make("good", seed=1, optimizer=CALM)
    pair.mount(bad)
    pair.mount(good)
    columns, fine = make_columns(bad, 0, num=4), make_columns(good, 1, num=4)
    columns["actions"][row] = np.nan
    failed, done = pair.both.train_group([pair.item(bad, columns), pair.item(good, fine)])
    assert isinstance(failed, DataError)
    assert (failed.details["row"], failed.details["episode"]) == (row, row + 7)
    assert isinstance(done, TrainResult)
    pair.alone.train_batch(good.policy_key, fine)
    for config in (bad, good):  # the bad one is what it was
        pair.assert_close(config.policy_key)
        pair.both.unmount(config.policy_key)


@pytest.mark.parametrize("row", range(2))
def test_a_divergence_on_one_rank_ends_the_update_on_both(pair: Pair, row: int) -> None:
    make = config_maker(pair.backbone)
    config = make("diverges", algorithm=PPOSpec(epochs=1, minibatches=1), optimizer=CALM)
    pair.mount(config)
    columns = rollout(pair, config, 0, rows=2)
    columns["trained"][:] = True
    columns["log_prob"][row] = -1e30  # finite, its ratio is not
    columns["advantages"][row] = -1.0
    own, source = cut(pair, columns)
    with pytest.raises(DivergedError):
        pair.both.train_policy(config.policy_key, own, source=source)
    pair.assert_close(config.policy_key)
    pair.both.unmount(config.policy_key)


def test_rows_that_another_rank_does_not_find_are_lost_for_all(pair: Pair) -> None:
    config = config_maker(pair.backbone)("lost", optimizer=CALM)
    pair.mount(config)
    item = pair.item(config, make_columns(config, 0, num=4))
    assert item.source is not None
    pair.payloads.clear(item.source.partition_id, "a")
    [outcome] = pair.both.train_group([item])
    assert isinstance(outcome, PayloadNotFoundError)
    pair.assert_close(config.policy_key)
    pair.both.unmount(config.policy_key)


def test_a_slot_goes_on_where_it_was_with_masks_of_each_ranks_own(pair: Pair) -> None:
    """Dropout: two ranks are not one, but resumed they are what they would have been."""
    config = replace(tenants_of(pair.backbone)[1], optimizer=CALM)
    batches = [make_columns(config, seed, num=4) for seed in range(3)]
    pair.both.mount(config)
    for one in batches[:2]:
        pair.both.train_group([pair.item(config, one)])
    state = pair.both.save(config.policy_key)
    results = []
    for _ in range(2):
        pair.both.mount(config, state=state)
        pair.both.check_ranks(config.policy_key)
        pair.both.train_group([pair.item(config, batches[2])])
        pair.both.check_ranks(config.policy_key)
        results.append(pair.both.save(config.policy_key))
    for name, array in results[0].module.items():
        np.testing.assert_array_equal(results[1].module[name], array)
    assert results[0].scalars == results[1].scalars
    pair.both.unmount(config.policy_key)


def test_ranks_that_differ_publish_nothing(pair: Pair) -> None:
    config = config_maker(pair.backbone)("differs", optimizer=CALM)
    slot = pair.both.mount(config)
    with torch.no_grad():
        next(slot.module.parameters()).add_(1e-3)
    with pytest.raises(RankLostError, match="differ"):
        pair.both.check_ranks(config.policy_key)
    pair.both.unmount(config.policy_key)


class OnlyHere(tuple[str, ...]):
    """Parts of a module that are none where they are sent to."""

    def __reduce__(self) -> Any:
        return tuple, (("nothing",),)


def test_what_the_other_rank_cannot_mount_is_that_policys_error(pair: Pair) -> None:
    make = config_maker(pair.backbone)
    good = make("fits", optimizer=CALM)
    bad = make("fits-not", optimizer=CALM, trainable=OnlyHere(("head", "state_encoder")))
    pair.mount(good)
    with pytest.raises(ModuleLoadError, match="nothing"):
        pair.both.mount(bad)
    assert bad.policy_key not in pair.both.mounted
    columns = make_columns(good, 0, num=4)
    [done] = pair.both.train_group([pair.item(good, columns)])
    assert isinstance(done, TrainResult)
    pair.alone.train_batch(good.policy_key, columns)
    pair.assert_close(good.policy_key)
    pair.both.unmount(good.policy_key)
    assert pair.lost == []
