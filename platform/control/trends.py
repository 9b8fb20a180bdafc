"""How a policy's evaluations go over time, and when that is an alarm.

Two evaluations are compared where their suites are equal but for the seed. The alarm is a drop
whose own 95 % interval (Newcombe 1998, method 10: from the two Wilson intervals) excludes zero.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from vla_platform.control.services import Services
from vla_platform.envs.evaluation_records import EvaluationRecord
from vla_platform.metrics.events import Event
from vla_storage.errors import ObjectNotFoundError
from vla_storage.names import check_name
from vla_storage.objects import ObjectStore

WORKLOAD = "evaluations"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One evaluation in a trend."""

    evaluation_id: str
    suite: str
    policy_version: int
    num_episodes: int
    num_successes: int
    success_rate: float
    interval_low: float
    interval_high: float
    finished: float  # seconds since the epoch
    module_digest: str = ""

    @classmethod
    def of(cls, record: EvaluationRecord) -> Point:
        names = cls.__dataclass_fields__
        return cls(**{name: getattr(record, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Change:
    """From one evaluation to another: positive is better."""

    before: Point
    now: Point
    change: float
    low: float  # 95 % interval of the change
    high: float

    @property
    def is_regression(self) -> bool:
        return self.high < 0.0

    @property
    def is_improvement(self) -> bool:
        return self.low > 0.0


def compare(before: Point, now: Point) -> Change:
    """The difference of two success rates with its interval."""
    change = now.success_rate - before.success_rate
    low = change - math.hypot(
        now.success_rate - now.interval_low, before.interval_high - before.success_rate
    )
    high = change + math.hypot(
        now.interval_high - now.success_rate, before.success_rate - before.interval_low
    )
    return Change(before=before, now=now, change=change, low=low, high=high)


def latest_change(points: Sequence[Point]) -> Change | None:
    """Of the newest point against the one before it of the same suite; None without one."""
    if not points:
        return None
    now = points[-1]
    before = [one for one in points[:-1] if one.suite == now.suite]
    return compare(before[-1], now) if before else None


def trend_key(tenant: str, policy: str) -> str:
    """The folder of a policy's trend: one small object per evaluation."""
    return f"{tenant}/evaluations/trends/{check_name('policy', policy)}/"


def read_trend(objects: ObjectStore, tenant: str, policy: str) -> list[Point]:
    """Oldest first."""
    found = []
    for info in objects.list(trend_key(tenant, policy)):
        try:
            found.append(Point(**json.loads(objects.get(info.key))))
        except ObjectNotFoundError:
            continue
    return sorted(found, key=lambda one: one.finished)


def _point_key(evaluation: EvaluationRecord) -> str:
    policy = evaluation.policy_key.partition("/")[2]
    return f"{trend_key(evaluation.tenant, policy)}{evaluation.evaluation_id}.json"


def knows(objects: ObjectStore, evaluation: EvaluationRecord) -> bool:
    """Whether it is in its policy's trend."""
    key = _point_key(evaluation)
    return any(info.key == key for info in objects.list(key))


def record(services: Services, evaluation: EvaluationRecord) -> Change | None:
    """Add a finished evaluation to its policy's trend; a regression is told as an event.

    Safe to repeat: the point's key is the evaluation's id.
    """
    policy = evaluation.policy_key.partition("/")[2]
    point = Point.of(evaluation)
    services.objects.put(_point_key(evaluation), json.dumps(asdict(point)).encode())
    points = read_trend(services.objects, evaluation.tenant, policy)
    upto = [one for one in points if one.finished <= point.finished]
    change = latest_change(upto)
    values = {
        "policy": policy,
        "suite": point.suite,
        "evaluation": point.evaluation_id,
        "policy_version": point.policy_version,
        "success_rate": point.success_rate,
        "interval_low": point.interval_low,
        "interval_high": point.interval_high,
        "regression": bool(change and change.is_regression),
        "change": None if change is None else round(change.change, 4),
        "before": None if change is None else change.before.evaluation_id,
    }
    services.emitter.emit(
        Event(tenant=evaluation.tenant, workload=WORKLOAD, kind="evaluated", values=values)
    )
    return change
