"""The scheduler against a plain model in memory: random interleavings, lost leases, time jumps.

The model is a few dictionaries and knows no Redis; after every operation both must agree on every
job, on what was leased in which order, and on every refusal.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vla_platform.control.ledger import Ledger
from vla_platform.control.ledger_functions import TEST_CLOCK_KEY
from vla_platform.control.states import DropReason, JobState, Stage
from vla_platform.control.training_job import ReserveLimits, TrainingJob
from vla_platform.errors import LeaseLostError, LedgerError

BASE = "tiny"
LEASE_S = 100.0  # no sum of the time jumps below
LIMITS = ReserveLimits(tenant_rollouts=1, rollouts=2, share_window_s=1e9)
DEADLINE_S = 110.0  # neither
NAMES = ("sft-low", "sft-high", "rl-one", "rl-two", "rl-twin", "rl-graded", "rl-picky")
SCORED = {"rl-graded": "keep_reward", "rl-picky": "drop"}
WORKERS = ("w1", "w2")
MOST_ATTEMPTS = 3
RELEASED = -1.0  # when a reservation expires that was given back


@dataclass
class Job:
    job_id: str
    run: Run
    position: int
    created_seq: int
    expires: float
    state: str = "reserved"
    fence: int = 1
    attempt: int = 0
    ready_seq: int = 0
    deadline: float = 0.0  # for its scores
    owner: str = ""
    rolling: bool = True  # takes a place among the active rollouts


@dataclass
class Run:
    name: str
    kind: str
    tenant: str
    priority: int
    total: int
    most: int = 3
    state: str = "running"
    position: int = 0
    next_position: int = 0
    step: int = 0
    owner: str = ""
    slot_fence: int = 0
    jobs: dict[int, Job] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)

    def advance(self) -> None:
        self.position += 1
        while self.position in self.gone:
            self.gone.remove(self.position)
            self.position += 1

    def fail(self) -> None:
        self.state = "failed"
        self.owner = ""
        self.jobs.clear()


class Model:
    """What the ledger has to do, without atomicity, indexes or expiry of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs: dict[str, Run] = {}
        self.alive: dict[str, float] = {}
        self.created = self.ready = 0

    def reserve(self, run: Run) -> Job | str:
        if run.state != "running":
            return run.state
        silent = sorted(
            (
                job
                for job in run.jobs.values()
                if job.state == "reserved" and job.expires < self.now
            ),
            key=lambda job: (job.expires, job.job_id),
        )
        if silent:
            job = silent[0]
            job.attempt += 1
            if job.attempt >= MOST_ATTEMPTS:
                run.fail()
                return "failed"
            job.fence += 1
            job.expires = self.now + LEASE_S
            job.rolling = True
            return job
        taken = run.step + len(run.jobs) if run.kind == "rl" else run.next_position
        if taken >= run.total:
            return "all reserved"
        if len(run.jobs) >= run.most:
            return "in-flight limit"
        if run.kind == "rl":
            rolling = [job for r in self.runs.values() if r.kind == "rl" for job in r.jobs.values()]
            rolling = [job for job in rolling if job.state == "reserved" and job.rolling]
            if len(rolling) >= LIMITS.rollouts:
                for job in rolling:
                    job.rolling = job.expires >= self.now
                rolling = [job for job in rolling if job.rolling]
            if sum(job.run.tenant == run.tenant for job in rolling) >= LIMITS.tenant_rollouts:
                return "the tenant's rollout limit"
            if len(rolling) >= LIMITS.rollouts:
                return "the global rollout limit"
        self.created += 1
        position = run.next_position
        run.next_position += 1
        job = Job(
            f"{run.name}-{position}-0", run, position, self.created, expires=self.now + LEASE_S
        )
        run.jobs[position] = job
        return job

    def rank(self, job: Job, seq: int) -> tuple[int, int]:
        return (-(2 * job.run.priority + (job.run.kind == "rl")), seq)

    def give_up(self, job: Job) -> None:
        if SCORED[job.run.name] == "drop":
            self.drop(job)
            return
        job.fence += 1
        job.state, job.attempt, job.owner = "needs_advantages", 0, ""

    def drop(self, job: Job) -> None:
        del job.run.jobs[job.position]
        job.run.gone.add(job.position)
        if job.position == job.run.position:
            job.run.gone.remove(job.position)
            job.run.advance()

    def lease_stage(self, stage: str) -> Job | None:
        waiting = [job for run in self.runs.values() for job in run.jobs.values()]
        waiting = [job for job in waiting if job.state == f"needs_{stage}"]
        for job in sorted(waiting, key=lambda job: self.rank(job, job.created_seq)):
            if job.position not in job.run.jobs:
                continue  # its run was set aside just now
            job.attempt += 1
            if job.attempt > MOST_ATTEMPTS:
                if stage == "scores":
                    self.give_up(job)
                else:
                    job.run.fail()
                continue
            job.fence += 1
            job.state, job.expires, job.owner = f"computing_{stage}", self.now + LEASE_S, "adv"
            return job
        return None

    def bury(self) -> None:
        for worker, until in list(self.alive.items()):
            if until < self.now:
                del self.alive[worker]
                for run in self.runs.values():
                    if run.owner == worker:
                        run.owner = ""

    def lease_group(self, worker: str, most: int) -> list[Job]:
        self.bury()
        self.alive[worker] = self.now + LEASE_S
        heads = [run.jobs[run.position] for run in self.runs.values() if run.position in run.jobs]
        heads = [job for job in heads if job.state == "ready" and job.run.owner in ("", worker)]
        group: list[Job] = []
        for job in sorted(heads, key=lambda job: self.rank(job, job.ready_seq)):
            attempts = job.run.attempts.get(job.position, 0)
            if len(group) == most:
                break
            if attempts >= MOST_ATTEMPTS:
                job.run.fail()
            elif attempts and group:
                continue
            else:
                job.run.slot_fence += not job.run.owner
                job.run.owner = worker
                job.fence += 1
                job.state, job.expires, job.owner = "leased", self.now + LEASE_S, worker
                job.run.attempts[job.position] = attempts + 1
                group.append(job)
                if attempts:
                    break
        return group

    def expire(self) -> None:
        self.bury()
        for run in self.runs.values():
            for job in run.jobs.values():
                if job.owner and job.expires < self.now:
                    job.fence += 1
                    job.owner = ""
                    job.state = "ready" if job.state == "leased" else needed(job.state)
        for run in self.runs.values():
            for job in list(run.jobs.values()):
                if job.state.endswith("_scores") and job.deadline < self.now:
                    self.give_up(job)


def needed(state: str) -> str:
    return state.replace("computing_", "needs_")


def state_after(lease: TrainingJob) -> JobState:
    """Where a stage or a reservation goes on."""
    if lease.state == "reserved" and lease.task_type == "rl":
        return JobState.NEEDS_SCORES if lease.workload in SCORED else JobState.NEEDS_ADVANTAGES
    return JobState.NEEDS_ADVANTAGES if lease.state == "computing_scores" else JobState.READY


class SchedulerAgainstModel(RuleBasedStateMachine):
    ledger: ClassVar[Ledger]

    @initialize()
    def begin(self) -> None:
        self.ledger.client.flushdb()
        self.ledger.register_base_model(BASE, {})
        self.model = Model()
        self.held: list[tuple[TrainingJob, Job, int]] = []  # every lease ever given, with its fence
        self.completed: list[str] = []
        for name in NAMES:
            kind = name.split("-")[0]
            tenant = "rl-one" if name == "rl-twin" else name
            run = Run(name, kind, tenant, priority=1 if name == "sft-high" else 0, total=6)
            self.model.runs[name] = run
            fields = {
                "tenant": tenant, "policy": name, "policy_key": f"{tenant}/{name}", "kind": kind,
                "lifecycle": kind, "base_model": BASE, "schema_signature": "s",
                "spec_digest": "d", "priority": run.priority, "max_in_flight": run.most,
                "max_policy_staleness": 100, "harness": "h",
                "target": "steps" if kind == "rl" else "positions",
            }  # fmt: skip
            if name in SCORED:
                fields |= {"lifecycle": "rl_scored", "scored_by": "",
                           "score_within_ms": int(1000 * DEADLINE_S),
                           "on_unscored": SCORED[name]}  # fmt: skip
            self.ledger.submit(name, fields, max_pending=99)
            self.ledger.prepared(name, total_positions=run.total, total_steps=run.total)
            assert self.ledger.admit(name, max_running=99) == "running"

    @rule(name=st.sampled_from(NAMES))
    def reserve(self, name: str) -> None:
        expected = self.model.reserve(self.model.runs[name])
        found = self.ledger.reserve(name, lease_s=LEASE_S, limits=LIMITS)
        if isinstance(expected, str):
            assert found == expected
        else:
            self._hold(found, expected)

    @rule(stage=st.sampled_from([Stage.SCORES, Stage.ADVANTAGES]))
    def lease_stage(self, stage: Stage) -> None:
        expected = self.model.lease_stage(str(stage))
        found = self.ledger.lease_stage(stage, "adv", lease_s=LEASE_S)
        if expected is None:
            assert found is None
        else:
            self._hold(found, expected)

    @rule(worker=st.sampled_from(WORKERS), most=st.integers(1, 4))
    def lease_group(self, worker: str, most: int) -> None:
        expected = self.model.lease_group(worker, most)
        found = self.ledger.lease_group(worker, BASE, max_jobs=most, lease_s=LEASE_S)
        assert [job.job_id for job in found] == [job.job_id for job in expected]
        for job, wanted in zip(found, expected, strict=True):
            self._hold(job, wanted)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """Whoever has or had a lease does its next thing; what was lost in between is refused."""
        lease, job, fence = data.draw(st.sampled_from(self.held))
        ours = job.position in job.run.jobs and job.run.jobs[job.position] is job
        ours = ours and job.fence == fence and job.run.state == "running"
        if lease.state == "leased":
            self._complete(lease, job, ours=ours and job.state == "leased")
            return
        if not (ours and job.state == lease.state):
            with pytest.raises(LedgerError):
                self.ledger.mark(lease, state_after(lease))
            return
        self._mark(lease, job)

    def _mark(self, lease: TrainingJob, job: Job) -> None:
        state = state_after(lease)
        self.ledger.mark(lease, state)
        job.state, job.attempt, job.owner = str(state), 0, ""
        job.deadline = self.model.now + DEADLINE_S
        if state is JobState.READY:
            self.model.ready += 1
            job.ready_seq = self.model.ready

    def _complete(self, lease: TrainingJob, job: Job, *, ours: bool) -> None:
        step = job.run.step + 1
        if not ours or job.run.slot_fence != lease.slot_fence:
            with pytest.raises(LedgerError):
                self.ledger.complete(lease, step=step, result={})
            return
        self.ledger.complete(lease, step=step, result={})
        self.ledger.checkpointed(job.run.name, position=step, checkpoint="c", step=step)
        self.completed.append(job.job_id)
        del job.run.jobs[job.position]
        job.run.attempts.pop(job.position, None)
        job.run.step = step
        job.run.advance()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        lease, job, fence = data.draw(st.sampled_from(self.held))
        ours = job.run.state == "running" and job.run.jobs.get(job.position) is job
        if not ours or job.fence != fence or lease.task_type != "rl":
            with pytest.raises(LedgerError):
                self.ledger.drop(lease, DropReason.ZERO_ADVANTAGE)
            return
        self.ledger.drop(lease, DropReason.ZERO_ADVANTAGE)
        self.model.drop(job)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unscored(self, data: st.DataObject) -> None:
        lease, job, fence = data.draw(st.sampled_from(self.held))
        ours = job.run.state == "running" and job.run.jobs.get(job.position) is job
        if not ours or job.fence != fence or job.state != "computing_scores":
            with pytest.raises(LeaseLostError):
                self.ledger.unscored(lease, "it cannot")
            return
        self.ledger.unscored(lease, "it cannot")
        self.model.give_up(job)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, job, fence = data.draw(st.sampled_from(self.held))
        ours = job.run.state == "running" and job.run.jobs.get(job.position) is job
        reserved = job.state == "reserved" and job.expires != RELEASED
        if not ours or job.fence != fence or not (job.owner or reserved):
            with pytest.raises(LeaseLostError):
                self.ledger.release(lease)
            return
        self.ledger.release(lease)
        job.owner = ""
        if reserved:
            job.expires, job.attempt, job.rolling = RELEASED, job.attempt - 1, False
            return
        if job.state == "leased":
            job.state = "ready"
            job.run.attempts[job.position] -= 1
        else:
            job.state, job.attempt = needed(job.state), job.attempt - 1

    @rule(worker=st.sampled_from(WORKERS), keeps=st.booleans())
    def heartbeat(self, worker: str, keeps: bool) -> None:
        mine = {
            job.job_id: job
            for run in self.model.runs.values()
            for job in run.jobs.values()
            if job.state == "leased" and job.owner == worker
        }
        jobs = tuple(mine) if keeps else ()
        assert self.ledger.heartbeat(worker, lease_s=LEASE_S, jobs=jobs) == []
        self.model.alive[worker] = self.model.now + LEASE_S
        for job_id in jobs:
            mine[job_id].expires = self.model.now + LEASE_S

    @rule(seconds=st.sampled_from([17.0, 70.0, 130.0]))
    def time_passes(self, seconds: float) -> None:
        self.model.now += seconds
        self.ledger.client.incrby(TEST_CLOCK_KEY, int(seconds * 1000))

    @rule()
    def reconcile(self) -> None:
        self.model.expire()
        self.ledger.due()

    @rule(worker=st.sampled_from(WORKERS))
    def leave(self, worker: str) -> None:
        self.ledger.leave(worker)
        self.model.alive.pop(worker, None)
        for run in self.model.runs.values():
            if run.owner == worker:
                run.owner = ""

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "model"):
            return
        for name, run in self.model.runs.items():
            found = self.ledger.workload(name)
            assert found["state"] == run.state
            if run.state != "running":
                continue
            assert (int(found["position"]), int(found["step"])) == (run.position, run.step)
            ids = set(self.ledger.client.zrange(f"vla:w:{name}:jobs", 0, -1))
            assert ids == {job.job_id for job in run.jobs.values()}
            assert len(ids) <= run.most
            for job in run.jobs.values():
                row = self.ledger.client.hmget(f"vla:j:{job.job_id}", "state", "fence")
                assert row == [job.state, str(job.fence)]

    def teardown(self) -> None:
        """Nobody fails any more: every run that was not set aside ends, each step once."""
        if not hasattr(self, "model"):
            return
        for _ in range(400):
            if all(
                run.state != "running" or run.step >= run.total for run in self.model.runs.values()
            ):
                break
            self.time_passes(130.0)
            self.reconcile()
            for name in NAMES:
                self.reserve(name)
            for lease, job, fence in list(self.held):
                if job.fence == fence and lease.state == "reserved" == job.state:
                    self._mark_as_held(lease, job)
            for stage in (Stage.SCORES, Stage.ADVANTAGES):
                while (before := len(self.held)) is not None:
                    self.lease_stage(stage)
                    if len(self.held) == before:
                        break
                    self._mark_as_held(*self.held[-1][:2])
            self.lease_group("w1", 4)
            for lease, job, fence in list(self.held):
                if job.fence == fence and lease.state == "leased" == job.state:
                    ours = job.run.jobs.get(job.position) is job and job.run.state == "running"
                    self._complete(lease, job, ours=ours)
        for name, run in self.model.runs.items():
            if run.state == "running":
                assert list(self.ledger.steps(name)) == list(range(1, run.total + 1))
        assert len(set(self.completed)) == len(self.completed)

    def _mark_as_held(self, lease: TrainingJob, job: Job) -> None:
        with contextlib.suppress(LedgerError):
            self._mark(lease, job)

    def _hold(self, found: Any, expected: Job) -> None:
        assert isinstance(found, TrainingJob)
        assert (found.job_id, found.fence) == (expected.job_id, expected.fence)
        self.held.append((found, expected, expected.fence))


def test_scheduler_agrees_with_a_plain_model(control_redis_url: str) -> None:
    ledger = Ledger.connect(control_redis_url, test_clock=True)
    ledger.load()
    case = type("Case", (SchedulerAgainstModel,), {"ledger": ledger}).TestCase
    case.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
    case().runTest()
    ledger.close()
