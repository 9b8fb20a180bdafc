"""What fails on one rank fails on all, is told by the one, and costs nobody else anything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.unit.gpu_workers.conftest import config_maker, make_columns  # noqa: E402
from tests.unit.gpu_workers.test_training import MemoryLimit  # noqa: E402
from vla_platform.errors import (  # noqa: E402
    ModuleLoadError,
    PlatformError,
    RankFailedError,
    RankLostError,
)
from vla_platform.gpu_workers import group_training  # noqa: E402
from vla_platform.gpu_workers.backbone import Backbone  # noqa: E402
from vla_platform.gpu_workers.ranks.commands import Command, Source  # noqa: E402
from vla_platform.gpu_workers.ranks.follower import Follower  # noqa: E402
from vla_platform.gpu_workers.ranks.memory import Meeting, MemoryRanks  # noqa: E402
from vla_platform.gpu_workers.ranks.state import PackedState  # noqa: E402
from vla_platform.gpu_workers.ranks.telling import explained  # noqa: E402
from vla_platform.gpu_workers.samples import ROW  # noqa: E402
from vla_platform.gpu_workers.slot_state import SlotConfig  # noqa: E402
from vla_platform.gpu_workers.slots import _Descent  # noqa: E402
from vla_platform.gpu_workers.training import TrainingModelService  # noqa: E402
from vla_platform.gpu_workers.training_items import TrainItem, TrainResult  # noqa: E402
from vla_storage.errors import CodedError  # noqa: E402
from vla_storage.payloads import MemoryPayloadStore  # noqa: E402

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


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("no memory for this")


def test_a_rank_that_fails_after_the_sum_is_lost(
    backbone: Backbone, configs: list[SlotConfig]
) -> None:
    """The other has taken the step: nothing that both train from here on would be right."""

    def break_optimizer(service: TrainingModelService) -> None:
        service.slot(configs[0].policy_key)._optimizer.step = fail

    with pytest.raises(RankLostError, match="other ranks have taken"):
        on_both(backbone, configs[:1], break_optimizer)


@pytest.mark.parametrize(("num_ranks", "kind"), [(1, RuntimeError), (2, RankLostError)])
def test_so_is_one_whose_step_of_an_rl_update_fails(
    backbone: Backbone, configs: list[SlotConfig], num_ranks: int, kind: type[Exception]
) -> None:
    ranks = MemoryRanks(Meeting(num_ranks), rank=0)
    slot = TrainingModelService(backbone, ranks=ranks).build(configs[0])
    slot._optimizer.step = fail
    with pytest.raises(kind):
        _Descent(slot).step()


def test_only_who_sums_gradients_has_a_buffer_for_them(
    backbone: Backbone, configs: list[SlotConfig]
) -> None:
    services, _ = on_both(backbone, configs[:1])
    for service in services:
        assert service.slot(configs[0].policy_key)._sum._buffer is not None
        assert service.build(configs[0])._sum._buffer is None


def test_a_rank_without_room_for_the_sum_gives_the_step_up_for_all(
    backbone: Backbone, configs: list[SlotConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room once its gradients are gone."""

    def break_buffer(service: TrainingModelService) -> None:
        gradients = service.slot(configs[0].policy_key)._sum
        emptied = gradients._emptied

        def full() -> Any:
            if any(parameter.grad is not None for parameter in gradients._parameters):
                fail()
            return emptied()

        monkeypatch.setattr(gradients, "_emptied", full)

    _, ([first], [second]) = on_both(backbone, configs[:1], break_buffer)
    assert isinstance(first, RankFailedError)
    assert "no memory for this" in str(second)


def test_an_error_beside_a_success_is_a_lost_rank(
    backbone: Backbone, configs: list[SlotConfig]
) -> None:
    _, ([done], _) = on_both(backbone, configs[:1])
    assert explained(done, [None, None]) is done
    with pytest.raises(RankLostError, match="mine"):
        explained(done, [None, PlatformError("mine")])


def test_nobody_waits_for_the_sum_of_a_batch_that_has_none(
    backbone: Backbone, configs: list[SlotConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is padding on all ranks: there is no step that could fail on one of them."""
    monkeypatch.setattr(group_training, "samples_of", fail)
    made = make_columns

    def padded(*args: Any, **kwargs: Any) -> Any:
        found = made(*args, **kwargs)
        return found | {"actions_is_pad": np.ones_like(found["actions_is_pad"])}

    monkeypatch.setitem(globals(), "make_columns", padded)
    _, outcomes = on_both(backbone, configs)
    for one in (*outcomes[0], *outcomes[1]):
        assert isinstance(one, TrainResult), one
        assert (one.skipped, one.step, one.samples) == (True, 1, NUM)


class Led(MemoryRanks):
    """Rank 0, whose commands `follower` does in a thread."""

    follower: Follower

    @contextlib.contextmanager
    def lead(self, command: Callable[[], Command]) -> Iterator[list[Any]]:
        answers: list[Any] = []
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.follower.do, "base", command())
            yield answers
            answers.append(answer.result())


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ModuleLoadError("no such part")])
def test_what_another_rank_cannot_mount_is_mounted_on_none(
    backbone: Backbone, configs: list[SlotConfig], error: Exception
) -> None:
    """It costs that policy, and nobody else's is gone."""
    meeting = Meeting(2)
    first, second = Led(meeting, rank=0), MemoryRanks(meeting, rank=1)
    leading = TrainingModelService(backbone, ranks=first)
    following = TrainingModelService(backbone, ranks=second)
    first.follower = Follower({"base": following}, MemoryPayloadStore(), rank=1)
    bad, good = configs
    leading.mount(good)
    build = following.build

    def fail_once(*_: Any, **__: Any) -> Any:
        following.build = build  # type: ignore[method-assign]
        raise error

    for was_mounted in (False, True):
        if was_mounted:
            leading.mount(bad)
        following.build = fail_once  # type: ignore[method-assign]
        with pytest.raises(PlatformError, match=str(error)):
            leading.mount(bad)
        assert leading.mounted == following.mounted == (good.policy_key,)
    leading.check_ranks(good.policy_key)


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
