"""A run: a submitted workload, watched, awaited and cancelled by its tenant."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_platform.client.connection import Connection, answers
from vla_platform.control.states import PASSING_WAITS, WorkloadState, is_terminal
from vla_platform.errors import (
    NotFoundError,
    PlatformError,
    QuotaError,
    ResultTimeoutError,
    UnavailableError,
    WorkloadCancelledError,
    WorkloadFailedError,
    to_error,
)
from vla_platform.schema import Schema
from vla_storage.errors import ObjectNotFoundError, PayloadError
from vla_storage.payloads.columns import ColumnData
from vla_storage.payloads.writing import check_columns

OUTAGE_S = 120.0
"""Whoever waits for a run rides out a platform that does not answer for so long."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    run: str
    state: WorkloadState
    policy: str
    kind: str
    step: int
    total_steps: int | None  # None: the data is still being prepared
    policy_version: int
    checkpoint: str | None  # id of the newest published one
    reason: dict[str, Any] | None  # why it failed or was cancelled
    created_s: float  # seconds since the epoch, by the platform's clock
    updated_s: float
    history: tuple[dict[str, Any], ...] = field(repr=False, default=())

    @property
    def is_over(self) -> bool:
        return is_terminal(self.state)


def metrics_of(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Step, held-out and update events by step, one per step and kind: what was redone counts once.

    Of each rollout the last event, its `step` the rollout's number from 1.
    """
    kept: dict[tuple[str, int], dict[str, Any]] = {}
    for event in events:
        if event["kind"] in ("step", "heldout", "update"):
            kept[event["kind"], event["step"]] = event
        elif event["kind"] == "rollout":
            number = event["position"] + 1
            kept["rollout", number] = {**event, "step": number}
    return sorted(kept.values(), key=lambda event: (event["step"], event["kind"] == "heldout"))


class Run:
    """Returned by `Platform.submit`. `await run` or `run.result(timeout_s)` wait for the end."""

    def __init__(self, connection: Connection, run_id: str) -> None:
        self._connection = connection
        self.id = run_id

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    def __await__(self) -> Generator[Any, None, RunStatus]:
        return asyncio.to_thread(self.result).__await__()

    def status(self) -> RunStatus:
        """Raises `NotFoundError` for an id that is not this tenant's."""
        key = self._connection.key(f"w:{self.id}")
        with answers():
            raw = self._connection.redis.hgetall(key)
            history = self._connection.redis.lrange(f"{key}:history", 0, -1)
        if not raw:
            raise NotFoundError(f"no run {self.id}", workload=self.id)
        return RunStatus(
            run=self.id,
            state=WorkloadState(raw["state"]),
            policy=raw["policy"],
            kind=raw["kind"],
            step=int(raw["step"]),
            total_steps=int(raw["total_steps"]) if "total_steps" in raw else None,
            policy_version=int(raw.get("base_version", 0)) + int(raw["step"]),
            checkpoint=raw.get("checkpoint"),
            reason=json.loads(raw["reason"]) if raw.get("reason") else None,
            created_s=int(raw["created"]) / 1000,
            updated_s=int(raw["updated"]) / 1000,
            history=tuple(json.loads(line) for line in history),
        )

    def events(self, *, follow: bool = True, poll_s: float = 1.0) -> Iterator[dict[str, Any]]:
        """States and metrics in order; with `follow` until the run is over.

        Each is a flat dict with `kind`: state, step, heldout or checkpoint.
        """
        stream = self._connection.key(f"w:{self.id}:events")
        last = "0"
        answered = time.monotonic()
        while True:
            try:
                over = self.status().is_over
                block = None if over or not follow else int(poll_s * 1000)
                with answers():
                    found = self._connection.redis.xread({stream: last}, count=1000, block=block)
            except UnavailableError:
                if not follow or time.monotonic() - answered > OUTAGE_S:
                    raise
                time.sleep(poll_s)
                continue
            answered = time.monotonic()
            for entry, fields in found[0][1] if found else []:
                last = entry
                yield json.loads(fields["event"])
            if not found and (over or not follow):
                return

    def metrics(self) -> list[dict[str, Any]]:
        """What `metrics_of` makes of the events so far."""
        return metrics_of(self.events(follow=False))

    def result(self, timeout_s: float | None = None) -> RunStatus:
        """Wait for the end. Raises `WorkloadFailedError` with the reason,
        `WorkloadCancelledError`, or `ResultTimeoutError` (the run goes on)."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 0.05
        answered = time.monotonic()
        while True:
            try:
                status = self.status()
                answered = time.monotonic()
                if status.is_over:
                    break
            except UnavailableError:
                if time.monotonic() - answered > OUTAGE_S:
                    raise
                time.sleep(1.0)
                continue
            if end is not None and time.monotonic() >= end:
                raise ResultTimeoutError(
                    f"{self.id} is {status.state} at step {status.step} after {timeout_s:g} s; "
                    "it goes on",
                    workload=self.id,
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 1.0)
        if status.state is WorkloadState.FAILED:
            reason = status.reason or {}
            raise WorkloadFailedError(
                f"{self.id} failed: {reason.get('message')}", workload=self.id, reason=reason
            ) from to_error(reason)
        if status.state is WorkloadState.CANCELLED:
            raise WorkloadCancelledError(f"{self.id} was cancelled", workload=self.id)
        return status

    def spec(self) -> dict[str, Any]:
        """The spec as the platform took it, every default filled in."""
        key = f"{self._connection.tenant}/workloads/{self.id}/spec.json"
        found: dict[str, Any] = json.loads(self._connection.objects.get(key))
        return found

    def schema(self, *, timeout_s: float = 60.0) -> Schema:
        """The interface of the run's policy: `cameras`, `image_size`, `chunk`, dimensions.

        It is known once the run is prepared, which is waited for. Raises `TimeoutError`.
        """
        key = f"{self._connection.tenant}/workloads/{self.id}/prepared.json"
        end = time.monotonic() + timeout_s
        while True:
            try:
                return Schema.from_dict(json.loads(self._connection.objects.get(key))["schema"])
            except ObjectNotFoundError:
                if time.monotonic() > end:
                    raise TimeoutError(f"{self.id} is not prepared after {timeout_s:g} s") from None
                time.sleep(0.2)

    def train_batch(
        self, columns: Mapping[str, ColumnData], *, timeout_s: float = 120.0
    ) -> dict[str, Any]:
        """One update on samples of your own, for a run with `environment: null`; returns its event.

        Columns, leading R (see `docs/custom-algorithms.md`): `latent, log_prob` as `predict`
        returned them, `state`, `is_transition`, `advantages (R, H)`, `trained (R, H)`, and
        `images` and `prompt`, or `feature`. Without `advantages` the platform computes them by the
        spec's algorithm from `rewards` and what marks the ends of episodes.

        Raises `PayloadError` for columns that cannot be stored, `QuotaError` while the run takes no
        batch, `WorkloadFailedError` where it ended. What never came to be sent leaves the run as it
        was.
        """
        check_columns(columns)
        if "is_transition" not in columns:
            raise PayloadError("column 'is_transition' is missing", column="is_transition")
        call = functools.partial(self._connection.call, shown=self.id, run=self.id)
        end = time.monotonic() + timeout_s
        while True:
            try:
                job = call("ingress.reserve_batch", timeout_s=timeout_s)
                break
            except QuotaError as error:
                if (
                    error.details.get("waits_for") not in {*PASSING_WAITS, WorkloadState.PENDING}
                    or time.monotonic() > end
                ):
                    raise
                time.sleep(0.05)
        payloads = self._connection.payloads
        partition, tenant = job["partition_id"], self._connection.tenant
        try:
            payloads.put(partition, tenant, columns, ttl_s=3600.0, wait_s=timeout_s, owner="tenant")
        except BaseException:
            # Where this fails too, the reservation ends by itself.
            with contextlib.suppress(PlatformError):
                fence = str(job["fence"])
                call("ingress.release_batch", timeout_s=10.0, job_id=job["job_id"], fence=fence)
            raise
        with answers():
            newest = self._connection.redis.xrevrange(
                self._connection.key(f"w:{self.id}:events"), count=1
            )
        last = newest[0][0] if newest else "0"
        call(
            "ingress.submit_batch",
            timeout_s=timeout_s,
            job_id=job["job_id"],
            fence=str(job["fence"]),
            samples=str(np.asarray(columns["is_transition"]).size),
        )
        return self._update_of(job["job_id"], last, end=end)

    def _update_of(self, job_id: str, last: str, *, end: float) -> dict[str, Any]:
        """The update event of a job, among those after `last`."""
        stream = self._connection.key(f"w:{self.id}:events")
        while True:
            with answers():
                found = self._connection.redis.xread({stream: last}, count=1000, block=2000)
            for entry, fields in found[0][1] if found else []:
                last = entry
                event: dict[str, Any] = json.loads(fields["event"])
                if event["kind"] == "update" and event["job_id"] == job_id:
                    return event
            if found:
                continue
            state = self._connection.call(
                "ingress.batch_state", timeout_s=30.0, shown=self.id, run=self.id, job_id=job_id
            )
            if state["state"] == "completed":  # its event was lost
                return {"kind": "update", "job_id": job_id, **state}
            if state["state"] in ("dropped", "failed", "cancelled"):
                if self.status().is_over:
                    self.result(5)
                raise PlatformError(
                    f"the batch was {state['state']}: {state['terminal_reason']}", workload=self.id
                )
            if time.monotonic() > end:
                raise ResultTimeoutError(
                    f"{job_id} is {state['state']}; it goes on", workload=self.id
                )

    def pause(self, *, timeout_s: float = 30.0) -> WorkloadState:
        """Begin nothing new; what is in flight ends. Raises `IllegalTransitionError` where the
        run is not running."""
        return self._shift("ingress.pause", timeout_s)

    def resume(self, *, timeout_s: float = 30.0) -> WorkloadState:
        return self._shift("ingress.resume", timeout_s)

    def _shift(self, task: str, timeout_s: float) -> WorkloadState:
        answer = self._connection.call(task, timeout_s=timeout_s, shown=self.id, run=self.id)
        return WorkloadState(answer)

    def explain(self, *, timeout_s: float = 30.0) -> dict[str, Any]:
        """What the run waits for: `waits_for, position, estimate_s, jobs, dropped, unscored`."""
        answer: dict[str, Any] = self._connection.call(
            "ingress.explain", timeout_s=timeout_s, shown=self.id, run=self.id
        )
        return answer

    def timeline(self, job_id: str, *, timeout_s: float = 30.0) -> list[dict[str, Any]]:
        """The life of one training job (`job_id` of a step or update event): phases with `name,
        begun_s, ended_s, where, note`. Raises `NotFoundError` a day after its end."""
        answer: list[dict[str, Any]] = self._connection.call(
            "ingress.timeline", timeout_s=timeout_s, shown=self.id, run=self.id, job_id=job_id
        )
        return answer

    def cancel(self, *, timeout_s: float = 30.0) -> WorkloadState:
        """Final. Returns the state it ended in, which may be an earlier end."""
        answer = self._connection.call(
            "ingress.cancel", timeout_s=timeout_s, shown=self.id, run=self.id
        )
        return WorkloadState(answer)
