"""RL lifecycles, admission and fair share of the ledger, on a Valkey with a clock of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from vla_platform.control.ledger import Ledger
from vla_platform.control.ledger_functions import TEST_CLOCK_KEY
from vla_platform.control.states import (
    JOB_TRANSITIONS,
    DropReason,
    JobState,
    Lifecycle,
    Stage,
    WorkloadState,
)
from vla_platform.control.training_job import ReserveLimits, TrainingJob
from vla_platform.errors import IllegalTransitionError, LeaseLostError

BASE = "tiny"
LEASE_S = 10.0


@pytest.fixture
def ledger(control_redis_url: str) -> Iterator[Ledger]:
    ledger = Ledger.connect(control_redis_url, test_clock=True)
    ledger.load()
    ledger.register_base_model(BASE, {})
    yield ledger
    ledger.load()
    ledger.close()


def wait(ledger: Ledger, seconds: float) -> None:
    """The server's clock goes on."""
    ledger.client.incrby(TEST_CLOCK_KEY, int(seconds * 1000))


def start(ledger: Ledger, name: str, *, kind: str = "rl", steps: int = 10, **changes: Any) -> str:
    tenant = changes.pop("tenant", "a")
    policy = changes.pop("policy", name)
    fields = {
        "tenant": tenant, "policy": policy, "policy_key": f"{tenant}/{policy}", "kind": kind,
        "lifecycle": kind, "base_model": BASE, "schema_signature": "s" * 64,
        "spec_digest": "d" * 64, "priority": 0, "max_in_flight": 2, "max_policy_staleness": 4,
        "target": "steps" if kind == "rl" else "positions", "harness": "h", **changes,
    }  # fmt: skip
    ledger.submit(name, fields, max_pending=100)
    ledger.prepared(name, total_positions=steps, total_steps=steps)
    assert ledger.admit(name, max_running=100) == "running"
    return name


def reserve(ledger: Ledger, name: str, **limits: Any) -> TrainingJob | str:
    given = ReserveLimits(**{"tenant_rollouts": 9, "rollouts": 9, **limits})
    return ledger.reserve(name, lease_s=LEASE_S, limits=given)


def taken(answer: TrainingJob | str | None) -> TrainingJob:
    assert isinstance(answer, TrainingJob)
    return answer


def make_ready(ledger: Ledger, name: str) -> TrainingJob:
    job = taken(reserve(ledger, name))
    if job.task_type == "sft":
        ledger.mark(job, JobState.READY, sample_count=8)
        return job
    ledger.mark(job, JobState.NEEDS_ADVANTAGES, sample_count=8)
    computing = taken(ledger.lease_stage(Stage.ADVANTAGES, "adv", lease_s=LEASE_S))
    ledger.mark(computing, JobState.READY)
    return computing


def lease(ledger: Ledger, worker: str = "w", *, most: int = 8) -> list[TrainingJob]:
    return ledger.lease_group(worker, BASE, max_jobs=most, lease_s=LEASE_S)


def complete(ledger: Ledger, job: TrainingJob, *, step: int, cost_s: float = 1.0) -> None:
    ledger.complete(job, step=step, result={}, cost_s=cost_s, samples=job.sample_count)
    ledger.checkpointed(job.workload, position=job.position + 1, checkpoint="c", step=step)


def state_of(ledger: Ledger, job: TrainingJob) -> str:
    return str(ledger.client.hget(f"vla:j:{job.job_id}", "state"))


def test_a_rollout_passes_its_stages(ledger: Ledger):
    start(ledger, "r", steps=1)
    job = taken(reserve(ledger, "r"))
    assert (job.producer_role, job.behavior_policy_version) == ("rollout", 0)
    assert ledger.mark(job, JobState.NEEDS_ADVANTAGES, sample_count=64) is True
    computing = taken(ledger.lease_stage(Stage.ADVANTAGES, "adv", lease_s=LEASE_S))
    assert (computing.state, computing.sample_count) == ("computing_advantages", 64)
    assert ledger.lease_stage(Stage.ADVANTAGES, "adv", lease_s=LEASE_S) is None
    ledger.mark(computing, JobState.READY)
    (leased,) = lease(ledger)
    complete(ledger, leased, step=1)
    ledger.finish("r")
    assert ledger.workload("r")["state"] == "succeeded"
    assert ledger.client.hget("vla:policy:a/r", "policy_version") == "1"


def test_the_actors_forward_comes_first_where_the_algorithm_asks(ledger: Ledger):
    start(ledger, "r", lifecycle="rl_actor_forward")
    job = taken(reserve(ledger, "r"))
    with pytest.raises(IllegalTransitionError):
        ledger.mark(job, JobState.NEEDS_ADVANTAGES)
    ledger.mark(job, JobState.NEEDS_ACTOR_FORWARD)
    assert ledger.lease_stage(Stage.ACTOR_FORWARD, "g", lease_s=1, base_model="other") is None
    forward = taken(ledger.lease_stage(Stage.ACTOR_FORWARD, "g", lease_s=1, base_model=BASE))
    ledger.mark(forward, JobState.NEEDS_ADVANTAGES)
    assert state_of(ledger, job) == "needs_advantages"


def start_scored(ledger: Ledger, policy: str, **changes: Any) -> TrainingJob:
    """A run whose first rollout waits for its scores, 20 s at most."""
    scored = {"scored_by": "", "score_within_ms": 20_000, "on_unscored": policy}
    start(ledger, "r", **{"lifecycle": "rl_scored", **scored, **changes})
    job = taken(reserve(ledger, "r"))
    ledger.mark(job, JobState.NEEDS_SCORES, sample_count=8)
    return job


def test_scores_come_before_what_else_is_computed(ledger: Ledger):
    job = start_scored(ledger, "drop", lifecycle="rl_scored_actor_forward")
    assert ledger.due().stages == ((Stage.SCORES, ""),)
    grading = taken(ledger.lease_stage(Stage.SCORES, "g", lease_s=LEASE_S))
    ledger.mark(grading, JobState.NEEDS_ACTOR_FORWARD, scored=1)
    forward = taken(ledger.lease_stage(Stage.ACTOR_FORWARD, "w", lease_s=1, base_model=BASE))
    ledger.mark(forward, JobState.NEEDS_ADVANTAGES)
    wait(ledger, 1000)  # its deadline was for the scores
    ledger.due()
    assert state_of(ledger, job) == "needs_advantages"
    assert ledger.descriptor(job.job_id)["scored"] == "1"
    assert "unscored" not in ledger.workload("r")


def test_a_teacher_scores_on_workers_of_its_own_base_model(ledger: Ledger):
    ledger.register_base_model("large", {})
    start_scored(ledger, "drop", scored_by="large")
    assert ledger.due().stages == ((Stage.SCORES, "large"),)
    assert ledger.lease_stage(Stage.SCORES, "g", lease_s=LEASE_S) is None
    assert ledger.lease_stage(Stage.SCORES, "w", lease_s=LEASE_S, base_model=BASE) is None
    job = taken(ledger.lease_stage(Stage.SCORES, "w", lease_s=LEASE_S, base_model="large"))
    ledger.release(job)
    assert ledger.due().stages == ((Stage.SCORES, "large"),)


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize(
    ("policy", "state"),
    [("keep_reward", "needs_advantages"), ("drop", "dropped"), ("fail", "failed")],
)
def test_late_scores_are_given_up_as_the_spec_says_and_counted(
    ledger: Ledger, policy: str, state: str, is_held: bool
):
    job = start_scored(ledger, policy)
    held = taken(ledger.lease_stage(Stage.SCORES, "g", lease_s=99)) if is_held else None
    wait(ledger, 19)
    ledger.due()
    assert state_of(ledger, job) == ("computing_scores" if is_held else "needs_scores")
    wait(ledger, 2)
    ledger.due()
    assert state_of(ledger, job) == state
    assert ledger.workload("r")["unscored"] == "1"
    assert ledger.client.hget("vla:usage:a", f"unscored:a/r:{policy}") == "1"
    assert ledger.lease_stage(Stage.SCORES, "g", lease_s=LEASE_S) is None
    if held is not None:
        with pytest.raises(LeaseLostError):
            ledger.mark(held, JobState.NEEDS_ADVANTAGES, scored=1)
    assert (ledger.workload("r")["state"] == "failed") == (policy == "fail")
    if policy == "keep_reward":
        computing = taken(ledger.lease_stage(Stage.ADVANTAGES, "adv", lease_s=LEASE_S))
        ledger.mark(computing, JobState.READY)
        assert "scored" not in ledger.descriptor(job.job_id)
    assert ledger.client.zcard("vla:deadlines") == 0


def test_a_grader_that_says_it_cannot_or_kills_its_worker_is_given_up_pf09(ledger: Ledger):
    job = start_scored(ledger, "keep_reward", max_in_flight=8)
    held = taken(ledger.lease_stage(Stage.SCORES, "g", lease_s=LEASE_S))
    ledger.unscored(held, "ValueError: no")
    with pytest.raises(LeaseLostError):
        ledger.unscored(held, "again")
    assert state_of(ledger, job) == "needs_advantages"
    other = taken(reserve(ledger, "r"))
    ledger.mark(other, JobState.NEEDS_SCORES)
    for _ in range(3):
        taken(ledger.lease_stage(Stage.SCORES, "g", lease_s=1))
        wait(ledger, 2)
        ledger.due()
    assert ledger.lease_stage(Stage.SCORES, "g", lease_s=1) is None
    assert state_of(ledger, other) == "needs_advantages"
    assert ledger.workload("r")["unscored"] == "2"
    assert ledger.workload("r")["state"] == "running"


def test_a_cancelled_run_leaves_no_deadline(ledger: Ledger):
    start_scored(ledger, "fail")
    ledger.cancel("r")
    assert ledger.client.zcard("vla:deadlines") == 0
    assert ledger.due().stages == ()


def test_samples_of_a_dataset_are_never_stale(ledger: Ledger):
    """Offline: no version acted, so neither staleness nor what is unpublished holds it up."""
    start(ledger, "r", max_policy_staleness=-1, max_in_flight=2, harness="")
    for step in (1, 2, 3):
        make_ready(ledger, "r")
        ledger.client.hset("vla:policy:a/r", "policy_version", 100 * step)
        (job,) = lease(ledger)
        ledger.complete(job, step=step, result={}, cost_s=1.0, samples=8)  # nothing is saved yet
    assert list(ledger.steps("r")) == [1, 2, 3]


@pytest.mark.parametrize("lifecycle", list(Lifecycle))
def test_only_the_tables_transitions_are_taken(ledger: Ledger, lifecycle: Lifecycle):
    """Every pair of states: what no table allows is an error and writes nothing."""
    kind = "sft" if lifecycle is Lifecycle.SFT else "rl"
    start(ledger, "r", kind=kind, lifecycle=str(lifecycle))
    job = taken(reserve(ledger, "r"))
    marked = (
        JobState.READY, JobState.NEEDS_SCORES, JobState.NEEDS_ACTOR_FORWARD,
        JobState.NEEDS_ADVANTAGES, JobState.RESERVED, JobState.COMPLETED,
    )  # fmt: skip
    for before, after in JOB_TRANSITIONS[lifecycle].items():
        for target in marked:
            if before is JobState.LEASED or target in after:
                continue
            ledger.client.hset(f"vla:j:{job.job_id}", "state", str(before))
            with pytest.raises((IllegalTransitionError, LeaseLostError)):
                ledger.mark(job, target)
            assert state_of(ledger, job) == str(before)


def test_a_stage_that_nobody_renews_goes_to_another_and_the_late_write_is_refused(ledger: Ledger):
    start(ledger, "r")
    ledger.mark(taken(reserve(ledger, "r")), JobState.NEEDS_ADVANTAGES)
    first = taken(ledger.lease_stage(Stage.ADVANTAGES, "one", lease_s=LEASE_S))
    wait(ledger, LEASE_S / 2)
    ledger.renew(first, lease_s=LEASE_S, progress="half")
    wait(ledger, LEASE_S / 2 + 1)
    ledger.due()
    assert ledger.lease_stage(Stage.ADVANTAGES, "two", lease_s=LEASE_S) is None
    wait(ledger, LEASE_S)
    assert ledger.due().stages == ((Stage.ADVANTAGES, ""),)
    second = taken(ledger.lease_stage(Stage.ADVANTAGES, "two", lease_s=LEASE_S))
    with pytest.raises(LeaseLostError):
        ledger.mark(first, JobState.READY)
    with pytest.raises(LeaseLostError):
        ledger.renew(first, lease_s=LEASE_S)
    ledger.mark(second, JobState.READY)


def test_a_stage_that_kills_its_worker_stops_after_three_attempts_pf09(ledger: Ledger):
    start(ledger, "r")
    ledger.mark(taken(reserve(ledger, "r")), JobState.NEEDS_ADVANTAGES)
    for _ in range(3):
        taken(ledger.lease_stage(Stage.ADVANTAGES, "w", lease_s=LEASE_S))
        wait(ledger, LEASE_S + 1)
        ledger.due()
    assert ledger.lease_stage(Stage.ADVANTAGES, "w", lease_s=LEASE_S) is None
    assert ledger.workload("r")["state"] == "failed"
    assert "advantages worker 3 times" in ledger.workload("r")["reason"]


def test_renewal_brings_back_cancellation(ledger: Ledger):
    start(ledger, "r")
    job = taken(reserve(ledger, "r"))
    ledger.cancel("r")
    with pytest.raises(LeaseLostError):
        ledger.renew(job, lease_s=LEASE_S)


def test_samples_of_an_old_policy_are_dropped_and_counted_f48_pf29(ledger: Ledger):
    start(ledger, "r", max_in_flight=8, max_policy_staleness=1)
    jobs = [make_ready(ledger, "r") for _ in range(2)]
    assert reserve(ledger, "r") == "staleness bound"
    ledger.client.hset("vla:policy:a/r", "policy_version", 2)  # the actor is two ahead
    assert lease(ledger) == []
    assert [state_of(ledger, job) for job in jobs] == ["dropped", "dropped"]
    assert ledger.client.hget("vla:usage:a", f"dropped:a/r:{DropReason.POLICY_STALE}") == "2"
    assert taken(reserve(ledger, "r")).position == 2


def test_paced_admission_never_drops(ledger: Ledger):
    """However many jobs the in-flight limit would allow, none is stale when it is trained."""
    start(ledger, "r", max_in_flight=8, max_policy_staleness=2, steps=20)
    step = 0
    while ledger.workload("r")["state"] == "running" and step < 20:
        while not isinstance(reserve(ledger, "r"), str):
            pass
        for job_id in sorted(
            ledger.client.zrange("vla:w:r:jobs", 0, -1), key=lambda name: int(name.split("-")[1])
        ):
            job = TrainingJob.from_hash(ledger.client.hgetall(f"vla:j:{job_id}"))
            if job.state == "reserved":
                ledger.mark(job, JobState.NEEDS_ADVANTAGES)
                computing = taken(ledger.lease_stage(Stage.ADVANTAGES, "a", lease_s=9))
                ledger.mark(computing, JobState.READY)
        (leased,) = lease(ledger)
        assert step - leased.behavior_policy_version <= 2
        step += 1
        complete(ledger, leased, step=step)
    assert ledger.client.hgetall("vla:usage:a")["jobs"] == "20"


def test_sft_is_never_stale(ledger: Ledger):
    start(ledger, "s", kind="sft")
    make_ready(ledger, "s")
    ledger.client.hset("vla:policy:a/s", "policy_version", 1000)
    assert len(lease(ledger)) == 1


def test_dropped_jobs_leave_no_gap(ledger: Ledger):
    start(ledger, "r", max_in_flight=3, steps=2)
    first, second = taken(reserve(ledger, "r")), taken(reserve(ledger, "r"))
    ledger.drop(second, DropReason.ZERO_ADVANTAGE)
    third = taken(reserve(ledger, "r"))
    for job in (first, third):
        ledger.mark(job, JobState.NEEDS_ADVANTAGES)
        ledger.mark(taken(ledger.lease_stage(Stage.ADVANTAGES, "a", lease_s=9)), JobState.READY)
    for step in (1, 2):
        (leased,) = lease(ledger)
        complete(ledger, leased, step=step)
    assert list(ledger.steps("r")) == [1, 2]
    ledger.finish("r")


def test_rollout_limits_hold_per_tenant_and_globally(ledger: Ledger):
    for name, tenant in (("r1", "a"), ("r2", "a"), ("r3", "b"), ("r4", "c")):
        start(ledger, name, tenant=tenant)
    limits = {"tenant_rollouts": 1, "rollouts": 2}
    first = taken(reserve(ledger, "r1", **limits))
    assert reserve(ledger, "r2", **limits) == "the tenant's rollout limit"
    taken(reserve(ledger, "r3", **limits))
    assert reserve(ledger, "r4", **limits) == "the global rollout limit"
    assert ledger.workload("r4")["waits"] == "the global rollout limit"
    ledger.mark(first, JobState.NEEDS_ADVANTAGES)  # its environments are through
    taken(reserve(ledger, "r4", **limits))
    assert ledger.workload("r4")["waits"] == ""


def test_rl_updates_go_before_sft_but_priority_before_both(ledger: Ledger):
    start(ledger, "s", kind="sft", tenant="a")
    start(ledger, "urgent", kind="sft", tenant="b", priority=1)
    start(ledger, "r", tenant="c")
    for name in ("s", "urgent", "r"):
        make_ready(ledger, name)
    assert [job.workload for job in lease(ledger)] == ["urgent", "r", "s"]


def test_a_tenant_with_dearer_samples_does_not_get_more_time(ledger: Ledger):
    """Two tenants, one with jobs ten times as dear: the worker's time is shared evenly."""
    for name in ("dear", "cheap"):
        start(ledger, name, kind="sft", tenant=name, steps=100_000, max_in_flight=4)
    spent = {"dear": 0.0, "cheap": 0.0}
    cost = {"dear": 1.0, "cheap": 0.1}
    for _ in range(400):
        for name in spent:
            while isinstance(job := reserve(ledger, name, share_window_s=2.0), TrainingJob):
                ledger.mark(job, JobState.READY, sample_count=1)
        for job in lease(ledger, most=1):
            spent[job.tenant_id] += cost[job.tenant_id]
            complete(ledger, job, step=job.position + 1, cost_s=cost[job.tenant_id])
    assert spent["dear"] / spent["cheap"] == pytest.approx(1.0, abs=0.25)


def test_weights_divide_what_is_charged(ledger: Ledger):
    ledger.set_weight("heavy", 3.0)
    for name in ("heavy", "light"):
        start(ledger, name, kind="sft", tenant=name, steps=100_000)
    spent = {"heavy": 0, "light": 0}
    for _ in range(200):
        for name in spent:
            while isinstance(job := reserve(ledger, name, share_window_s=1.0), TrainingJob):
                ledger.mark(job, JobState.READY, sample_count=1)
        for job in lease(ledger, most=1):
            spent[job.tenant_id] += 1
            complete(ledger, job, step=job.position + 1, cost_s=1.0)
    assert spent["heavy"] / spent["light"] == pytest.approx(3.0, rel=0.25)


def test_a_tenant_that_comes_back_does_not_collect_what_it_did_not_use(ledger: Ledger):
    start(ledger, "busy", kind="sft", tenant="busy", steps=1000)
    for step in range(1, 30):
        make_ready(ledger, "busy")
        (job,) = lease(ledger)
        complete(ledger, job, step=step, cost_s=10.0)
    start(ledger, "late", kind="sft", tenant="late")
    charged = dict(ledger.client.zrange("vla:charged", 0, -1, withscores=True))
    assert charged["late"] == charged["busy"] == 290.0


def test_pausing_pays_no_debt(ledger: Ledger):
    for name in ("debtor", "other"):
        start(ledger, name, kind="sft", tenant=name)
    make_ready(ledger, "debtor")
    (job,) = lease(ledger)
    complete(ledger, job, step=1, cost_s=50.0)
    ledger.pause("debtor")
    ledger.resume("debtor")
    assert ledger.client.zscore("vla:charged", "debtor") == 50.0


def test_a_silent_rollout_holds_no_place(ledger: Ledger):
    """Its host died, or its tenant went away: others roll out meanwhile."""
    for name in ("r1", "r2"):
        start(ledger, name, tenant=name)
    limits = {"tenant_rollouts": 1, "rollouts": 1}
    taken(reserve(ledger, "r1", **limits))
    assert reserve(ledger, "r2", **limits) == "the global rollout limit"
    wait(ledger, LEASE_S + 1)
    taken(reserve(ledger, "r2", **limits))


def test_a_rollout_given_back_holds_no_place(ledger: Ledger):
    """Its host could not go on: others roll out, and it takes a place anew."""
    for name in ("r1", "r2"):
        start(ledger, name, tenant=name)
    ledger.release(taken(reserve(ledger, "r1", rollouts=1)))
    other = taken(reserve(ledger, "r2", rollouts=1))
    ledger.release(other)
    assert taken(reserve(ledger, "r1", rollouts=1)).fence == 2
    assert reserve(ledger, "r2", rollouts=1) != other.job_id


def test_a_tenants_own_samples_take_no_rollout_place(ledger: Ledger):
    start(ledger, "mine", harness="")
    start(ledger, "r", tenant="b")
    mine = taken(reserve(ledger, "mine", rollouts=1))
    other = taken(reserve(ledger, "r", rollouts=1))
    assert ledger.client.smembers("vla:rollouts") == {other.job_id} != {mine.job_id}


def test_a_paused_run_begins_nothing_and_ends_what_it_began(ledger: Ledger):
    start(ledger, "s", kind="sft")
    make_ready(ledger, "s")
    assert ledger.pause("s") is True
    assert ledger.pause("s") is False
    assert reserve(ledger, "s") == str(WorkloadState.PAUSED)
    (job,) = lease(ledger)
    complete(ledger, job, step=1)
    assert ledger.resume("s") is True
    assert taken(reserve(ledger, "s")).position == 1


def test_a_released_stage_counts_no_attempt(ledger: Ledger):
    start(ledger, "r")
    ledger.mark(taken(reserve(ledger, "r")), JobState.NEEDS_ADVANTAGES)
    for _ in range(5):
        ledger.release(taken(ledger.lease_stage(Stage.ADVANTAGES, "w", lease_s=LEASE_S)))
    assert taken(ledger.lease_stage(Stage.ADVANTAGES, "w", lease_s=LEASE_S)).attempt == 1


def test_a_restored_run_goes_on_and_refuses_every_write_from_before(ledger: Ledger):
    start(ledger, "s", kind="sft", steps=5)
    make_ready(ledger, "s")
    (old,) = lease(ledger)
    fields = ledger.workload("s")
    ledger.client.flushdb()
    ledger.restore("s", {
        **{name: fields[name] for name in (
            "tenant", "policy", "policy_key", "kind", "lifecycle", "base_model", "target",
            "schema_signature", "spec_digest", "priority", "max_in_flight",
            "max_policy_staleness", "total_positions", "total_steps", "created", "base_version",
        )},
        "state": "pending", "prepared": 1, "position": 3, "step": 3, "policy_version": 3,
        "published_version": 3,
    })  # fmt: skip
    assert ledger.admit("s", max_running=9) == "running"
    with pytest.raises(LeaseLostError):
        ledger.complete(old, step=1, result={})
    job = make_ready(ledger, "s")
    assert (job.position, job.job_id != old.job_id) == (3, True)
    (leased,) = lease(ledger)
    assert leased.slot_fence > old.slot_fence
    complete(ledger, leased, step=4)
    assert ledger.client.hget("vla:policy:a/s", "policy_version") == "4"


def test_a_restored_run_keeps_its_staleness_budget_pf29(ledger: Ledger):
    """Restored at version 500: what is sampled next is of 500, and no more than the bound ahead."""
    start(ledger, "r", steps=600, max_in_flight=8, max_policy_staleness=2)
    fields = ledger.workload("r")
    ledger.client.flushdb()
    ledger.register_base_model(BASE, {})
    ledger.restore("r", {
        **{name: fields[name] for name in (
            "tenant", "policy", "policy_key", "kind", "lifecycle", "base_model", "target",
            "schema_signature", "spec_digest", "priority", "max_in_flight", "harness",
            "max_policy_staleness", "total_positions", "total_steps", "created", "base_version",
        )},
        "state": "pending", "prepared": 1, "position": 507, "step": 500, "policy_version": 500,
        "published_version": 500,
    })  # fmt: skip
    assert ledger.admit("r", max_running=9) == "running"
    for step in range(501, 505):
        while not isinstance(reserve(ledger, "r"), str):
            pass
        waiting = ledger.client.zrange("vla:w:r:jobs", 0, -1)
        for job_id in sorted(waiting, key=lambda name: int(name.split("-")[1])):
            job = TrainingJob.from_hash(ledger.descriptor(job_id))
            if job.state == "reserved":
                ledger.mark(job, JobState.NEEDS_ADVANTAGES)
                computing = taken(ledger.lease_stage(Stage.ADVANTAGES, "a", lease_s=9))
                ledger.mark(computing, JobState.READY)
        (leased,) = lease(ledger)
        assert leased.behavior_policy_version >= 500
        assert step - 1 - leased.behavior_policy_version <= 2
        complete(ledger, leased, step=step)
    assert ledger.workload("r").get("dropped") is None


def test_an_rl_step_that_nobody_saved_is_taken_back_once_its_worker_is_gone(ledger: Ledger):
    start(ledger, "r", max_in_flight=1)
    make_ready(ledger, "r")
    (job,) = lease(ledger)
    ledger.complete(job, step=1, result={}, cost_s=1.0, samples=8)
    assert reserve(ledger, "r") == "in-flight limit"  # nothing is published that could act
    assert ledger.due().stranded == ()
    wait(ledger, LEASE_S + 1)
    assert ledger.due().stranded == ("r",)
    assert ledger.fall_back("r") is True
    assert ledger.steps("r") == {}
    again = taken(reserve(ledger, "r"))
    assert (again.position, again.behavior_policy_version) == (0, 0)
    assert again.job_id != job.job_id


def test_dropped_positions_are_no_reason_to_go_back(ledger: Ledger):
    start(ledger, "r")
    ledger.drop(taken(reserve(ledger, "r")), DropReason.ZERO_ADVANTAGE)
    make_ready(ledger, "r")
    (job,) = lease(ledger)
    assert (job.position, job.mount) == (1, True)
    assert ledger.rewind(job, position=0, step=0) is False
    complete(ledger, job, step=1)


def test_rollouts_that_teach_nothing_come_to_an_end(ledger: Ledger):
    start(ledger, "r", max_dropped=2)
    for _ in range(2):
        ledger.drop(taken(reserve(ledger, "r")), DropReason.ZERO_ADVANTAGE)
    assert ledger.workload("r")["state"] == "failed"
    assert "2 rollouts in a row taught nothing" in ledger.workload("r")["reason"]
