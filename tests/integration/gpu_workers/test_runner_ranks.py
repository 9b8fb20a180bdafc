"""A runner whose other ranks are lost, or do not answer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest

torch = pytest.importorskip("torch")

from tests.integration.conftest import Process  # noqa: E402
from tests.unit.gpu_workers.conftest import config_maker, make_columns  # noqa: E402
from tests.waiting import wait_until  # noqa: E402
from vla_platform.control.prepared import Prepared  # noqa: E402
from vla_platform.control.training_job import TrainingJob  # noqa: E402
from vla_platform.errors import RankLostError  # noqa: E402
from vla_platform.gpu_workers import runner as runners  # noqa: E402
from vla_platform.gpu_workers.backbone import Backbone  # noqa: E402
from vla_platform.gpu_workers.publication import Mounted  # noqa: E402
from vla_platform.gpu_workers.ranks.base import Ranks  # noqa: E402
from vla_platform.gpu_workers.ranks.commands import Command, Mount, TrainGroup, Unmount  # noqa: E402
from vla_platform.gpu_workers.runner import TrainingRunner  # noqa: E402
from vla_platform.gpu_workers.slot_state import SlotConfig  # noqa: E402
from vla_platform.gpu_workers.training import TrainingModelService  # noqa: E402
from vla_platform.specs import parse_spec  # noqa: E402

pytestmark = pytest.mark.services
BASE = "tiny-random"
T = TypeVar("T")
Start = Callable[..., TrainingRunner]


class Fading(Ranks):
    """Another rank that mounts what it is told to, and is then gone: rank 0 waits for `noticed`."""

    rank, num_ranks = 0, 2

    def __init__(self) -> None:
        self.led: list[type[Command]] = []
        self.noticed = threading.Event()

    @contextlib.contextmanager
    def lead(self, command: Callable[[], Command]) -> Iterator[list[Any]]:
        told = command()
        self.led.append(type(told))
        if not isinstance(told, Mount):
            assert self.noticed.wait(60)
            raise RankLostError("rank 1 is gone")
        yield [None]

    def exchange(self, value: T) -> list[T]:
        raise AssertionError("there is nobody")

    def add_up(self, numbers: torch.Tensor) -> None:
        raise AssertionError("there is nobody")

    def hand_out(self, numbers: torch.Tensor) -> None:
        return None


def job_of(config: SlotConfig) -> TrainingJob:
    return TrainingJob(
        job_id="j", workload="w", tenant_id="a", policy_key=config.policy_key, task_type="sft",
        lifecycle="live", base_model=BASE, schema_signature=config.schema.signature,
        partition_id="p", position=0, priority=0, state="leased", fence=1, attempt=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone.load(BASE)


@pytest.fixture
def start(some: Process, backbone: Backbone) -> Iterator[Start]:
    """A runner that has one policy in its slots; the ledger knows of none."""
    with contextlib.ExitStack() as stack:

        def started(ranks: Ranks, *, lease_s: float) -> TrainingRunner:
            settings = some.settings.model_copy(update={"lease_s": lease_s})
            service = TrainingModelService(backbone, ranks=ranks)
            config = config_maker(backbone)("a")
            service.mount(config)
            some.payloads.put("p", "a", make_columns(config, 0, num=4), ttl_s=600)
            found = TrainingRunner(replace(some, settings=settings), service, base_model=BASE)
            stack.callback(found.close)
            spec = parse_spec(
                {"kind": "sft", "policy": "task", "dataset": {"path": "x"}, "steps": 9}
            )
            prepared = Prepared(
                schema=config.schema, dataset_digest="", train_episodes=(), heldout_episodes=(),
                num_samples=4, num_heldout=0, statistics={}, action_module=config.action_module,
                normalization="min_max",
            )  # fmt: skip
            found._policies._mounted[config.policy_key] = Mounted(
                spec, prepared, job_of(config), parent=None, saved_step=0
            )
            return found

        yield started


def test_a_lost_rank_is_not_waited_for_again(start: Start, backbone: Backbone) -> None:
    """The worker ends; nobody is told to forget what nobody will train again."""
    ranks = Fading()
    ranks.noticed.set()
    runner = start(ranks, lease_s=60.0)
    with runner._training, pytest.raises(RankLostError):
        runner.train([job_of(config_maker(backbone)("a"))])
    assert ranks.led == [Mount, TrainGroup]


def test_the_heart_beats_while_another_rank_is_waited_for(
    start: Start, some: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is to free a slot and does not answer; the worker ends once it is lost."""
    ended: list[str] = []
    monkeypatch.setattr(runners, "end_process", lambda why, reason: ended.append(why))
    ranks = Fading()
    start(ranks, lease_s=0.6)
    wait_until(lambda: Unmount in ranks.led)
    for _ in range(2):
        some.ledger.client.delete("vla:bases")
        wait_until(lambda: BASE in some.ledger.base_models())
    assert ended == []
    ranks.noticed.set()
    wait_until(lambda: ended == ["rank_lost"])
