"""Processes die at every named place of a training job's life: nothing lost, nothing twice.

Real processes, one tenant, the random base model. A worker is armed by its pid while it runs, so
each death happens once and the process that follows it is sound.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery

from tests.acceptance.recorded import offline, write_mixed
from tests.acceptance.stacks import RANDOM, WORKERS, Stack, demonstrate, losses, sft, started
from tests.waiting import wait_until
from vla_platform.client import Platform, Run
from vla_platform.failpoints import Failpoint

STEPS = 40
RTO_S = 15.0
TIMEOUT_S = 120
ROUNDS = 200
RESTARTS = 5
ROLE = {Failpoint.PAYLOAD_WRITTEN: "sft", Failpoint.META_PUBLISHED: "sft"}
NTH = {Failpoint.AFTER_POP: 1, Failpoint.BEFORE_ACK: 1, Failpoint.STAGE_DONE: 2,
       Failpoint.AFTER_MANIFEST: 2, Failpoint.PART_K: 5}  # fmt: skip
OF_SFT = [one for one in Failpoint if one is not Failpoint.COLUMNS_WRITTEN]
seeds = itertools.count(100)


class Tenant:
    """One, and the workers that it makes die."""

    def __init__(self, stack: Stack, platform: Platform, armed: Path) -> None:
        self.stack, self.platform, self.armed = stack, platform, armed

    def arm(self, role: str, failpoint: Failpoint, nth: int, *, action: str = "kill") -> int:
        """Of the process that does `role` now; returns its pid."""
        pid = self.stack.working(role)
        written = self.armed.with_suffix(".new")
        written.write_text(f"{failpoint}:{action}:{nth}")
        written.rename(f"{self.armed}-{pid}")
        return pid

    def submit(self, **changes: Any) -> Run:
        policy = f"p{next(seeds)}"
        if changes.get("kind") == "rl":
            return self.platform.submit({"policy": policy, **changes})
        return self.platform.submit(sft(policy, **{"steps": STEPS, **changes}))

    def steps(self, run: Run) -> list[int]:
        return list(self.stack.admin.ledger.steps(run.id))

    def updates(self, run: Run) -> list[float]:
        """The losses of what took effect. Events of a worker that is killed may die with it."""
        return [done["loss"] for done in self.stack.admin.ledger.steps(run.id).values()]

    def module(self, run: Run) -> str:
        return self.stack.module("a", run)


@pytest.fixture(scope="module")
def tenant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenant]:
    folder = tmp_path_factory.mktemp("failpoints")
    demonstrate(folder, episodes=8)
    write_mixed(folder / "data" / "mixed")
    armed = folder / "failpoint"
    environment = {
        **RANDOM, "VLA_FAILPOINT": f"@{armed}", "VLA_SLICE_S": "1", "VLA_TRAINING_WATCHDOG_S": "15",
    }  # fmt: skip
    with (
        started(folder, environment=environment, roles=WORKERS) as stack,
        Platform(stack.admin.add("a")) as platform,
    ):
        yield Tenant(stack, platform, armed)


@pytest.fixture(scope="module")
def calm(tenant: Tenant) -> tuple[dict[int, float], str]:
    run = tenant.submit()
    run.result(TIMEOUT_S)
    return losses(run), tenant.module(run)


def reach(run: Run, step: int) -> None:
    wait_until(lambda: run.status().step >= step, TIMEOUT_S)


def die_once(
    tenant: Tenant, failpoint: Failpoint, nth: int, *, role: str = "", **spec: Any
) -> tuple[Run, float]:
    """A run during which a worker dies at `failpoint`; returns it and the longest pause."""
    role = role or ROLE.get(failpoint, "gpu")
    pid = tenant.arm(role, failpoint, nth)
    run = tenant.submit(**spec)
    died, longest, last = False, 0.0, time.monotonic()
    step = -1
    end = time.monotonic() + TIMEOUT_S
    while not (status := run.status()).is_over:
        assert time.monotonic() < end, f"{run.id} hangs at step {status.step}"
        if not died and not psutil.pid_exists(pid):
            died = True
            last = time.monotonic()
        if status.step != step:
            longest = max(longest, time.monotonic() - last if died else 0.0)
            step, last = status.step, time.monotonic()
        time.sleep(0.02)
    if not died:  # the last message is acknowledged after the run is over
        last = time.monotonic()
        wait_until(lambda: not psutil.pid_exists(pid), RTO_S, what=f"the death {failpoint}")
        tenant.stack.working(role, after=pid)
        longest = time.monotonic() - last
    return run, longest


@pytest.mark.parametrize("failpoint", OF_SFT)
def test_a_death_at_a_named_place_loses_and_doubles_nothing_f01_f55_pf02(
    tenant: Tenant, calm: tuple[dict[int, float], str], failpoint: Failpoint
) -> None:
    run, pause_s = die_once(tenant, failpoint, NTH.get(failpoint, 8))
    assert run.status().state == "succeeded"
    assert tenant.steps(run) == list(range(1, STEPS + 1))
    assert (losses(run), tenant.module(run)) == calm
    assert pause_s < RTO_S + 10  # the promise, and the start of a process on a busy machine


def test_a_death_in_mid_step_of_one_of_three_moves_nobody_f04(
    tenant: Tenant, calm: tuple[dict[int, float], str]
) -> None:
    """Its mates' steps of that group are durable or done again, never half."""
    pid = tenant.arm("gpu", Failpoint.BEFORE_OPTIMIZER, 20)
    runs = [tenant.submit() for _ in range(3)]
    psutil.Process(pid).wait(TIMEOUT_S)
    for run in runs:
        run.result(TIMEOUT_S)
        assert tenant.steps(run) == list(range(1, STEPS + 1))
        assert (losses(run), tenant.module(run)) == calm


def test_a_second_sigterm_ends_a_warm_stop_and_hands_back_at_once_f09(tenant: Tenant) -> None:
    wanted: dict[str, Any] = {"steps": 400, "checkpoint": {"every_steps": 100}}  # some seconds
    undisturbed = tenant.submit(**wanted)
    undisturbed.result(TIMEOUT_S)
    run = tenant.submit(**wanted)
    reach(run, 5)
    worker = psutil.Process(tenant.stack.working("gpu"))
    asked = time.monotonic()
    worker.terminate()
    worker.terminate()
    worker.wait(10)
    reached = run.status().step
    assert reached < 400
    reach(run, reached + 1)
    assert time.monotonic() - asked < RTO_S + 20  # the start of a process on a busy machine
    run.result(TIMEOUT_S)
    assert (losses(run), tenant.module(run)) == (losses(undisturbed), tenant.module(undisturbed))
    assert tenant.steps(run) == list(range(1, 401))


def test_requests_are_answered_while_their_worker_is_restarted_again_and_again_f10(
    tenant: Tenant, calm: tuple[dict[int, float], str]
) -> None:
    """SIGTERM in the middle of a stream of requests: each has one effect and its answer."""
    run = tenant.submit(steps=3, checkpoint={})
    run.result(TIMEOUT_S)
    over = threading.Event()

    def ask() -> int:
        count = 0
        while not over.is_set():
            assert run.explain()["state"] == "succeeded"
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        submitted = []
        for number in range(RESTARTS):
            before = tenant.stack.working("control")
            psutil.Process(before).terminate()
            submitted.append(tenant.submit(steps=1, checkpoint={}, idempotency_key=f"f10-{number}"))
            tenant.stack.working("control", after=before)
        over.set()
        assert all(one.result(TIMEOUT_S) > 0 for one in asking)
    assert len({one.id for one in submitted}) == RESTARTS
    for one in submitted:
        assert one.result(TIMEOUT_S).step == 1


def test_a_long_job_is_cancelled_at_its_next_step_while_control_answers_pf08(
    tenant: Tenant, calm: tuple[dict[int, float], str]
) -> None:
    """A thread cannot be terminated: it looks for the cancellation itself."""
    long, mate = tenant.submit(steps=5000, checkpoint={}), tenant.submit()
    reach(long, 2)
    app = Celery("ping", broker=tenant.stack.admin.info.redis_url, set_as_current=False)
    answered = {name for one in app.control.ping(timeout=3.0) for name in one}
    asked = time.monotonic()
    assert long.cancel() == "cancelled"
    done = tenant.steps(long)
    assert time.monotonic() - asked < 5
    app.close()
    assert any(name.startswith("gpu@") for name in answered)
    mate.result(TIMEOUT_S)
    assert (losses(mate), tenant.steps(long)) == (calm[0], done)


def test_a_step_that_hangs_ends_its_worker_and_is_done_by_the_next_f15(
    tenant: Tenant, calm: tuple[dict[int, float], str]
) -> None:
    """Celery's own time limits do not act in this pool, and the heart beats on."""
    hangs = tenant.arm("gpu", Failpoint.BEFORE_STEP, 8, action="stall")
    run = tenant.submit()
    run.result(TIMEOUT_S)
    assert not psutil.pid_exists(hangs)
    assert tenant.steps(run) == list(range(1, STEPS + 1))
    assert (losses(run), tenant.module(run)) == calm


@pytest.fixture(scope="module")
def graded(tenant: Tenant) -> tuple[dict[str, Any], list[float], str]:
    """A run with every stage (grades, values, advantages), and what it learns in peace."""
    tuned = tenant.submit(steps=5, checkpoint={}, action_module={"kind": "oft", "chunk": 4})
    spec = offline(
        kind="rl", init_from=tuned.result(TIMEOUT_S).checkpoint, limits={"max_in_flight": 1},
        reward={"kind": "grader", "name": "peak_reward@1", "on_failure": "fail"},
    )  # fmt: skip
    run = tenant.submit(**spec)
    run.result(TIMEOUT_S)
    return spec, tenant.updates(run), tenant.module(run)


@pytest.mark.parametrize(
    ("role", "failpoint"),
    [
        ("sft", Failpoint.PAYLOAD_WRITTEN), ("sft", Failpoint.META_PUBLISHED),
        ("sft", Failpoint.COLUMNS_WRITTEN), ("gpu", Failpoint.COLUMNS_WRITTEN),
        ("gpu", Failpoint.AFTER_LEDGER_CLAIM), ("gpu", Failpoint.AFTER_STEPLOG),
        ("gpu", Failpoint.AFTER_MANIFEST),
    ],
)  # fmt: skip
def test_a_death_at_any_stage_of_rl_changes_no_update_f45(
    tenant: Tenant, graded: tuple[dict[str, Any], list[float], str], role: str, failpoint: Failpoint
) -> None:
    spec, expected, digest = graded
    run, _ = die_once(tenant, failpoint, 3, role=role, **spec)
    assert run.status().state == "succeeded"
    assert tenant.steps(run) == list(range(1, 9))
    assert (tenant.updates(run), tenant.module(run)) == (expected, digest)
    assert run.explain()["unscored"] == 0


def test_connections_that_drop_again_and_again_leave_nobody_deaf_f24_pf03(
    tenant: Tenant, calm: tuple[dict[int, float], str]
) -> None:
    """Every connection to the control Redis is cut ten times in three seconds, in mid-run."""
    run = tenant.submit()
    for _ in range(10):
        tenant.stack.admin.ledger.client.execute_command(
            "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"
        )
        time.sleep(0.3)  # the drops themselves
    after = tenant.submit()
    assert run.result(TIMEOUT_S).step == STEPS
    after.result(TIMEOUT_S)
    assert losses(after) == calm[0]
    for one in (run, after):
        assert tenant.steps(one) == list(range(1, STEPS + 1))


def test_a_worker_that_lives_and_hears_nothing_is_replaced_pf03(
    tenant: Tenant, calm: tuple[dict[int, float], str]
) -> None:
    """Its consumer stands still between two messages; all its other threads go on."""
    deaf = tenant.arm("gpu", Failpoint.AFTER_POP, 1, action="stall")
    run = tenant.submit()
    psutil.Process(deaf).wait(TIMEOUT_S)
    run.result(TIMEOUT_S)
    assert (losses(run), tenant.module(run)) == calm
    assert tenant.steps(run) == list(range(1, STEPS + 1))


def test_work_that_is_cancelled_while_no_worker_runs_never_starts_f19_pf07(tenant: Tenant) -> None:
    workers = [psutil.Process(tenant.stack.pid(role)) for role in ("sft", "gpu")]
    for worker in workers:
        worker.suspend()
    try:
        run = tenant.submit(steps=200)
        assert run.cancel() == "cancelled"
    finally:
        for worker in workers:
            worker.resume()
    other = tenant.submit(steps=3, checkpoint={})  # the workers have taken up what waited
    other.result(TIMEOUT_S)
    assert (run.status().state, run.metrics()) == ("cancelled", [])


def test_messages_sent_twice_and_messages_of_the_past_change_nothing_b29(
    tenant: Tenant, calm: tuple[dict[int, float], str]
) -> None:
    """Hints are hints: doubled, replayed and made up, they move no number."""
    run = tenant.submit()
    app = Celery("replay", broker=tenant.stack.admin.info.redis_url, set_as_current=False)
    for _ in range(5):
        app.send_task("sft.produce", kwargs={"tenant_id": "a", "workload": run.id}, queue="sft")
        app.send_task("sft.prepare", kwargs={"tenant_id": "a", "workload": run.id}, queue="sft")
        app.send_task("control.reconcile", queue="control")
        app.send_task(
            "training.train_job", queue="training",
            kwargs={"job_id": "j", "tenant_id": "a", "partition_id": "p", "base_model": "tiny"},
        )  # fmt: skip
    run.result(TIMEOUT_S)
    app.send_task("sft.produce", kwargs={"tenant_id": "a", "workload": run.id}, queue="sft")
    app.close()
    assert losses(run) == calm[0]
    assert tenant.steps(run) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_two_hundred_deaths(tenant: Tenant, calm: tuple[dict[int, float], str]) -> None:
    """Every failpoint in turn, at changing moments: every run ends, with the same numbers."""
    for number, failpoint in zip(range(ROUNDS), itertools.cycle(OF_SFT), strict=False):
        nth = NTH.get(failpoint) or 1 + number % 13
        run, _ = die_once(tenant, failpoint, nth)
        assert (run.status().state, losses(run)) == ("succeeded", calm[0]), (number, failpoint)
