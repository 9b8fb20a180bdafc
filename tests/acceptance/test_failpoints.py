"""Processes die at every named place of a training job's life: nothing lost, nothing twice.

Real processes, one tenant, the random base model. A worker is armed through a file that is read
once per process, so each death happens once and the process that follows it is sound.
"""

from __future__ import annotations

import itertools
import os
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
from vla_platform.cli.tenants import Operator, operator
from vla_platform.client import Platform, Run
from vla_platform.datasets.recording import make_demonstrations
from vla_platform.envs.tabletop import Tabletop
from vla_platform.failpoints import Failpoint
from vla_platform.stack import operate
from vla_storage.checkpoints import CheckpointStore

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


class Stack:
    def __init__(self, var: Path, admin: Operator, platform: Platform, armed: Path) -> None:
        self.var, self.admin, self.platform, self.armed = var, admin, platform, armed

    def pid(self, role: str) -> int | None:
        return next(one.pid for one in operate.status(self.var) if one.role == role)

    def restarted(self, role: str, before: int | None) -> int:
        """Wait for the process after `before`, and until it works."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found = next(one for one in operate.status(self.var) if one.role == role)
            if found.pid not in (None, before, 0) and str(found.state) == "running":
                assert found.pid is not None
                return found.pid
            time.sleep(0.05)
        raise AssertionError(f"{role} did not come back")

    def arm(self, role: str, failpoint: Failpoint, nth: int) -> int:
        """Restart `role` with a failpoint; the process after it will have none."""
        self.armed.write_text(f"{failpoint}:kill:{nth}")
        before = self.pid(role)
        psutil.Process(before).kill()
        after = self.restarted(role, before)
        return after

    def submit(self, **changes: Any) -> Run:
        if changes.get("kind") == "rl":
            return self.platform.submit({"policy": f"p{next(seeds)}", **changes})
        return self.platform.submit(
            {
                "kind": "sft",
                "policy": f"p{next(seeds)}",
                "dataset": {"path": "reach", "heldout_samples": 8},
                "steps": STEPS,
                "batch_size": 4,
                "checkpoint": {"every_steps": 10},
                **changes,
            }
        )

    def module_digest(self, run: Run) -> str:
        key = self.admin.info.signing_key_file.read_bytes().strip()
        store = CheckpointStore(objects=self.admin.objects, tenant_id="a", signing_key=key)
        manifest = store.verify(run.status().checkpoint or "")
        return next(one.sha256 for one in manifest.objects if one.name == "module.safetensors")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("failpoints")
    make_demonstrations(folder / "data" / "reach", env=Tabletop(), episodes=8, seed=0)
    write_mixed(folder / "data" / "mixed")
    var, armed = folder / "var", folder / "failpoint"
    environment = {
        **os.environ, "VLA_BASE_MODELS": "tiny=tiny-random", "VLA_FAILPOINT": f"@{armed}",
        "VLA_SLICE_S": "1", "VLA_TRAINING_WATCHDOG_S": "15",
    }  # fmt: skip
    try:
        operate.up(var, environment=environment, dataset_roots=str(folder / "data"), timeout_s=180)
        with operator(var) as admin, Platform(admin.add("a")) as platform:
            yield Stack(var, admin, platform, armed)
    finally:
        operate.down(var)


@pytest.fixture(scope="module")
def calm(stack: Stack) -> tuple[dict[int, float], str]:
    run = stack.submit()
    run.result(TIMEOUT_S)
    return losses(run), stack.module_digest(run)


def reach(run: Run, step: int) -> None:
    end = time.monotonic() + TIMEOUT_S
    while run.status().step < step:
        assert time.monotonic() < end, f"{run.id} does not reach step {step}"
        time.sleep(0.02)


def losses(run: Run) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in run.metrics() if event["kind"] == "step"}


def die_once(
    stack: Stack, failpoint: Failpoint, nth: int, *, role: str = "", **spec: Any
) -> tuple[Run, float]:
    """A run during which a worker dies at `failpoint`; returns it and the longest pause."""
    role = role or ROLE.get(failpoint, "gpu")
    pid = stack.arm(role, failpoint, nth)
    run = stack.submit(**spec)
    died, longest, last = False, 0.0, time.monotonic()
    step = -1
    end = time.monotonic() + TIMEOUT_S
    while not (status := run.status()).is_over:
        assert time.monotonic() < end, f"{run.id} hangs at step {status.step}"
        if not died and not psutil.pid_exists(pid):
            died = True
            stack.armed.unlink(missing_ok=True)
            last = time.monotonic()
        if status.step != step:
            longest = max(longest, time.monotonic() - last if died else 0.0)
            step, last = status.step, time.monotonic()
        time.sleep(0.02)
    stack.armed.unlink(missing_ok=True)
    assert died or not psutil.pid_exists(pid), f"{failpoint} was not reached"
    return run, longest


@pytest.mark.parametrize("failpoint", OF_SFT)
def test_a_death_at_a_named_place_loses_and_doubles_nothing_f01_f55_pf02(
    stack: Stack, calm: tuple[dict[int, float], str], failpoint: Failpoint
) -> None:
    run, pause_s = die_once(stack, failpoint, NTH.get(failpoint, 8))
    assert run.status().state == "succeeded"
    assert list(stack.admin.ledger.steps(run.id)) == list(range(1, STEPS + 1))
    assert (losses(run), stack.module_digest(run)) == calm
    assert pause_s < RTO_S + 10  # the promise, and the start of a process on a busy machine


def test_a_death_in_mid_step_of_one_of_three_moves_nobody_f04(
    stack: Stack, calm: tuple[dict[int, float], str]
) -> None:
    """Its mates' steps of that group are durable or done again, never half."""
    pid = stack.arm("gpu", Failpoint.BEFORE_OPTIMIZER, 20)
    runs = [stack.submit() for _ in range(3)]
    psutil.Process(pid).wait(TIMEOUT_S)
    stack.armed.unlink()  # the process after it will have none
    for run in runs:
        run.result(TIMEOUT_S)
        assert list(stack.admin.ledger.steps(run.id)) == list(range(1, STEPS + 1))
        assert (losses(run), stack.module_digest(run)) == calm


def test_a_second_sigterm_ends_a_warm_stop_and_hands_back_at_once_f09(
    stack: Stack, calm: tuple[dict[int, float], str]
) -> None:
    run = stack.submit()
    reach(run, 5)
    pid = stack.pid("gpu")
    worker = psutil.Process(pid)
    asked = time.monotonic()
    worker.terminate()
    worker.terminate()
    worker.wait(10)
    reach(run, run.status().step + 1)
    assert time.monotonic() - asked < RTO_S + 10
    run.result(TIMEOUT_S)
    assert (losses(run), stack.module_digest(run)) == calm
    assert list(stack.admin.ledger.steps(run.id)) == list(range(1, STEPS + 1))


def test_requests_are_answered_while_their_worker_is_restarted_again_and_again_f10(
    stack: Stack, calm: tuple[dict[int, float], str]
) -> None:
    """SIGTERM in the middle of a stream of requests: each has one effect and its answer."""
    run = stack.submit(steps=3, checkpoint={})
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
            before = stack.pid("control")
            psutil.Process(before).terminate()
            submitted.append(stack.submit(steps=1, checkpoint={}, idempotency_key=f"f10-{number}"))
            stack.restarted("control", before)
        over.set()
        assert all(one.result(TIMEOUT_S) > 0 for one in asking)
    assert len({one.id for one in submitted}) == RESTARTS
    for one in submitted:
        assert one.result(TIMEOUT_S).step == 1


def test_a_long_job_is_cancelled_at_its_next_step_while_control_answers_pf08(
    stack: Stack, calm: tuple[dict[int, float], str]
) -> None:
    """A thread cannot be terminated: it looks for the cancellation itself."""
    long, mate = stack.submit(steps=5000, checkpoint={}), stack.submit()
    reach(long, 2)
    app = Celery("ping", broker=stack.admin.info.redis_url, set_as_current=False)
    answered = {name for one in app.control.ping(timeout=3.0) for name in one}
    asked = time.monotonic()
    assert long.cancel() == "cancelled"
    done = stack.admin.ledger.steps(long.id)
    assert time.monotonic() - asked < 5
    app.close()
    assert any(name.startswith("gpu@") for name in answered)
    mate.result(TIMEOUT_S)
    assert (losses(mate), stack.admin.ledger.steps(long.id)) == (calm[0], done)


def test_a_step_that_hangs_ends_its_worker_and_is_done_by_the_next_f15(
    stack: Stack, calm: tuple[dict[int, float], str]
) -> None:
    """Celery's own time limits do not act in this pool, and the heart beats on."""
    stack.armed.write_text(f"{Failpoint.BEFORE_STEP}:stall:8")
    before = stack.pid("gpu")
    psutil.Process(before).kill()
    hangs = stack.restarted("gpu", before)
    run = stack.submit()
    reach(run, 1)
    stack.armed.unlink()  # it was read; the process after it will have none
    run.result(TIMEOUT_S)
    assert not psutil.pid_exists(hangs)
    assert list(stack.admin.ledger.steps(run.id)) == list(range(1, STEPS + 1))
    assert (losses(run), stack.module_digest(run)) == calm


@pytest.fixture(scope="module")
def graded(stack: Stack) -> tuple[dict[str, Any], list[float], str]:
    """A run with every stage (grades, values, advantages), and what it learns in peace."""
    tuned = stack.submit(steps=5, checkpoint={}, action_module={"kind": "oft", "chunk": 4})
    spec = offline(
        kind="rl", init_from=tuned.result(TIMEOUT_S).checkpoint, limits={"max_in_flight": 1},
        reward={"kind": "grader", "name": "peak_reward@1", "on_failure": "fail"},
    )  # fmt: skip
    run = stack.submit(**spec)
    run.result(TIMEOUT_S)
    return spec, update_losses(run), stack.module_digest(run)


def update_losses(run: Run) -> list[float]:
    return [event["loss"] for event in run.metrics() if event["kind"] == "update"]


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
    stack: Stack, graded: tuple[dict[str, Any], list[float], str], role: str, failpoint: Failpoint
) -> None:
    spec, expected, digest = graded
    run, _ = die_once(stack, failpoint, 3, role=role, **spec)
    assert run.status().state == "succeeded"
    assert list(stack.admin.ledger.steps(run.id)) == list(range(1, 9))
    assert (update_losses(run), stack.module_digest(run)) == (expected, digest)
    assert run.explain()["unscored"] == 0


def test_connections_that_drop_again_and_again_leave_nobody_deaf_f24_pf03(
    stack: Stack, calm: tuple[dict[int, float], str]
) -> None:
    """Every connection to the control Redis is cut ten times in three seconds, in mid-run."""
    run = stack.submit()
    for _ in range(10):
        stack.admin.ledger.client.execute_command(
            "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"
        )
        time.sleep(0.3)  # the drops themselves
    after = stack.submit()
    assert run.result(TIMEOUT_S).step == STEPS
    after.result(TIMEOUT_S)
    assert losses(after) == calm[0]
    for one in (run, after):
        assert list(stack.admin.ledger.steps(one.id)) == list(range(1, STEPS + 1))


def test_work_that_is_cancelled_while_no_worker_runs_never_starts_f19_pf07(stack: Stack) -> None:
    workers = [psutil.Process(stack.pid(role)) for role in ("sft", "gpu")]
    for worker in workers:
        worker.suspend()
    try:
        run = stack.submit(steps=200)
        assert run.cancel() == "cancelled"
    finally:
        for worker in workers:
            worker.resume()
    other = stack.submit(steps=3, checkpoint={})  # the workers have taken up what waited
    other.result(TIMEOUT_S)
    assert (run.status().state, run.metrics()) == ("cancelled", [])


def test_messages_sent_twice_and_messages_of_the_past_change_nothing_b29(
    stack: Stack, calm: tuple[dict[int, float], str]
) -> None:
    """Hints are hints: doubled, replayed and made up, they move no number."""
    run = stack.submit()
    app = Celery("replay", broker=stack.admin.info.redis_url, set_as_current=False)
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
    assert list(stack.admin.ledger.steps(run.id)) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_two_hundred_deaths(stack: Stack, calm: tuple[dict[int, float], str]) -> None:
    """Every failpoint in turn, at changing moments: every run ends, with the same numbers."""
    for number, failpoint in zip(range(ROUNDS), itertools.cycle(OF_SFT), strict=False):
        nth = NTH.get(failpoint) or 1 + number % 13
        run, _ = die_once(stack, failpoint, nth)
        assert (run.status().state, losses(run)) == ("succeeded", calm[0]), (number, failpoint)
