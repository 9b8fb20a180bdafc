"""The grading task: group rewards of rollouts, while others go on rolling out.

It reads the columns that the grader asks for and writes one, `grade`. The ledger gives up what is
late (`OnUnscored`), and here nobody waits for a grader longer: one that hangs costs its deadline
and a thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from vla_platform.control import dispatch
from vla_platform.control.advantages import columns_of_summaries, episodes_of
from vla_platform.control.leases import given_back, kept_alive
from vla_platform.control.services import Services
from vla_platform.control.stage_work import compute_waiting
from vla_platform.control.states import DropReason, JobState, Stage, state_after
from vla_platform.control.training_job import SAMPLES_TTL_S, TrainingJob
from vla_platform.control.workloads import load_rl_spec
from vla_platform.errors import DataError, LeaseLostError
from vla_platform.failpoints import Failpoint, reach
from vla_platform.metrics.events import Event
from vla_platform.rl.graders import GRADERS, Grader, grade_episodes
from vla_platform.rl.groups import find_hook
from vla_platform.rl.rewards import GRADE
from vla_platform.specs import GraderReward
from vla_storage.errors import CodedError, PayloadExistsError, PayloadNotFoundError

T = TypeVar("T")
_log = logging.getLogger(__name__)


def grade_waiting(services: Services, worker: str) -> int:
    """Lease and grade what waits, for one slice; returns how many jobs that were."""
    return compute_waiting(services, Stage.SCORES, worker, _grade)


def _grade(services: Services, job: TrainingJob) -> None:
    ledger = services.ledger
    begun = time.monotonic()
    try:
        with given_back(ledger, job):
            with kept_alive(ledger, job, lease_s=services.settings.lease_s) as keeper:
                values = _write_grades(services, job)
                keeper.check()
            reach(Failpoint.COLUMNS_WRITTEN)
            state = state_after(job.lifecycle, JobState.COMPUTING_SCORES)
            if ledger.mark(job, state, scored=1):
                dispatch.go_on(job, state)
    except LeaseLostError as error:
        _log.warning("action=grades_refused job=%s reason=%s", job.job_id, error)
    except PayloadNotFoundError as error:
        _log.warning("action=samples_lost job=%s reason=%s", job.job_id, error)
        with contextlib.suppress(LeaseLostError):
            ledger.drop(job, DropReason.SAMPLES_LOST)
    except CodedError as error:
        if error.retryable:
            raise
        _log.warning("action=grader_failed job=%s reason=%s", job.job_id, error)
        with contextlib.suppress(LeaseLostError):
            ledger.unscored(job, str(error)[:400])
    else:
        values |= {"position": job.position, "seconds": round(time.monotonic() - begun, 3)}
        services.emitter.emit(
            Event(tenant=job.tenant_id, workload=job.workload, kind="grades", values=values)
        )


def within(seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises. Raises `TimeoutError` where that takes longer: its thread goes
    on, for nothing ends a thread, but nobody waits for it."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="grader", daemon=True).start()
    return done.result(seconds)


def _write_grades(services: Services, job: TrainingJob) -> dict[str, float | str]:
    """What an earlier try wrote stays: a grader may say something else the second time."""
    reward = load_rl_spec(services, job.tenant_id, job.workload).reward
    assert isinstance(reward, GraderReward)  # nothing else waits in this queue
    payloads = services.payloads
    there = payloads.metadata(job.partition_id, job.tenant_id)
    if GRADE in there:
        return {"grader": reward.name}
    grader: Grader = find_hook(reward.name, GRADERS)
    missing = sorted({"episode", "is_transition", *grader.columns} - set(there))
    if there and missing:
        raise DataError(
            f"{reward.name} reads {', '.join(missing)}, which is missing", column=missing[0]
        )
    told = services.ledger.descriptor(job.job_id)
    names = {"episode", "is_transition", *grader.columns, *columns_of_summaries(told, there)}
    columns = payloads.arrays(job.partition_id, job.tenant_id, sorted(names))
    episodes = episodes_of(told, columns)
    try:
        grades = within(
            reward.deadline_s, lambda: grade_episodes(grader, episodes, columns, reward.options)
        )
    except CodedError:
        raise
    except Exception as error:  # a grader is anybody's code: whatever it raises is its failure
        raise DataError(f"{reward.name} failed: {error!r}", column=GRADE) from error
    column = np.array([grades[int(one)] for one in columns["episode"]], np.float32)
    try:
        payloads.put(
            job.partition_id, job.tenant_id, {GRADE: column}, ttl_s=SAMPLES_TTL_S, wait_s=5.0
        )
    except PayloadExistsError:
        _log.info("action=graded_before job=%s", job.job_id)
    return {
        "grader": reward.name,
        "mean_score": float(np.mean([one.score for one in episodes])),
        "mean_grade": float(np.mean(list(grades.values()))),
    }
