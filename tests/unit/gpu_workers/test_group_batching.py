"""The batching policy: order, bounds, starvation, deadlines (no clock, no thread)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_platform.gpu_workers.group_batching import Batch, GroupBatching

WAIT_S = 0.005
MAX = 8


@dataclass(frozen=True)
class Request:
    name: int
    lane: str = "a"
    sender: str = "s"
    num_samples: int = 1
    deadline: float = math.inf


def policy(*, quorum: bool = True, max_samples: int = MAX) -> GroupBatching[Request]:
    return GroupBatching(max_samples=max_samples, max_wait_s=WAIT_S, quorum=quorum)


def names(batch: Batch[Request] | None) -> list[int]:
    assert batch is not None
    return [part.request.name for part in batch.parts]


@dataclass(frozen=True)
class Event:
    """An arrival `after_s` the one before."""

    after_s: float
    request: Request


def arrivals() -> st.SearchStrategy[list[Event]]:
    one = st.builds(
        lambda after, lane, sender, size, patience: (after, lane, sender, size, patience),
        st.floats(0, 0.01),
        st.sampled_from("abc"),
        st.sampled_from(["x", "y", "z"]),
        st.integers(1, 20),
        st.one_of(st.just(math.inf), st.floats(0.001, 0.1)),
    )

    def number(items: list[tuple[float, str, str, int, float]]) -> list[Event]:
        now, events = 0.0, []
        for name, (after, lane, sender, size, patience) in enumerate(items):
            now += after
            events.append(Event(after, Request(name, lane, sender, size, now + patience)))
        return events

    return st.lists(one, max_size=40).map(number)


@dataclass
class Trace:
    """What a run of the policy with one device did."""

    batches: list[tuple[float, Batch[Request]]]
    expired: list[tuple[float, Request]]
    arrived: dict[int, float]


def drive(events: list[Event], *, forward_s: float, quorum: bool = True) -> Trace:
    """A device that takes a batch as soon as one is due, and works `forward_s` on it."""
    batching = policy(quorum=quorum)
    trace = Trace([], [], {})
    pending, now, free_at = list(events), 0.0, 0.0
    next_arrival = pending[0].after_s if pending else math.inf
    running: Batch[Request] | None = None
    for _ in range(10_000):
        if running is not None and now >= free_at:
            batching.finished(now)
            for part in running.parts:
                if part.is_last:
                    batching.answered(part.request, now)
            running = None
        while pending and next_arrival <= now:
            event = pending.pop(0)
            trace.arrived[event.request.name] = now
            batching.offer(event.request, now)
            next_arrival = next_arrival + pending[0].after_s if pending else math.inf
        if running is None:
            trace.expired += [(now, late) for late in batching.expire(now)]
            running = batching.take(now)
            if running is not None:
                trace.batches.append((now, running))
                free_at = now + forward_s
        due = batching.due(now)
        if not pending and running is None and due is None:
            return trace
        times = [next_arrival, free_at if running is not None else math.inf]
        if running is None and due is not None:
            times.append(max(due, now + 1e-6))
        now = min(times)
    raise AssertionError("the policy never came to rest")


@settings(deadline=None)
@given(arrivals(), st.floats(0.0005, 0.03), st.booleans())
def test_every_sample_runs_once_in_order_of_arrival_or_expires(
    events: list[Event], forward_s: float, quorum: bool
):
    trace = drive(events, forward_s=forward_s, quorum=quorum)
    ran: dict[int, list[int]] = {}
    last_of_lane: dict[str, int] = {}
    for _, batch in trace.batches:
        for part in batch.parts:
            assert part.request.lane == batch.lane
            ran.setdefault(part.request.name, []).extend(range(part.start, part.stop))
            assert last_of_lane.get(batch.lane, -1) <= part.request.name
            last_of_lane[batch.lane] = part.request.name
    expired = {late.name for _, late in trace.expired}
    for event in events:
        request = event.request
        found = ran.get(request.name, [])
        assert found == list(range(len(found)))
        if request.name not in expired:
            assert request.num_samples == len(found)


@settings(deadline=None)
@given(arrivals(), st.floats(0.0005, 0.03))
def test_a_batch_never_holds_more_than_the_limit(events: list[Event], forward_s: float):
    for _, batch in drive(events, forward_s=forward_s).batches:
        assert 1 <= batch.num_samples <= MAX


@settings(deadline=None)
@given(arrivals(), st.floats(0.0005, 0.03))
def test_nothing_runs_after_its_deadline(events: list[Event], forward_s: float):
    trace = drive(events, forward_s=forward_s)
    for at, batch in trace.batches:
        for part in batch.parts:
            assert part.request.deadline > at
    for at, late in trace.expired:
        assert late.deadline <= at


@settings(deadline=None)
@given(arrivals(), st.floats(0.0005, 0.02))
def test_no_request_waits_behind_an_incompatible_one_for_more_than_the_wait(
    events: list[Event], forward_s: float
):
    """Once a request has waited its time, only what came before it goes first."""
    trace = drive(events, forward_s=forward_s)
    for at, batch in trace.batches:
        arrived = trace.arrived[batch.parts[0].request.name]
        due = arrived + forward_s + WAIT_S + 1e-5
        for begun, other in trace.batches:
            if due < begun < at:
                assert trace.arrived[other.parts[0].request.name] <= arrived


def test_incompatible_neighbours_do_not_shrink_the_batches():
    """PF-13: two tenants' lanes alternate and each still fills its own batch."""
    batching = policy()
    for name in range(2 * MAX):
        batching.offer(Request(name, lane="ab"[name % 2]), 0.0)
    assert list(range(0, 2 * MAX, 2)) == names(batching.take(0.0))
    batching.finished(0.01)
    assert list(range(1, 2 * MAX, 2)) == names(batching.take(0.01))


def test_a_lone_client_never_waits():
    batching = policy()
    now = 0.0
    for name in range(20):
        batching.offer(Request(name), now)
        assert [name] == names(batching.take(now))
        now += 0.004
        batching.finished(now)
        batching.answered(Request(name), now)
        now += 0.001


def test_a_closed_loop_of_many_fills_its_batch():
    """Clients come back within the wait; the batch closes when the last one is there."""
    batching = policy()
    clients = [Request(number, sender=f"s{number}") for number in range(6)]
    for client in clients:
        batching.offer(client, 0.0)
    assert len(names(batching.take(0.0))) == 6
    now = 0.0
    for _ in range(10):
        now += 0.010
        batching.finished(now)
        for client in clients:
            batching.answered(client, now)
        for client in clients[:-1]:
            now += 0.0002
            batching.offer(client, now)
            assert batching.take(now) is None
        now += 0.0002
        batching.offer(clients[-1], now)
        assert len(names(batching.take(now))) == 6


def test_clients_that_think_long_hold_nobody_up():
    """A robot that moves for 40 ms between requests is not waited for."""
    batching = policy()
    now = 0.0
    for name in range(30):
        batching.offer(Request(name, sender="slow"), now)
        assert batching.take(now) is not None
        batching.finished(now + 0.005)
        batching.answered(Request(name, sender="slow"), now + 0.005)
        now += 0.045
    batching.offer(Request(99, sender="quick"), now - 0.039)
    assert names(batching.take(now - 0.039)) == [99]


def test_a_client_that_never_comes_back_costs_one_wait():
    batching = policy()
    batching.offer(Request(0, sender="gone"), 0.0)
    assert batching.take(0.0) is not None
    batching.finished(0.005)
    batching.answered(Request(0, sender="gone"), 0.005)
    batching.offer(Request(1, sender="here"), 0.006)
    due = batching.due(0.006)
    assert due is not None and due <= 0.006 + WAIT_S
    assert names(batching.take(due)) == [1]


def test_a_request_larger_than_a_batch_is_cut():
    batching = policy()
    batching.offer(Request(0, num_samples=2 * MAX + 3), 0.0)
    batching.offer(Request(1), 0.0)
    sizes = []
    while (batch := batching.take(0.0)) is not None:
        sizes.append([(part.request.name, part.start, part.stop) for part in batch.parts])
        batching.finished(0.0)
    assert sizes == [[(0, 0, 8)], [(0, 8, 16)], [(0, 16, 19), (1, 0, 1)]]


@pytest.mark.parametrize(("samples", "wait"), [(0, 0.1), (1, -1.0)])
def test_senseless_limits_are_refused(samples: int, wait: float):
    with pytest.raises(ValueError, match="sample"):
        GroupBatching[Request](max_samples=samples, max_wait_s=wait)
