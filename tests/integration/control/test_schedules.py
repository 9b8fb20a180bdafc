"""Schedules on a real Valkey: made at run time, fired once whoever looks, isolated from each
other (F71, B68, B72, PF-47, PF-48)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from tests.integration.conftest import Process
from vla_platform.client.schedules import Evaluation, ScheduleBook
from vla_platform.control import (
    dispatch,
    evaluation_jobs,
    schedule_firings,
    schedules,
    settlement,
)
from vla_platform.control.beat import IsolatedEntry, Scheduler
from vla_platform.control.evaluations import Outstanding
from vla_platform.control.schedule_policy import ScheduleState
from vla_platform.control.schedule_states import set_aside
from vla_platform.errors import ConflictError, NotFoundError, PlatformError, QuotaError, SpecError
from vla_platform.metrics.events import Emitter
from vla_platform.specs import canonical_json

pytestmark = pytest.mark.services


@pytest.fixture
def app(control_redis_url: str) -> Iterator[Celery]:
    found = Celery("test", broker=control_redis_url)
    found.conf.update(
        redbeat_redis_url=control_redis_url, redbeat_key_prefix="vla:beat:",
        redbeat_lock_timeout=6, beat_max_loop_interval=1, timezone="UTC",
        redbeat_redis_options={},
    )  # fmt: skip
    found.set_current()
    yield found
    found.close()


@pytest.fixture
def some(app: Celery, some: Process) -> Process:
    some.ledger.client.hset("vla:t:a:policies", "push", "tiny")
    some.ledger.publish_version("a/push", 7, base_model="tiny")
    return some


def schedule(name: str = "nightly", **changes: Any) -> str:
    evaluation = {"kind": "evaluation", "policy": "push", "suite": "tabletop/push", "episodes": 4}
    value = {"kind": "schedule", "name": name, "cron": "0 */6 * * *", "evaluation": evaluation}
    return canonical_json(value | changes).decode()


def add(some: Process, text: str | None = None) -> dict[str, Any]:
    return schedules.add(some, "a", text or schedule(), min_interval_s=300)


def state(some: Process, name: str = "nightly") -> ScheduleState:
    return ScheduleState.from_json(some.ledger.client.hget("vla:t:a:schedules", name))


def make_due(some: Process, name: str = "nightly", ago_s: float = 1.0) -> float:
    seconds, _ = some.ledger.client.time()
    due = float(seconds - ago_s)
    changed = replace(state(some, name), next_due=due)
    some.ledger.client.hset("vla:t:a:schedules", name, changed.to_json())
    some.ledger.client.zadd("vla:schedules", {f"a/{name}": due})
    return due


def test_it_is_shown_and_made_and_the_same_again_keeps_its_phase(
    some: Process, app: Celery
) -> None:
    answer = add(some)
    assert len(answer["next"]) == 10
    before = state(some)
    entry = IsolatedEntry.from_key("vla:beat:schedule:a:nightly", app=app)
    assert (entry.task, entry.kwargs) == (
        "control.look_at_schedule",
        {"tenant": "a", "name": "nightly"},
    )
    assert entry.schedule.minute == {0}
    add(some)
    assert state(some) == before
    with pytest.raises(ConflictError):
        add(some, schedule(cron="30 * * * *"))


@pytest.mark.parametrize(
    "changes",
    [
        {"cron": "* * * * *"},
        {"cron": "61 * * * *"},
        {"timezone": "Mars/X"},
        {"overlap": "sometimes"},
        {"name": "Night\u0663"},
        {"evaluation": {"policy": "push", "suite": "nowhere/at-all"}},
        {"evaluation": {"policy": "push", "suite": "tabletop/push", "episodes": True}},
    ],
)
def test_b67_b68_b70_bad_ones_leave_nothing(some: Process, changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        add(some, schedule(**changes))
    assert list(some.objects.list("a/")) == []
    assert not some.ledger.client.exists("vla:t:a:schedules", "vla:schedules")


def test_anothers_policy_and_an_unknown_one_are_the_same(some: Process) -> None:
    some.ledger.client.hset("vla:t:b:policies", "secret", "tiny")
    evaluation = {"policy": "secret", "suite": "tabletop/push"}
    with pytest.raises(NotFoundError):
        add(some, schedule(evaluation=evaluation))


def test_a_firing_resolves_the_version_once_and_happens_once(some: Process) -> None:
    add(some)
    due = make_due(some)
    threads = [
        threading.Thread(target=schedule_firings.look_at, args=(some, "a", "nightly"))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    schedule_firings.look_at_due(some)
    assert [one["version"] for one in some.sent] == [7]
    assert state(some).num_fired == 1
    evaluation_id = some.sent[0]["evaluation_id"]
    assert state(some).running == {evaluation_id: due}
    some.ledger.publish_version("a/push", 8, base_model="tiny")
    known = Outstanding.from_json(some.ledger.client.hget("vla:t:a:evaluations", evaluation_id))
    assert known.policy_version == 7
    schedule_firings.finished(some, "a", evaluation_id)
    schedule_firings.finished(some, "a", evaluation_id)
    assert (state(some).running, some.ledger.client.hlen("vla:t:a:evaluations")) == ({}, 0)


@pytest.mark.parametrize(("overlap", "sent"), [("skip", 1), ("queue", 2), ("allow", 2)])
def test_f71_an_evaluation_that_still_runs_at_the_next_tick(
    some: Process, overlap: str, sent: int
) -> None:
    add(some, schedule(overlap=overlap))
    make_due(some, ago_s=2)
    schedule_firings.look_at_due(some)
    make_due(some, ago_s=1)
    schedule_firings.look_at_due(some)
    first = some.sent[0]["evaluation_id"]
    schedule_firings.finished(some, "a", first)
    assert len(some.sent) == sent
    assert len({one["evaluation_id"] for one in some.sent}) == sent
    assert state(some).num_skipped == (1 if overlap == "skip" else 0)


def test_one_that_cannot_be_read_is_set_aside_and_the_others_fire(some: Process) -> None:
    for name in ("bad-state", "bad-spec", "good"):
        add(some, schedule(name))
        make_due(some, name)
    some.ledger.client.hset("vla:t:a:schedules", "bad-state", "{")
    some.objects.put("a/schedules/bad-spec.json", b'{"kind": "schedule"}')
    schedule_firings.look_at_due(some)
    assert [one["evaluation_id"].rpartition("-")[0] for one in some.sent] == ["good"]
    for name in ("bad-state", "bad-spec"):
        assert not state(some, name).enabled
        assert "cannot be read" in state(some, name).reason
    alerts = {e.values["schedule"] for e in some.emitter.events if e.values["state"] == "disabled"}
    assert alerts == {"bad-state", "bad-spec"}
    assert schedule_firings.look_at_due(some) == 0


def test_one_that_was_removed_meanwhile_is_not_set_aside(some: Process) -> None:
    """Its firing was on its way; what it left would keep the tenant's next one of that name."""
    set_aside(some, "a", "nightly", "its definition is gone")
    assert some.ledger.client.hlen("vla:t:a:schedules") == 0
    add(some)
    assert state(some).enabled


def test_beat_goes_on_beside_an_entry_that_it_cannot_decode(some: Process, app: Celery) -> None:
    add(some, schedule("one"))
    add(some, schedule("two"))
    client = some.ledger.client
    client.hset("vla:beat:schedule:a:one", "definition", "{broken")
    for name in ("one", "two"):
        client.zadd("vla:beat::schedule", {f"vla:beat:schedule:a:{name}": 1})
    beat = Scheduler(app=app, lazy=True)
    names = set(beat.schedule)
    assert "schedule:a:two" in names
    assert "schedule:a:one" not in names
    assert client.zscore("vla:beat::schedule", "vla:beat:schedule:a:one") is None


def test_pf47_a_leader_that_lost_its_lock_stops_instead_of_ticking(
    some: Process, app: Celery
) -> None:
    from redbeat.schedulers import acquire_distributed_beat_lock
    from redis.exceptions import LockError

    beat = Scheduler(app=app, lazy=True)
    acquire_distributed_beat_lock(SimpleNamespace(scheduler=beat))
    beat.tick()
    some.ledger.client.delete("vla:beat::lock")  # it slept longer than its lease
    with pytest.raises(LockError):
        beat.tick()


def test_pauses_removals_and_a_run_now(some: Process) -> None:
    add(some)
    assert schedules.change(some, "a", "nightly", "pause", "r-pause")["state"] == "paused"
    assert schedules.change(some, "a", "nightly", "pause", "r-pause")["state"] == "paused"
    assert schedule_firings.look_at_due(some) == 0
    assert schedules.change(some, "a", "nightly", "run-now", "r-run-now")["evaluation"]
    assert schedules.change(some, "a", "nightly", "resume", "r-resume")["state"] == "enabled"
    assert len(some.sent) == 1
    schedules.change(some, "a", "nightly", "remove", "r-remove")
    client = some.ledger.client
    assert not client.exists("vla:beat:schedule:a:nightly", "vla:t:a:schedules", "vla:schedules")
    for tenant, name in (("a", "nightly"), ("b", "nightly")):
        with pytest.raises(NotFoundError):
            schedules.change(some, tenant, name, "pause", "r-pause")


def test_a_run_now_runs_once_for_each_request(some: Process) -> None:
    """A client sends again when its connection was lost; the first may be under way still."""
    add(some)
    found: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(
                schedules.change(some, "a", "nightly", "run-now", "r1")["evaluation"]
            )
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(set(found)), len(found), len(some.sent)) == (1, 6, 1)
    assert (1, found[0]) == (state(some).num_fired, some.sent[0]["evaluation_id"])
    second = schedules.change(some, "a", "nightly", "run-now", "r2")["evaluation"]
    assert ([found[0], second], 2) == (
        [one["evaluation_id"] for one in some.sent], len(state(some).running),
    )  # fmt: skip


def test_a_policy_without_a_version_counts_as_failed_and_goes_on(some: Process) -> None:
    some.ledger.client.hset("vla:t:a:policies", "fresh", "tiny")
    evaluation = {"policy": "fresh", "suite": "tabletop/push"}
    add(some, schedule(evaluation=evaluation))
    make_due(some)
    schedule_firings.look_at_due(some)
    found = state(some)
    assert (found.num_failed, found.enabled) == (1, True)
    assert "no published version" in found.last_error


def test_what_was_sent_and_not_heard_of_is_sent_again_and_given_up(
    some: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(some)
    make_due(some)
    schedule_firings.look_at_due(some)
    assert settlement.resend_lost(some, "a") == 0
    monkeypatch.setattr(settlement, "RESEND_S", 0.0)
    for _ in range(4):
        settlement.resend_lost(some, "a")
    assert len(some.sent) == settlement.MOST_SENDS
    assert "no end after" in state(some).last_error
    assert state(some).running == {}


def test_a_lost_redis_gets_its_schedules_back(some: Process, app: Celery) -> None:
    add(some)
    some.objects.put("a/schedules/broken.json", b"{")
    some.ledger.client.flushall()
    some.ledger.load()
    assert schedules.restore(some, "a") == 1
    assert schedules.restore(some, "a") == 0
    assert state(some).enabled
    assert not state(some, "broken").enabled
    assert json.loads(some.ledger.client.hget("vla:beat:schedule:a:nightly", "definition"))


def evaluation(**changes: Any) -> str:
    return canonical_json(
        {"policy": "push", "suite": "tabletop/push", "episodes": 4} | changes
    ).decode()


def test_an_evaluation_asked_for_once_begins_once(some: Process) -> None:
    first = evaluation_jobs.evaluate(some, "a", evaluation(), "request-1")
    assert evaluation_jobs.evaluate(some, "a", evaluation(), "request-1") == first
    other = evaluation_jobs.evaluate(some, "a", evaluation(), "request-2")
    assert first["policy_version"] == 7
    known = some.ledger.client.hgetall("vla:t:a:evaluations")
    assert set(known) == {first["evaluation"], other["evaluation"]}
    schedule_firings.finished(some, "a", first["evaluation"])  # it has no schedule
    assert set(some.ledger.client.hgetall("vla:t:a:evaluations")) == {other["evaluation"]}


def test_an_evaluation_that_cannot_be_leaves_nothing(
    some: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    some.ledger.client.hset("vla:t:a:policies", "unpublished", "tiny")
    for wrong, error in (
        ({"suite": "nowhere/at-all"}, SpecError),
        ({"episodes": 0}, SpecError),
        ({"policy": "nobodys"}, NotFoundError),
        ({"policy": "unpublished"}, NotFoundError),
    ):
        with pytest.raises(error):
            evaluation_jobs.evaluate(some, "a", evaluation(**wrong), "request-1")
    monkeypatch.setattr(evaluation_jobs, "MOST_OUTSTANDING", 0)
    with pytest.raises(QuotaError):
        evaluation_jobs.evaluate(some, "a", evaluation(), "request-1")
    assert not some.ledger.client.exists("vla:t:a:evaluations")


class Book(ScheduleBook):
    """What a client of tenant `a` reads, on the same servers."""

    def __init__(self, some: Process) -> None:
        self.tenant = "a"
        self._connection = SimpleNamespace(redis=some.ledger.client, objects=some.objects)  # type: ignore[assignment]


def test_an_evaluation_that_fails_is_told_and_not_waited_for(some: Process) -> None:
    begun = evaluation_jobs.evaluate(some, "a", evaluation(), "request-1")["evaluation"]
    waiting = Evaluation(begun, 7, 4, Book(some))
    with pytest.raises(TimeoutError, match="goes on"):
        waiting.result(0.02, poll_s=0.01)
    emitter = Emitter(some.ledger.client)
    failing = replace(some, emitter=emitter)
    schedule_firings.finished(failing, "a", begun, error="the simulator has no GPU")
    emitter.close()
    with pytest.raises(PlatformError, match="has failed: the simulator has no GPU"):
        waiting.result(20, poll_s=0.01)


def test_an_evaluation_that_could_not_be_sent_is_sent_by_the_reconciler(
    some: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "evaluate", lambda **_: False)  # the broker is away
    begun = evaluation_jobs.evaluate(some, "a", evaluation(), "request-1")["evaluation"]
    monkeypatch.undo()
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(dispatch, "evaluate", lambda **given: sent.append(given) or True)
    assert settlement.resend_lost(some, "a") == 1
    assert [one["evaluation_id"] for one in sent] == [begun]
    assert settlement.resend_lost(some, "a") == 0
