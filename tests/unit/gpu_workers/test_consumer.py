"""The consumer between a channel and an engine: every request answered once, failures alone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.waiting import wait_until
from vla_platform.client.inference import InferenceProxy
from vla_platform.envs.base import Observation
from vla_platform.errors import (
    DataError,
    DeadlineError,
    NotFoundError,
    PlatformError,
    PoisonError,
    QueueFullError,
    UnavailableError,
)
from vla_platform.gpu_workers.consumer import InferenceConsumer
from vla_platform.gpu_workers.group_batching import GroupBatching
from vla_platform.gpu_workers.inference import Outcome, RunCost, RunPart
from vla_platform.gpu_workers.items import BatchReport
from vla_platform.gpu_workers.sessions import SessionWindows
from vla_platform.inference.arena import ArenaReader
from vla_platform.inference.channel.memory import MemoryBroker, MemoryChannel, MemorySender
from vla_platform.inference.frames import PROTOCOL_VERSION, pack
from vla_platform.inference.protocol import (
    Prediction,
    PredictRequest,
    split_row,
)


@dataclass(frozen=True)
class Ready:
    tenant: str
    request: PredictRequest
    states: list[float]
    lane: str = "any"


def _frames(request: PredictRequest, pixels: Any) -> list[Any]:
    size = request.row.size_bytes
    return [pixels[at : at + size].copy() for at in range(0, len(pixels), size)]


class SumEngine:
    """Answers with the state's first number, the tenant's name length and the policy's."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.loading: dict[str, Future[Any]] = {}
        self.released = 0
        self.sessions = SessionWindows()
        self.prepared: list[tuple[str, list[float]]] = []
        self.entered: list[int] = []  # batch sizes, before they compute

    def prepare(
        self, tenant: str, client: str, request: PredictRequest, pixels: Any
    ) -> Ready | Future[Any]:
        if request.policy == "unknown":
            raise NotFoundError("no such policy")
        if request.policy in self.loading and not self.loading[request.policy].done():
            return self.loading[request.policy]
        if request.session is not None:
            frames = self.sessions.advance(
                tenant, client, request.session, _frames(request, pixels)
            )
            shown = sum(
                10.0**at * float(split_row(request.row, frame)[1][0])
                for at, frame in enumerate(reversed(frames))
            )
            return Ready(tenant, request, [shown])
        size = request.row.size_bytes
        rows = [pixels[at : at + size] for at in range(0, len(pixels), size)]
        states = [float(split_row(request.row, row)[1][0]) for row in rows]
        self.prepared.append((tenant, states))
        return Ready(tenant, request, states, lane="x" if request.policy == "other" else "any")

    def run(self, parts: Sequence[RunPart]) -> tuple[list[Outcome], RunCost]:
        self.entered.append(len(parts))
        self.gate.wait(20)
        ready: list[Ready] = [part.prepared for part in parts]
        self.batches.append([one.request.policy for one in ready])
        if any(one.request.policy == "bad" for one in ready):
            raise RuntimeError("a bad row")
        outcomes: list[Outcome] = []
        for one, part in zip(ready, parts, strict=True):
            rows = one.states[part.start : part.stop]
            values = [[[state, len(one.tenant)]] for state in rows]
            outcomes.append(
                Prediction(
                    actions=np.asarray(values, np.float32),
                    policy_version=1,
                    module_digest=one.tenant,
                    signature="s",
                )
            )
        return outcomes, RunCost(tokens={one.tenant: 1 for one in ready})

    def release(self, prepared: Ready) -> None:
        self.released += 1


def observation(state: float, *, size: int = 4) -> Observation:
    return Observation(
        {"top": np.zeros((size, size, 3), np.uint8)}, np.asarray([state], np.float32), "reach"
    )


@dataclass
class Bench:
    broker: MemoryBroker
    engine: SumEngine
    proxy: InferenceProxy
    reports: list[BatchReport]
    start: Callable[..., InferenceConsumer]
    consumers: list[InferenceConsumer]

    def predict(self, state: float, tenant: str = "acme", policy: str = "reach", **more: Any):
        return self.proxy.predict(observation(state), tenant=tenant, policy=policy, **more)


@pytest.fixture
def bench() -> Iterator[Bench]:
    broker, engine = MemoryBroker(), SumEngine()
    reports: list[BatchReport] = []
    consumers: list[InferenceConsumer] = []

    def start(
        *, claim_idle_s: float = 5.0, channel: MemoryChannel | None = None, **options: Any
    ) -> InferenceConsumer:
        consumer = InferenceConsumer(
            channel or MemoryChannel(broker, "base", claim_idle_s=claim_idle_s),
            engine,
            GroupBatching(max_samples=4, max_wait_s=0.005),
            observers=[reports.append],
            **options,
        )
        consumer.start()
        consumers.append(consumer)
        return consumer

    proxy = InferenceProxy(lambda client: MemorySender(broker, client), lambda t, p: "base")
    yield Bench(broker, engine, proxy, reports, start, consumers)
    engine.gate.set()
    proxy.close()
    for consumer in consumers:
        consumer.stop(grace_s=5.0)


def test_many_tenants_and_threads_each_get_their_own_answer(bench: Bench):
    bench.start()
    wrong = []

    def client(number: int) -> None:
        tenant = "t" * (number + 1)
        for state in range(20):
            found = bench.predict(state + 100 * number, tenant=tenant)
            if [[[state + 100 * number, number + 1]]] != found.actions.tolist():
                wrong.append((number, state))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    wait_until(lambda: bench.engine.released == 120)
    assert bench.broker.pending == {}


def test_asyncio_and_batched_calls_and_requests_larger_than_a_batch(bench: Bench):
    bench.start()

    async def run() -> list[Prediction]:
        calls = [
            bench.proxy.predict_async(
                [observation(10 * number + row) for row in range(number + 1)],
                tenant="acme",
                policy="reach",
            )
            for number in range(10)
        ]
        return await asyncio.gather(*calls)

    for number, found in enumerate(asyncio.run(run())):
        expected = [[[10 * number + row, 4]] for row in range(number + 1)]
        assert expected == found.actions.tolist()
    assert all(sum(report.samples.values()) <= 4 for report in bench.reports)


def test_one_bad_request_fails_alone(bench: Bench):
    """PF-14: the forward of a batch of four fails for one member only."""
    bench.engine.gate.clear()
    bench.start()
    first = bench.proxy.submit(observation(0), tenant="a", policy="reach")
    wait_until(lambda: len(bench.broker.pending) == 1)
    calls = [
        bench.proxy.submit(observation(n), tenant="a", policy="bad" if n == 2 else "reach")
        for n in range(4)
    ]
    bench.engine.gate.set()
    assert first.result(20).actions[0, 0, 0] == 0.0
    assert [calls[n].result(20).actions[0, 0, 0] for n in range(4) if n != 2] == [0.0, 1.0, 3.0]
    with pytest.raises(PlatformError, match="a bad row"):
        calls[2].result(20)


def test_unknown_policies_and_bad_observations_are_typed_errors_at_once(bench: Bench):
    """PF-17."""
    bench.start()
    with pytest.raises(NotFoundError):
        bench.predict(1, policy="unknown")
    nan = Observation({"top": np.zeros((4, 4, 3), np.uint8)}, np.float32([np.nan]), "x")
    with pytest.raises(DataError, match="finite"):
        bench.proxy.predict(nan, tenant="a", policy="reach")
    empty = Observation({"top": np.zeros((0, 0, 3), np.uint8)}, np.zeros(1, np.float32), "x")
    nameless = Observation({"top": np.zeros((4, 4, 3), np.uint8)}, np.zeros(1, np.float32), b"x")  # type: ignore[arg-type]
    for wrong in (empty, nameless, {"images": {}}):
        with pytest.raises(DataError):
            bench.proxy.predict(wrong, tenant="a", policy="reach")  # type: ignore[arg-type]
    for options in ({"timeout_s": np.nan}, {"timeout_s": np.inf}, {"sampel": True}, {"seed": 1.5}):
        with pytest.raises(DataError):
            bench.predict(1, **options)
    assert bench.predict(1, version=np.int64(2), seed=np.int64(3)).actions[0, 0, 0] == 1.0
    grey = Observation({"top": np.zeros((4, 4), np.uint8)}, np.zeros(1, np.float32), "x")
    with pytest.raises(DataError, match="uint8"):
        bench.proxy.predict(grey, tenant="a", policy="reach")


def test_a_policy_that_moved_to_another_base_model_is_looked_up_anew():
    broker, engine, moved = MemoryBroker(), SumEngine(), False
    with (
        InferenceProxy(
            lambda client: MemorySender(broker, client), lambda *_: "new" if moved else "base"
        ) as proxy,
        contextlib.ExitStack() as stack,
    ):
        for base in ("base", "new"):
            channel, policies = (
                MemoryChannel(broker, base),
                GroupBatching(max_samples=4, max_wait_s=0),
            )
            consumer = InferenceConsumer(channel, engine, policies)
            consumer.start()
            stack.callback(consumer.stop)
        asked = {"tenant": "acme", "policy": "unknown"}
        with pytest.raises(NotFoundError):
            proxy.predict(observation(1.0), **asked)
        moved = True
        with pytest.raises(NotFoundError):
            proxy.predict(observation(1.0), **asked)
        assert proxy._base_model("acme", "unknown") == "new"


def test_a_module_that_loads_holds_up_nobody_else(bench: Bench):
    bench.start()
    loading = bench.engine.loading["slow"] = Future()
    slow = bench.proxy.submit(observation(1), tenant="a", policy="slow")
    assert bench.predict(2).actions[0, 0, 0] == 2.0
    assert not slow.done()
    loading.set_result(None)
    assert slow.result(20).actions[0, 0, 0] == 1.0


def test_a_module_that_fails_to_load_is_the_requests_error(bench: Bench):
    bench.start()
    loading = bench.engine.loading["slow"] = Future()
    slow = bench.proxy.submit(observation(1), tenant="a", policy="slow")
    wait_until(lambda: len(bench.broker.pending) == 1)
    loading.set_exception(NotFoundError("gone"))
    with pytest.raises(NotFoundError, match="gone"):
        slow.result(20)


def overwrite_slot_of(bench: Bench, state: float) -> Future[Prediction]:
    """The only call under way is sent again without its slot, which another tenant's call gets."""
    (call,) = bench.proxy._calls.values()
    assert call.slot is not None
    arena, slot, generation = call.slot
    bench.proxy._inline_until[call.tenant, call.base_model] = time.monotonic() + 60
    call.sent = 0.0
    wait_until(lambda: call.slot is None)
    other = bench.proxy.submit(observation(state), tenant="other", policy="reach")
    wait_until(lambda: arena._generations[slot] > generation)
    return other


def test_a_request_whose_slot_went_to_another_tenant_is_still_answered_for_its_own(bench: Bench):
    """Whether it was at work then, or still on its way."""
    for start_first in (True, False):
        bench.engine.gate.clear()
        if start_first:
            bench.start()
        mine = bench.proxy.submit(observation(5), tenant="a", policy="reach")
        if start_first:
            wait_until(lambda: bool(bench.engine.entered))
        else:
            wait_until(lambda: bool(bench.broker.entries["base"]))
        other = overwrite_slot_of(bench, 9)
        if not start_first:
            bench.start()
        bench.engine.gate.set()
        assert mine.result(20).actions.tolist() == [[[5, 1]]]
        assert other.result(20).actions.tolist() == [[[9, 5]]]
        for consumer in bench.consumers:
            consumer.stop(grace_s=5.0)
        bench.consumers.clear()
        bench.proxy._inline_until.clear()
        bench.engine.entered.clear()


def test_a_request_that_waits_for_its_module_keeps_its_own_pixels(bench: Bench):
    bench.start()
    loading = bench.engine.loading["slow"] = Future()
    mine = bench.proxy.submit(observation(5), tenant="a", policy="slow")
    wait_until(lambda: len(bench.broker.pending) == 1)
    other = overwrite_slot_of(bench, 9)
    assert other.result(20).actions.tolist() == [[[9, 5]]]
    loading.set_result(None)
    assert mine.result(20).actions.tolist() == [[[5, 1]]]
    assert ("a", [9.0]) not in bench.engine.prepared


def test_a_large_request_in_parts_is_one_reply(bench: Bench):
    settled: list[tuple[int, int]] = []

    class Counting(MemoryChannel):
        def settle(self, replies: Any, done: Any) -> None:
            settled.append((len(replies), len(done)))
            super().settle(replies, done)

    consumer = bench.start(channel=Counting(bench.broker, "base"))
    rows = [observation(number) for number in range(10)]
    found = bench.proxy.predict(rows, tenant="a", policy="reach")
    assert found.actions[:, 0, 0].tolist() == list(range(10))
    consumer.stop(grace_s=5.0)
    assert settled == [(1, 1)]


def test_deadlines_expire_before_they_cost_a_forward(bench: Bench):
    bench.engine.gate.clear()
    bench.start()
    first = bench.proxy.submit(observation(0), tenant="a", policy="reach")
    wait_until(lambda: len(bench.broker.pending) == 1)
    with pytest.raises(DeadlineError):
        bench.predict(1, policy="late", timeout_s=0.2)
    bench.engine.gate.set()
    first.result(20)
    wait_until(lambda: not bench.broker.pending)
    assert bench.engine.batches == [["reach"]]


def test_without_a_worker_a_call_ends_by_its_timeout(bench: Bench):
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="inference worker"):
        bench.predict(1, timeout_s=0.3)
    assert time.monotonic() - began < 5.0


def test_a_full_queue_is_a_typed_refusal(bench: Bench):
    bench.broker.max_entries = 2
    calls = []
    for number in range(5):
        calls.append(bench.proxy.submit(observation(number), tenant="a", policy="reach"))
        wait_until(lambda: len(bench.broker.entries["base"]) >= min(2, len(calls)))
    with pytest.raises(QueueFullError):
        calls[-1].result(20)
    bench.start()
    assert calls[0].result(20).actions[0, 0, 0] == 0.0


def test_an_outage_of_the_broker_is_ridden_out_or_told(bench: Bench):
    bench.start()
    assert bench.predict(1).actions[0, 0, 0] == 1.0
    bench.broker.down = True
    with pytest.raises(UnavailableError):
        bench.predict(2, timeout_s=0.4)
    waiting = bench.proxy.submit(observation(3), tenant="a", policy="reach")
    bench.broker.down = False
    assert waiting.result(20).actions[0, 0, 0] == 3.0


def test_the_same_request_twice_is_answered_once(bench: Bench):
    """A client that sends again while the first is at work changes nothing."""
    bench.engine.gate.clear()
    bench.start()
    call = bench.proxy.submit(observation(5), tenant="a", policy="reach")
    wait_until(lambda: len(bench.broker.pending) == 1)
    for one in list(bench.proxy._calls.values()):
        one.sent = 0.0
    wait_until(lambda: len(bench.broker.pending) == 1 and not bench.broker.entries["base"])
    bench.engine.gate.set()
    assert call.result(20).actions[0, 0, 0] == 5.0
    wait_until(lambda: not bench.broker.pending)
    assert len(bench.engine.batches) == 1


def test_warm_shutdown_finishes_what_waits_and_another_worker_goes_on(bench: Bench):
    bench.engine.gate.clear()
    consumer = bench.start()
    calls = [bench.proxy.submit(observation(n), tenant="a", policy="reach") for n in range(10)]
    wait_until(lambda: consumer.num_waiting > 0)
    threading.Timer(0.05, bench.engine.gate.set).start()
    consumer.stop(grace_s=10.0)
    bench.start()
    assert list(range(10)) == [call.result(20).actions[0, 0, 0] for call in calls]
    assert [name for batch in bench.engine.batches for name in batch] == ["reach"] * 10


def test_what_cannot_be_finished_is_handed_back_at_once(bench: Bench):
    consumer = bench.start()
    bench.engine.loading["slow"] = Future()
    call = bench.proxy.submit(observation(7), tenant="a", policy="slow")
    wait_until(lambda: len(bench.broker.pending) == 1)
    consumer.stop(grace_s=1.0)
    del bench.engine.loading["slow"]
    bench.start(claim_idle_s=3600.0)
    assert call.result(20).actions[0, 0, 0] == 7.0


def test_what_ends_three_workers_is_set_aside(bench: Bench):
    """Poison: the fourth delivery is answered with an error and kept for the operator."""
    call = bench.proxy.submit(observation(7), tenant="a", policy="killer")
    broker = bench.broker
    wait_until(lambda: bool(broker.entries["base"]))
    channel = MemoryChannel(broker, "base", claim_idle_s=0.0)
    for attempt in range(1, 4):  # three workers take it and die
        taken = channel.receive(max_entries=9, timeout_s=1.0)
        assert [attempt] == [one.attempts for one in taken]
        time.sleep(0.001)
    bench.start(claim_idle_s=0.0)
    with pytest.raises(PoisonError):
        call.result(20)
    wait_until(lambda: len(broker.dead) == 1)
    assert bench.engine.batches == []


def test_a_hung_forward_ends_the_process(bench: Bench):
    hung = threading.Event()
    bench.engine.gate.clear()
    bench.start(watchdog_s=0.1, on_hang=hung.set)
    bench.proxy.submit(observation(1), tenant="a", policy="reach")
    assert hung.wait(20)


def test_a_worker_that_loses_a_thread_ends(bench: Bench):
    """PF-03: never alive and deaf."""

    class Broken(MemoryChannel):
        def receive(self, *, max_entries: int, timeout_s: float) -> list[Any]:
            raise RuntimeError("a bug")

    ended = threading.Event()
    consumer = InferenceConsumer(
        Broken(bench.broker, "base"),
        bench.engine,
        GroupBatching(max_samples=4, max_wait_s=0.005),
        on_hang=ended.set,
    )
    consumer.start()
    assert ended.wait(20)
    consumer.stop(grace_s=1.0)


def test_a_delivery_that_trips_the_worker_ends_nothing_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    """Whatever nobody thought of, in whatever part of it."""
    ended = threading.Event()
    consumer = bench.start(on_hang=ended.set)
    take = consumer._intake._take

    def trips(delivery: Any) -> None:
        if delivery.tenant == "evil":
            raise OverflowError("cannot convert float infinity to integer")
        take(delivery)

    monkeypatch.setattr(consumer._intake, "_take", trips)
    MemorySender(bench.broker, "f" * 32).send("evil", "base", b"anything")
    assert bench.predict(1).actions[0, 0, 0] == 1.0
    wait_until(lambda: len(bench.broker.dead) == 1)
    assert not ended.is_set()


def test_rubbish_on_the_stream_is_buried_and_serving_goes_on(bench: Bench):
    sender = MemorySender(bench.broker, "0" * 32)
    sender.send("a", "base", b"rubbish")
    empty = {"v": PROTOCOL_VERSION, "client": "0" * 32, "arena": None, "requests": []}
    sender.send("a", "base", pack(empty))
    refused = {**empty, "requests": [{"request_id": "x"}, 5]}
    sender.send("a", "base", pack(refused))
    bench.start()
    assert bench.predict(1).actions[0, 0, 0] == 1.0
    wait_until(lambda: not bench.broker.pending)
    assert len(bench.broker.dead) == 1


def test_pixels_of_another_host_travel_in_the_frame(bench: Bench, tmp_path: Path):
    """A worker that cannot open the arena says so, and the client sends the bytes."""
    bench.start(arenas=ArenaReader(folder=tmp_path))
    assert bench.predict(3).actions[0, 0, 0] == 3.0
    assert bench.predict(4).actions[0, 0, 0] == 4.0


def test_a_session_that_its_worker_lost_is_sent_whole(bench: Bench):
    """History deltas: one frame a step, and the whole window where the worker forgot it."""
    bench.start()
    seen = []
    for step in range(5):
        if step == 3:
            bench.engine.sessions = SessionWindows()
        found = bench.predict(step + 1, session="e", history=3)
        seen.append(int(found.actions[0, 0, 0]))
    assert seen == [111, 112, 123, 234, 345]


def test_reports_split_a_batch_by_tenant(bench: Bench):
    bench.engine.gate.clear()
    bench.start()
    calls = [bench.proxy.submit(observation(n), tenant="ab"[n % 2], policy="p") for n in range(4)]
    bench.engine.gate.set()
    for call in calls:
        call.result(20)
    wait_until(lambda: sum(sum(r.samples.values()) for r in bench.reports) == 4)
    total = {"a": 0, "b": 0}
    for report in bench.reports:
        for tenant, samples in report.samples.items():
            total[tenant] += samples
    assert total == {"a": 2, "b": 2}
