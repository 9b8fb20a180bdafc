"""Keeps a leased job for as long as somebody works on it, however long a step takes."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from vla_platform.control.ledger import Ledger
from vla_platform.control.training_job import TrainingJob
from vla_platform.errors import LeaseLostError
from vla_storage.errors import CodedError

_log = logging.getLogger(__name__)


class Keeper:
    """What the work asks between its steps: raises once the lease is lost."""

    def __init__(self) -> None:
        self.lost: LeaseLostError | None = None
        self.progress = ""

    def check(self, progress: str = "") -> None:
        """Raises `LeaseLostError` once the work is cancelled or somebody else's."""
        self.progress = progress or self.progress
        if self.lost is not None:
            raise self.lost


@contextmanager
def kept_alive(
    ledger: Ledger,
    job: TrainingJob,
    *,
    lease_s: float,
    producing: bool = False,
    by: str = "somebody",
) -> Iterator[Keeper]:
    """Renew the job's lease from a thread; with `producing`, also that `by` is at its run."""
    keeper, over = Keeper(), threading.Event()

    def renew() -> None:
        while not over.wait(lease_s / 4):
            try:
                ledger.renew(job, lease_s=lease_s, progress=keeper.progress)
                if producing:
                    ledger.claim(job.workload, for_s=lease_s, by=by)
            except LeaseLostError as error:
                keeper.lost = error
                return
            except CodedError as error:
                _log.warning("action=renewal_failed job=%s reason=%s", job.job_id, error)

    with _beside(renew, over, name=f"lease-{job.job_id[-12:]}"):
        yield keeper


@contextmanager
def given_back(ledger: Ledger, job: TrainingJob) -> Iterator[None]:
    """A service that is down, or full, is not the job's fault: it goes back uncounted, and comes
    again after a while, so that who waits for one tenant's storage holds up nobody else."""
    try:
        yield
    except CodedError as error:
        if error.retryable:
            with suppress(CodedError):  # else it goes back when its lease runs out
                ledger.release(job, backs_off=True)
        raise


@contextmanager
def announced(ledger: Ledger, run: str, *, for_s: float) -> Iterator[None]:
    """Let the reconciler know that somebody prepares this run."""
    over = threading.Event()

    def announce() -> None:
        while True:
            try:
                ledger.preparing(run, for_s=for_s)
            except CodedError as error:
                _log.warning("action=announcement_failed workload=%s reason=%s", run, error)
            if over.wait(for_s / 4):
                return

    with _beside(announce, over, name="preparing"):
        yield


@contextmanager
def alone(ledger: Ledger, work: str, *, lease_s: float) -> Iterator[Keeper | None]:
    """None: somebody else is at this work. Otherwise nobody else will be until this ends, or until
    the keeper's `check` raises."""
    keeper, by, over = Keeper(), secrets.token_hex(8), threading.Event()
    renewed_s = time.monotonic()
    if not ledger.claim(work, for_s=lease_s, by=by):
        yield None
        return

    def renew() -> None:
        nonlocal renewed_s
        while not over.wait(lease_s / 4):
            asked_s = time.monotonic()
            try:
                ledger.renew_claim(work, for_s=lease_s, by=by)
                renewed_s = asked_s
            except LeaseLostError as error:
                keeper.lost = error
                return
            except CodedError as error:
                _log.warning("action=renewal_failed work=%s reason=%s", work, error)
                if time.monotonic() - renewed_s > lease_s:
                    keeper.lost = LeaseLostError(f"{work} could not be kept: {error}", work=work)
                    return

    try:
        with _beside(renew, over, name="alone"):
            yield keeper
    finally:
        try:
            ledger.release_claim(work, by=by)
        except CodedError as error:  # it runs out by itself
            _log.warning("action=release_failed work=%s reason=%s", work, error)


@contextmanager
def _beside(work: Callable[[], None], over: threading.Event, *, name: str) -> Iterator[None]:
    """A thread that does `work` until `over`, which is set at the end."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5)
