"""A tenant's evaluations, once or by cron, and what they found."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vla_platform.client.connection import Connection, answers
from vla_platform.control.evaluation_jobs import parse_evaluation
from vla_platform.control.evaluations import evaluations_key
from vla_platform.control.schedule_policy import ScheduleState
from vla_platform.control.schedule_states import parse_schedule, state_key
from vla_platform.control.schedules import firing_table
from vla_platform.control.trends import Point, read_trend
from vla_platform.envs.evaluation_records import EvaluationArchive, EvaluationRecord
from vla_platform.errors import NotFoundError, PlatformError
from vla_platform.metrics.events import stream_of
from vla_platform.specs import canonical_json
from vla_platform.specs.evaluation import EvaluationSchedule, EvaluationSpec


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """A schedule that the platform has taken."""

    name: str
    next: tuple[str, ...]  # coming firings in its zone, ISO 8601 with offset


@dataclass(frozen=True)
class Evaluation:
    """One that is under way, or over."""

    evaluation_id: str
    policy_version: int
    num_episodes: int
    _book: ScheduleBook

    def result(self, timeout_s: float | None = None, *, poll_s: float = 1.0) -> EvaluationRecord:
        """Its record, once it is over. Raises `TimeoutError`: it goes on meanwhile; and
        `PlatformError` with the reason where it has failed."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            is_under_way = self._book.is_under_way(
                self.evaluation_id
            )  # before: its record is first
            try:
                return self._book.evaluation(self.evaluation_id)
            except NotFoundError:
                if not is_under_way:
                    time.sleep(poll_s)  # events travel by themselves
                    raise PlatformError(
                        f"evaluation {self.evaluation_id} has failed: "
                        f"{self._book.failure(self.evaluation_id)}",
                        evaluation=self.evaluation_id,
                    ) from None
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"evaluation {self.evaluation_id} is not over after {timeout_s:g} s; it "
                        "goes on, and `vla evaluations show` will have it"
                    ) from None
                time.sleep(poll_s)


class ScheduleBook:
    """Mixed into `Platform`."""

    tenant: str
    _connection: Connection

    def schedule(
        self,
        spec: EvaluationSpec | Mapping[str, Any],
        *,
        name: str,
        cron: str,
        timezone: str = "UTC",
        overlap: str = "skip",
        missed: str = "run_once",
        timeout_s: float = 60.0,
    ) -> Scheduled:
        """Evaluate by cron from now on; the version is resolved once at each firing.

        `cron` has five fields. `overlap` says what happens while the one before still runs: skip,
        queue or allow; `missed`, what becomes of firings that nobody served: run_once or record.
        Raises `SpecError`, `ConflictError` (the name is taken), `QuotaError`, `NotFoundError`.
        """
        checked = self.check_schedule(
            spec, name=name, cron=cron, timezone=timezone, overlap=overlap, missed=missed
        )
        answer = self._connection.call(
            "ingress.schedule",
            timeout_s=timeout_s,
            shown=f"{self.tenant}/{name}",
            schedule=canonical_json(checked.model_dump(mode="json")).decode(),
        )
        return Scheduled(name=answer["schedule"], next=tuple(answer["next"]))

    def check_schedule(
        self, spec: EvaluationSpec | Mapping[str, Any], **given: str
    ) -> EvaluationSchedule:
        """The schedule as it would be sent; `firing_table` tells when it fires."""
        evaluation = (
            spec.model_dump(mode="json") if isinstance(spec, EvaluationSpec) else dict(spec)
        )
        return parse_schedule(canonical_json({**given, "evaluation": evaluation}))

    def schedules(self) -> list[ScheduleState]:
        """All schedules of the tenant, by name; one that cannot be read is left out."""
        with answers():
            raw = self._connection.redis.hgetall(state_key(self.tenant))
        found = []
        for _, text in sorted(raw.items()):
            try:
                found.append(ScheduleState.from_json(text))
            except ValueError:
                continue
        return found

    def change_schedule(self, name: str, change: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """`pause`, `resume`, `run-now` or `remove`. Raises `NotFoundError`."""
        answer: dict[str, Any] = self._connection.call(
            "ingress.change_schedule",
            timeout_s=timeout_s,
            shown=f"{self.tenant}/{name}",
            name=name,
            change=change,
        )
        return answer

    def evaluate(
        self, spec: EvaluationSpec | Mapping[str, Any], *, timeout_s: float = 60.0
    ) -> Evaluation:
        """Evaluate once, now; returns when the platform has taken it for good.

        Raises `SpecError`, `NotFoundError` (no such policy, or nothing published yet),
        `QuotaError`, `UnavailableError`.
        """
        given = spec.model_dump(mode="json") if isinstance(spec, EvaluationSpec) else dict(spec)
        checked = parse_evaluation(canonical_json(given))
        answer = self._connection.call(
            "ingress.evaluate",
            timeout_s=timeout_s,
            shown=f"{self.tenant}/{checked.policy} on {checked.suite}",
            evaluation=canonical_json(checked.model_dump(mode="json")).decode(),
        )
        return Evaluation(answer["evaluation"], answer["policy_version"], checked.episodes, self)

    def evaluations(self, policy: str) -> list[Point]:
        """The policy's finished evaluations, oldest first."""
        return read_trend(self._connection.objects, self.tenant, policy)

    def evaluation(self, evaluation_id: str) -> EvaluationRecord:
        """With every episode. Raises `NotFoundError` before its end."""
        archive = EvaluationArchive(self._connection.objects, self.tenant, evaluation_id)
        record = archive.record()
        if record is None:
            raise NotFoundError(
                f"no finished evaluation {evaluation_id[:128]}", evaluation=evaluation_id[:128]
            )
        return record

    def is_under_way(self, evaluation_id: str) -> bool:
        with answers():
            found = self._connection.redis.hget(evaluations_key(self.tenant), evaluation_id)
        return found is not None

    def failure(self, evaluation_id: str) -> str:
        """Why an evaluation that was asked for once has no record."""
        with answers():
            told = self._connection.redis.xrevrange(
                stream_of(self.tenant, evaluation_id), "+", "-", count=1
            )
        last = json.loads(told[0][1]["event"]) if told else {}
        return str(last.get("reason", "the operator's log has why"))

    def film(self, key: str) -> bytes:
        """The MP4 of an episode, by the key in its record."""
        return self._connection.objects.get(key)


__all__ = ["Evaluation", "ScheduleBook", "Scheduled", "firing_table"]
