"""What fails on one rank fails on all, is told by the one, and costs nobody else anything."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.unit.gpu_workers.conftest import config_maker, make_columns  # noqa: E402
from tests.unit.gpu_workers.test_training import MemoryLimit  # noqa: E402
from vla_platform.errors import PlatformError, RankFailedError  # noqa: E402
from vla_platform.gpu_workers.backbone import Backbone  # noqa: E402
from vla_platform.gpu_workers.ranks.commands import Source  # noqa: E402
from vla_platform.gpu_workers.ranks.memory import Meeting, MemoryRanks  # noqa: E402
from vla_platform.gpu_workers.ranks.state import PackedState  # noqa: E402
from vla_platform.gpu_workers.ranks.telling import explained  # noqa: E402
from vla_platform.gpu_workers.samples import ROW  # noqa: E402
from vla_platform.gpu_workers.slot_state import SlotConfig  # noqa: E402
from vla_platform.gpu_workers.training import TrainingModelService  # noqa: E402
from vla_platform.gpu_workers.training_items import TrainItem, TrainResult  # noqa: E402
from vla_storage.errors import CodedError  # noqa: E402

NUM = 4
Outcomes = list[TrainResult | CodedError]


@pytest.fixture
def configs(backbone: Backbone) -> list[SlotConfig]:
    make = config_maker(backbone)
    return [make("a"), make("b", seed=1)]


def items(configs: list[SlotConfig], rank: int) -> list[TrainItem]:
    """The odd rows are the other rank's."""
    rows = (tuple(range(0, NUM, 2)), tuple(range(1, NUM, 2)))
    source = Source(partition_id="p", tenant_id="t", columns=None, rows=rows)
    mine = list(rows[rank])
    return [
        TrainItem(
            config.policy_key,
            {
                **{k: v[mine] for k, v in make_columns(config, seed, num=NUM).items()},
                ROW: np.array(mine),
            },
            source=source,
        )
        for seed, config in enumerate(configs)
    ]


def on_both(
    backbone: Backbone,
    configs: list[SlotConfig],
    break_second: Callable[[TrainingModelService], Any] = lambda service: None,
) -> tuple[list[TrainingModelService], list[Outcomes]]:
    """One step of all on two ranks, of which the second may be broken; services and outcomes."""
    meeting = Meeting(2)
    services = [
        TrainingModelService(backbone, ranks=MemoryRanks(meeting, rank=rank)) for rank in (0, 1)
    ]
    for service in services:
        for config in configs:  # each builds its own: the seed makes them equal
            service._slots[config.policy_key] = service.build(config)
    break_second(services[1])
    with ThreadPoolExecutor(2) as pool:
        done = [
            pool.submit(service.train_group, items(configs, rank))
            for rank, service in enumerate(services)
        ]
        return services, [one.result() for one in done]


def params(service: TrainingModelService, config: SlotConfig) -> dict[str, Any]:
    return service.export_params(config.policy_key)


def test_sound_ranks_have_equal_outcomes_and_modules(
    backbone: Backbone, configs: list[SlotConfig]
) -> None:
    services, (first, second) = on_both(backbone, configs)
    for one, other in zip(first, second, strict=True):
        assert isinstance(one, TrainResult)
        assert isinstance(other, TrainResult)
        assert (one.loss, one.grad_norm, one.samples) == (other.loss, other.grad_norm, NUM)
    for config in configs:
        for name, array in params(services[0], config).items():
            np.testing.assert_array_equal(array, params(services[1], config)[name])


def test_f11_what_fills_one_ranks_memory_fails_alone(
    backbone: Backbone, configs: list[SlotConfig]
) -> None:
    """The group does not fit on one rank: both go on one by one. Then no batch fits."""
    _, (first, second) = on_both(backbone, configs, lambda one: MemoryLimit(one, NUM // 2))
    assert all(isinstance(one, TrainResult) for one in (*first, *second))
    _, (first, second) = on_both(backbone, configs, lambda one: MemoryLimit(one, 0))
    for one, other in zip(first, second, strict=True):
        assert isinstance(one, RankFailedError)
        assert "out of memory" in str(explained(one, [other]))


def test_a_rank_that_fails_in_its_update_gives_it_up_for_all(
    backbone: Backbone, configs: list[SlotConfig]
) -> None:
    """Nobody waits for it, nothing of it counts, and the next tenant's is as if alone."""

    def break_first_policy(service: TrainingModelService) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("no memory for this pass")

        service.slot(configs[0].policy_key).module.loss = fail  # type: ignore[assignment]

    services, (first, second) = on_both(backbone, configs, break_first_policy)
    assert isinstance(first[0], RankFailedError)
    assert isinstance(second[0], PlatformError)
    assert explained(first[0], [second[0]]) is second[0]  # type: ignore[list-item]
    fresh = TrainingModelService(backbone)
    fresh._slots = {configs[0].policy_key: fresh.build(configs[0])}
    for service in services:
        for name, array in params(fresh, configs[0]).items():
            np.testing.assert_array_equal(array, params(service, configs[0])[name])
    assert isinstance(first[1], TrainResult)
    assert isinstance(second[1], TrainResult)
    assert first[1].loss == second[1].loss


def test_who_only_heard_of_a_failure_tells_the_one_that_failed() -> None:
    heard, own = RankFailedError("another"), PlatformError("mine")
    assert explained(heard, [None, RankFailedError("also heard"), own]) is own
    assert explained(heard, [heard]) is heard
    assert explained(own, [PlatformError("other")]) is own


def test_a_slots_state_arrives_whole(backbone: Backbone, configs: list[SlotConfig]) -> None:
    service = TrainingModelService(backbone)
    service.mount(configs[0])
    service.train_batch(configs[0].policy_key, make_columns(configs[0], 0))
    state = service.save(configs[0].policy_key)
    packed = PackedState.of(state)
    found = PackedState(packed.data.clone(), packed.scalars).state()
    assert found.scalars == state.scalars
    for wanted, got in ((state.module, found.module), (state.optimizer, found.optimizer)):
        assert wanted.keys() == got.keys()
        for name in wanted:
            np.testing.assert_array_equal(wanted[name], got[name])
