"""The ledger on a real Valkey: every accepted run ends, every position takes effect once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vla_platform.control.leases import Keeper, alone
from vla_platform.control.ledger import Ledger
from vla_platform.control.ledger_functions import library_source
from vla_platform.control.states import JOB_TRANSITIONS, WORKLOAD_TRANSITIONS, JobState, tables
from vla_platform.control.training_job import TrainingJob
from vla_platform.control.workloads import workload_id
from vla_platform.errors import (
    ConflictError,
    IllegalTransitionError,
    LeaseLostError,
    NotFoundError,
    QuotaError,
    UnavailableError,
)

BASE = "tiny"
LONG_S = 60.0
EXPIRED_S = 0.001


@pytest.fixture
def ledger(control_redis_url: str) -> Iterator[Ledger]:
    ledger = Ledger.connect(control_redis_url)
    ledger.load()
    ledger.register_base_model(BASE, {})
    yield ledger
    ledger.close()


def fields(tenant: str = "a", policy: str = "pick", **changes: Any) -> dict[str, Any]:
    return {
        "tenant": tenant, "policy": policy, "policy_key": f"{tenant}/{policy}", "kind": "sft",
        "base_model": BASE, "schema_signature": "s" * 64, "spec_digest": "d" * 64, "priority": 0,
        "max_in_flight": 4, **changes,
    }  # fmt: skip


def start(ledger: Ledger, name: str, *, positions: int = 3, **changes: Any) -> str:
    ledger.submit(name, fields(**changes), max_pending=100)
    ledger.prepared(name, total_positions=positions, total_steps=positions)
    assert ledger.admit(name, max_running=10) == "running"
    return name


def produce(ledger: Ledger, name: str) -> TrainingJob:
    job = ledger.reserve(name, lease_s=LONG_S)
    assert isinstance(job, TrainingJob)
    ledger.mark(job, JobState.READY, sample_count=8, domain="train")
    return job


def lease(ledger: Ledger, worker: str = "w1", *, most: int = 8, lease_s: float = LONG_S):
    return ledger.lease_group(worker, BASE, max_jobs=most, lease_s=lease_s)


def step(ledger: Ledger, job: TrainingJob) -> None:
    ledger.complete(job, step=job.position + 1, result={"loss": 0.5})


def passed(seconds: float = 0.02) -> None:
    """Wait until a lease of `EXPIRED_S` is over on any clock."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_run_goes_from_pending_to_succeeded(ledger: Ledger):
    start(ledger, "r", positions=2)
    for _ in range(2):
        produce(ledger, "r")
        (job,) = lease(ledger)
        step(ledger, job)
    with pytest.raises(IllegalTransitionError, match="durable"):
        ledger.finish("r")
    ledger.checkpointed("r", position=2, checkpoint="pick/r/2", step=2)
    ledger.finish("r")
    assert ledger.workload("r")["state"] == "succeeded"
    assert list(ledger.steps("r")) == [1, 2]
    history = [json.loads(line)["state"] for line in ledger.client.lrange("vla:w:r:history", 0, -1)]
    assert history == ["pending", "running", "succeeded"]
    assert {("p-r-0-0", "a"), ("p-r-1-0", "a")} == set(ledger.take_cleared())


def test_submit_is_idempotent_and_a_changed_payload_conflicts_b07_b08(ledger: Ledger):
    assert ledger.submit("r", fields(), max_pending=9)
    assert not ledger.submit("r", fields(), max_pending=9)
    with pytest.raises(ConflictError):
        ledger.submit("r", fields(spec_digest="e" * 64), max_pending=9)
    assert workload_id("a", "sft", "k") == workload_id("a", "sft", "k")
    assert workload_id("a", "sft", "k") != workload_id("ab", "sft", "k")


def test_one_tenants_flood_meets_its_own_quota_b25(ledger: Ledger):
    for number in range(3):
        ledger.submit(f"r{number}", fields(policy=f"p{number}"), max_pending=3)
    with pytest.raises(QuotaError):
        ledger.submit("r3", fields(policy="p3"), max_pending=3)
    assert ledger.submit("other", fields(tenant="b"), max_pending=3)


def test_a_policy_has_one_running_workload(ledger: Ledger):
    start(ledger, "r1")
    ledger.submit("r2", fields(), max_pending=9)
    ledger.prepared("r2", total_positions=1, total_steps=1)
    assert ledger.admit("r2", max_running=9) == "waits: r1 trains this policy"
    ledger.cancel("r1")
    assert ledger.admit("r2", max_running=9) == "running"


def test_the_in_flight_limit_holds(ledger: Ledger):
    start(ledger, "r", positions=9, max_in_flight=2)
    produce(ledger, "r")
    produce(ledger, "r")
    assert ledger.reserve("r", lease_s=1) == "in-flight limit"


def test_higher_priority_first_then_first_ready_first(ledger: Ledger):
    for name, priority in (("low1", 0), ("high", 5), ("low2", 0)):
        start(ledger, name, policy=name, priority=priority)
        produce(ledger, name)
    assert [job.workload for job in lease(ledger)] == ["high", "low1", "low2"]


def test_a_group_holds_each_policy_once_and_in_order(ledger: Ledger):
    start(ledger, "r1", policy="p1")
    start(ledger, "r2", policy="p2", tenant="b")
    for name in ("r1", "r1", "r2"):
        produce(ledger, name)
    group = lease(ledger)
    assert [(job.workload, job.position) for job in group] == [("r1", 0), ("r2", 0)]
    assert lease(ledger) == []
    step(ledger, group[0])
    assert [(job.workload, job.position) for job in lease(ledger)] == [("r1", 1)]


def test_a_slot_belongs_to_one_worker_until_its_lease_ends(ledger: Ledger):
    start(ledger, "r")
    produce(ledger, "r")
    produce(ledger, "r")
    (job,) = lease(ledger, "w1", lease_s=LONG_S)
    assert job.mount
    step(ledger, job)
    assert lease(ledger, "w2") == []
    (again,) = lease(ledger, "w1", lease_s=EXPIRED_S)
    assert not again.mount
    passed()
    ledger.due()
    (taken,) = lease(ledger, "w2")
    assert taken.mount
    assert taken.slot_fence > again.slot_fence
    with pytest.raises(LeaseLostError):
        step(ledger, again)


def test_rewind_redoes_what_died_with_its_worker_f05(ledger: Ledger):
    start(ledger, "r", positions=3)
    for _ in range(3):
        produce(ledger, "r")
    for _ in range(2):
        (job,) = lease(ledger, "w1", lease_s=EXPIRED_S)
        step(ledger, job)
    passed()
    (job,) = lease(ledger, "w2")
    assert ledger.rewind(job, position=1, step=1)
    assert list(ledger.steps("r")) == [1]
    with pytest.raises(LeaseLostError):
        step(ledger, job)
    for _ in range(2):
        produce(ledger, "r")
        (job,) = lease(ledger, "w2")
        step(ledger, job)
    assert list(ledger.steps("r")) == [1, 2, 3]


def test_work_that_kills_its_worker_stops_after_three_attempts_f13_pf09(ledger: Ledger):
    start(ledger, "poison", policy="p1")
    start(ledger, "good", policy="p2")
    produce(ledger, "poison")
    produce(ledger, "good")
    both = lease(ledger, "w0", lease_s=EXPIRED_S)
    assert {"poison", "good"} == {job.workload for job in both}
    alone: list[set[str]] = []
    for attempt in range(1, 8):
        passed()
        ledger.due()
        group = lease(ledger, f"w{attempt}", lease_s=EXPIRED_S)
        alone.append({job.workload for job in group})
        for job in group:
            if job.workload == "good":
                step(ledger, job)
    assert all(len(names) <= 1 for names in alone)
    assert alone.count({"poison"}) == 2
    assert ledger.workload("poison")["state"] == "failed"
    assert json.loads(ledger.workload("poison")["reason"])["code"] == "poison"
    assert ledger.workload("good")["state"] == "running"


def test_a_silent_producer_loses_its_reservation(ledger: Ledger):
    start(ledger, "r")
    late = ledger.reserve("r", lease_s=EXPIRED_S)
    assert isinstance(late, TrainingJob)
    passed()
    again = ledger.reserve("r", lease_s=LONG_S)
    assert isinstance(again, TrainingJob)
    assert (late.job_id, late.fence + 1) == (again.job_id, again.fence)
    with pytest.raises(LeaseLostError):
        ledger.mark(late, JobState.READY, sample_count=1, domain="train")
    ledger.mark(again, JobState.READY, sample_count=1, domain="train")


def test_a_position_that_ends_its_producers_is_set_aside_at_the_third(ledger: Ledger):
    start(ledger, "r")
    for _ in range(3):
        assert isinstance(ledger.reserve("r", lease_s=EXPIRED_S), TrainingJob)
        passed()
    assert ledger.reserve("r", lease_s=LONG_S) == "failed"
    reason = json.loads(ledger.workload("r")["reason"])
    assert (reason["code"], "3 times" in reason["message"]) == ("poison", True)


def test_a_reservation_given_back_counts_no_attempt(ledger: Ledger):
    """A payload store that is full, or down, is not the run's fault."""
    start(ledger, "r")
    fences = []
    for _ in range(8):
        job = ledger.reserve("r", lease_s=LONG_S)
        assert isinstance(job, TrainingJob)
        fences.append(job.fence)
        ledger.release(job)
        with pytest.raises(LeaseLostError):
            ledger.release(job)
    assert fences == list(range(1, 9))
    assert ledger.due().produce == ("r",)


def test_cancel_is_final_and_repeatable_pf07_b72(ledger: Ledger):
    start(ledger, "r")
    produce(ledger, "r")
    (job,) = lease(ledger)
    assert ledger.cancel("r") == "cancelled"
    assert ledger.cancel("r") == "cancelled"
    assert ledger.fail("r", {"code": "late"}) == "cancelled"
    assert [job.job_id] == ledger.heartbeat("w1", lease_s=LONG_S, jobs=(job.job_id,))
    with pytest.raises(LeaseLostError):
        step(ledger, job)
    assert ledger.reserve("r", lease_s=1) == "cancelled"
    with pytest.raises(NotFoundError):
        ledger.cancel("unknown")


def test_a_death_between_last_step_and_checkpoint_is_redone(ledger: Ledger):
    start(ledger, "r", positions=1)
    produce(ledger, "r")
    (job,) = lease(ledger, "w1", lease_s=EXPIRED_S)
    step(ledger, job)
    passed()
    assert ledger.due().stranded == ("r",)
    assert ledger.fall_back("r") is True
    assert ledger.fall_back("r") is False
    assert ledger.due().produce == ("r",)
    assert ledger.workload("r")["position"] == "0"
    assert ledger.steps("r") == {}


def test_a_worker_that_leaves_gives_its_slots_back_at_once_f08(ledger: Ledger):
    start(ledger, "r")
    for _ in range(2):
        produce(ledger, "r")
    (job,) = lease(ledger, "w1")
    step(ledger, job)
    assert lease(ledger, "w2") == []
    assert ledger.leave("w1") == 1
    (job,) = lease(ledger, "w2")
    assert job.mount


def test_a_heartbeat_keeps_only_what_the_worker_says_it_works_on(ledger: Ledger):
    """A job that its live worker dropped comes back by itself."""
    start(ledger, "r")
    produce(ledger, "r")
    (job,) = lease(ledger, "w1", lease_s=EXPIRED_S)
    assert ledger.heartbeat("w1", lease_s=LONG_S, jobs=(job.job_id,)) == []
    passed()
    ledger.due()
    assert lease(ledger, "w1") == []
    ledger.client.zadd("vla:leases", {job.job_id: 0})
    assert ledger.heartbeat("w1", lease_s=LONG_S) == []
    ledger.due()
    (again,) = lease(ledger, "w1")
    assert (job.job_id, 2) == (again.job_id, again.attempt)


def test_one_slot_can_be_given_back_alone(ledger: Ledger):
    for name in ("r1", "r2"):
        start(ledger, name, policy=name)
        produce(ledger, name)
    lease(ledger, "w1")
    assert ledger.leave("w1", "a/r1") == 1
    assert ledger.client.hget("vla:policy:a/r1", "slot_owner") is None
    assert ledger.client.hget("vla:policy:a/r2", "slot_owner") == "w1"


def test_the_higher_priority_is_admitted_first_then_the_earlier(ledger: Ledger):
    for name, priority in (("b", 0), ("a", 0), ("urgent", 9)):
        ledger.submit(name, fields(policy=name, priority=priority), max_pending=9)
        ledger.prepared(name, total_positions=1, total_steps=1)
        passed(0.003)
    assert ledger.due().admit == ("urgent", "b", "a")


def test_a_run_over_its_time_limit_fails(ledger: Ledger):
    start(ledger, "slow", policy="p1", max_seconds=0.001)
    start(ledger, "free", policy="p2", max_seconds=0)
    passed()
    ledger.due()
    assert json.loads(ledger.workload("slow")["reason"])["code"] == "time_limit"
    assert ledger.workload("free")["state"] == "running"


def test_lost_samples_are_produced_again_f36(ledger: Ledger):
    start(ledger, "r")
    produce(ledger, "r")
    (job,) = lease(ledger)
    assert not ledger.rewind(job, position=0, step=0)
    assert ledger.rewind(job, position=0, step=0, samples_lost=True)
    assert produce(ledger, "r").job_id == "r-0-1"


def test_released_work_counts_no_attempt_f08(ledger: Ledger):
    start(ledger, "r")
    produce(ledger, "r")
    for _ in range(5):
        (job,) = lease(ledger)
        ledger.release(job)
    (job,) = lease(ledger)
    assert job.attempt == 1


def test_the_reaper_names_what_no_message_carries(ledger: Ledger):
    ledger.submit("new", fields(policy="new"), max_pending=9)
    start(ledger, "r")
    due = ledger.due()
    assert (due.prepare, due.produce) == (("new",), ("r",))
    produce(ledger, "r")
    assert ledger.due().train == (BASE,)


def test_the_library_loads_itself_after_a_server_without_it(ledger: Ledger):
    ledger.client.function_flush()
    assert ledger.submit("r", fields(), max_pending=9)
    assert "@TABLES@" not in library_source()


def test_state_tables_are_closed():
    assert {str(state) for state in WORKLOAD_TRANSITIONS} == set(tables()["workload"])
    for table in (WORKLOAD_TRANSITIONS, *JOB_TRANSITIONS.values()):
        assert all(target in table for row in table.values() for target in row)


EVENTS = st.lists(
    st.sampled_from(["produce", "silent", "train", "die", "release", "due"]), max_size=40
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(events=EVENTS)
def test_no_job_is_lost_and_none_counts_twice(ledger: Ledger, events: list[str]):
    """Whatever dies in between, each step is in the log exactly once when the run is through."""
    ledger.client.flushdb()
    total = 4
    start(ledger, "r", positions=total, max_in_flight=3)
    worker, durable = 0, 0
    deaths: dict[int, int] = {}
    for event in [*events, *["due", "produce", "train"] * (3 * total)]:
        if ledger.workload("r")["state"] != "running":
            break
        if event == "due":
            for run in ledger.due().stranded:
                ledger.fall_back(run)
        elif event in ("produce", "silent"):
            job = ledger.reserve("r", lease_s=LONG_S if event == "produce" else EXPIRED_S)
            if event == "silent":
                if isinstance(job, TrainingJob):
                    deaths[job.position] = deaths.get(job.position, 0) + 1
                passed(0.005)
            elif isinstance(job, TrainingJob):
                ledger.mark(job, JobState.READY, sample_count=1, domain="train")
        else:
            dies = event == "die"
            for job in lease(ledger, f"w{worker}", lease_s=EXPIRED_S if dies else LONG_S):
                if job.mount and ledger.rewind(job, position=durable, step=durable):
                    continue
                if event == "release":
                    ledger.release(job)
                elif event == "train":
                    step(ledger, job)
                    if job.position % 2:
                        durable = job.position + 1
                        ledger.checkpointed("r", position=durable, checkpoint="c", step=durable)
                else:
                    deaths[job.position] = deaths.get(job.position, 0) + 1
            if dies:
                worker += 1
                passed(0.005)
    found = ledger.workload("r")
    if found["state"] == "failed":
        assert max(deaths.values()) >= 3
    else:
        assert str(total) == found["position"]
        assert list(ledger.steps("r")) == [1, 2, 3, 4]
        assert ledger.client.zcard("vla:w:r:jobs") == 0


def test_one_producer_at_a_time_is_known_by_name(ledger: Ledger) -> None:
    """A rollout that outlasts the visibility timeout has its message come again."""
    run = start(ledger, "rl-one")
    assert ledger.claim(run, for_s=LONG_S, by="first")
    assert not ledger.claim(run, for_s=LONG_S, by="second")
    assert not ledger.release_claim(run, by="second")  # ends nothing
    with pytest.raises(LeaseLostError):
        ledger.renew_claim(run, for_s=LONG_S, by="second")
    assert ledger.claim(run, for_s=LONG_S, by="first")
    ledger.renew_claim(run, for_s=LONG_S, by="first")
    assert list(ledger.due().produce) == []
    assert ledger.release_claim(run, by="first")
    assert list(ledger.due().produce) == [run]
    assert ledger.claim(run, for_s=EXPIRED_S, by="first")
    passed()
    with pytest.raises(LeaseLostError):  # though nobody took it
        ledger.renew_claim(run, for_s=LONG_S, by="first")
    assert ledger.claim(run, for_s=LONG_S, by="second")


def test_work_that_is_done_alone_is_nobody_elses_until_it_ends(ledger: Ledger) -> None:
    with alone(ledger, "a/evaluations/one", lease_s=0.2) as first:
        passed(0.5)  # longer than its lease
        with (
            alone(ledger, "a/evaluations/one", lease_s=0.2) as second,
            alone(ledger, "a/evaluations/two", lease_s=0.2) as other,
        ):
            assert (first is None, second is None, other is None) == (False, True, False)
    with alone(ledger, "a/evaluations/one", lease_s=0.2) as again:
        assert again is not None
        again.check()


def test_who_works_alone_learns_that_another_may_be_at_it(ledger: Ledger) -> None:
    """Its claim ran out while it was stopped, and another took it: neither its renewal nor its end
    touches the other's."""
    with alone(ledger, "a/evaluations/one", lease_s=0.2) as keeper:
        assert keeper is not None
        ledger.client.set("vla:producing:a/evaluations/one", "another")
        until_lost(keeper)
    assert ledger.client.get("vla:producing:a/evaluations/one") == "another"


def test_who_works_alone_counts_on_no_claim_that_it_could_not_renew(ledger: Ledger) -> None:
    with alone(ledger, "a/evaluations/one", lease_s=0.2) as keeper:
        assert keeper is not None
        before = ledger.client.config_get("maxmemory")["maxmemory"]
        ledger.client.config_set("maxmemory", 1)  # the server refuses what writes
        try:
            until_lost(keeper)
        finally:
            ledger.client.config_set("maxmemory", before)


def until_lost(keeper: Keeper) -> None:
    end = time.monotonic() + 5
    while keeper.lost is None and time.monotonic() < end:
        pass
    with pytest.raises(LeaseLostError):
        keeper.check()


def test_a_redis_that_takes_no_writes_is_unavailable_to_all(ledger: Ledger):
    """It lacks its replicas, or its disk is full: it comes back, and nothing is anybody's fault."""
    start(ledger, "r")
    ledger.client.config_set("min-replicas-to-write", 1)
    try:
        for write in (
            lambda: ledger.register_base_model("tiny", {}),
            lambda: ledger.reserve("r", lease_s=1),
            lambda: ledger.heartbeat("w1", lease_s=1),
        ):
            with pytest.raises(UnavailableError):
                write()
    finally:
        ledger.client.config_set("min-replicas-to-write", 0)
    assert isinstance(ledger.reserve("r", lease_s=1), TrainingJob)


def test_a_policy_is_served_by_the_base_model_of_what_is_published(ledger: Ledger):
    """A run on another base model moves its requests only once it has published something."""
    ledger.register_base_model("other", {})
    start(ledger, "first", policy="p")
    ledger.publish_version("a/p", 1, base_model=BASE)
    ledger.submit("second", fields(policy="p", base_model="other"), max_pending=9)
    assert ledger.base_model_of("a", "p") == BASE
    ledger.publish_version("a/p", 2, base_model="other")
    assert ledger.base_model_of("a", "p") == "other"


def test_a_job_that_cannot_go_on_leaves_the_worker_to_others(ledger: Ledger):
    """Its checkpoint cannot be read, or its tenant's quota is full: it comes back, less and less
    often, and uncounted."""
    start(ledger, "stuck", tenant="b", policy="stuck", priority=9)
    produce(ledger, "stuck")
    (job,) = lease(ledger)
    ledger.release(job, backs_off=True)
    assert lease(ledger) == []
    start(ledger, "other")
    produce(ledger, "other")
    (other,) = lease(ledger)
    assert other.workload == "other"
    with pytest.raises(LeaseLostError):
        ledger.renew(job, lease_s=1)
    waits = []
    for _ in range(12):
        waits.append(ledger.client.zscore("vla:leases", job.job_id) / 1000 - time.time())
        ledger.client.zadd("vla:leases", {job.job_id: 1})
        ledger.due()
        (job,) = lease(ledger)
        assert (job.workload, job.attempt) == ("stuck", 1)
        ledger.release(job, backs_off=True)
    assert [round(wait) for wait in waits[:9]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert max(waits) < 301


def test_whoever_lost_its_slot_to_a_fall_back_owns_it_no_more(ledger: Ledger):
    """A worker that was stopped goes on, with the upload of a step that is redone meanwhile."""
    start(ledger, "r", positions=1)
    produce(ledger, "r")
    (job,) = lease(ledger)
    step(ledger, job)
    assert ledger.owns_slot(job)
    ledger.leave("w1")
    assert ledger.fall_back("r")
    assert not ledger.owns_slot(job)
