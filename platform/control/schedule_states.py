"""Where a schedule's definition and its state lie, and how the state moves.

    <tenant>/schedules/<name>.json     what was asked for (`EvaluationSchedule`): the truth
    vla:t:<tenant>:schedules           hash  name -> `ScheduleState`; the tenant may read it
    vla:schedules                      zset  <tenant>/<name> -> next_due (s)
    vla:beat:schedule:<tenant>:<name>  RedBeat's entry: a hint to look

Whoever moves a state compares it with the server's time and swaps it for the next in one
transaction, so a hint that comes twice, or late, or not at all changes nothing. A schedule that
cannot be read is set aside with an alert; the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import redis
from pydantic import TypeAdapter

from vla_platform.control import dispatch
from vla_platform.control.evaluations import now
from vla_platform.control.schedule_policy import Looked, ScheduleState
from vla_platform.control.services import Services
from vla_platform.errors import NotFoundError, SpecError
from vla_platform.metrics.events import Event
from vla_platform.specs.cron import next_firing
from vla_platform.specs.evaluation import EvaluationSchedule, Missed, Overlap
from vla_platform.specs.parsing import parse_as
from vla_storage.errors import ObjectNotFoundError
from vla_storage.names import check_name

DUE_KEY = "vla:schedules"
WORKLOAD = "schedules"
"""Under this name a schedule's events are among a tenant's metrics."""
_log = logging.getLogger(__name__)

_SCHEDULE = TypeAdapter(EvaluationSchedule)


def state_key(tenant: str) -> str:
    return f"vla:t:{tenant}:schedules"


def schedule_key(tenant: str, name: str) -> str:
    return f"{tenant}/schedules/{check_name('schedule', name)}.json"


def parse_schedule(text: str | bytes) -> EvaluationSchedule:
    """Raises `SpecError` naming every problem."""
    return parse_as(_SCHEDULE, text)


def load(services: Services, tenant: str, name: str) -> EvaluationSchedule:
    try:
        schedule = parse_schedule(services.objects.get(schedule_key(tenant, name)))
    except ObjectNotFoundError as error:
        raise SpecError(f"the definition of schedule {name} is gone", problems=[]) from error
    if schedule.name != name:
        raise SpecError(f"schedule {name} holds the definition of {schedule.name}", problems=[])
    return schedule


def begin(services: Services, tenant: str, schedule: EvaluationSchedule) -> None:
    client = services.ledger.client
    begun_at = now(client)
    state = ScheduleState(
        name=schedule.name,
        cron=schedule.cron,
        timezone=schedule.timezone,
        overlap=schedule.overlap,
        missed=schedule.missed,
        next_due=next_firing(schedule.cron, schedule.timezone, after=begun_at),
    )
    with client.pipeline() as pipe:
        # One that is there keeps its phase, whoever writes it again (PF-48).
        pipe.hsetnx(state_key(tenant), schedule.name, state.to_json())
        pipe.zadd(DUE_KEY, {f"{tenant}/{schedule.name}": state.next_due}, nx=True)
        pipe.execute()
    dispatch.schedule_hint(tenant, schedule.name, cron=schedule.cron, timezone=schedule.timezone)


def swap(
    services: Services,
    tenant: str,
    name: str,
    step: Callable[[ScheduleState, float], Looked],
) -> tuple[ScheduleState, tuple[float, ...]]:
    """Compare-and-swap of one state on the server's time; returns what became of it.

    Raises `NotFoundError`, and `ValueError` for a state that cannot be read.
    """
    client, key = services.ledger.client, state_key(tenant)
    with client.pipeline() as pipe:
        while True:
            pipe.watch(key)
            raw = pipe.hget(key, name)
            if raw is None:
                pipe.unwatch()
                raise NotFoundError(f"no schedule {name}", schedule=name)
            state = ScheduleState.from_json(raw)
            looked = step(state, now(client))
            pipe.multi()
            pipe.hset(key, name, looked.state.to_json())
            if looked.state.enabled:
                pipe.zadd(DUE_KEY, {f"{tenant}/{name}": looked.state.next_due})
            else:
                pipe.zrem(DUE_KEY, f"{tenant}/{name}")
            try:
                pipe.execute()
            except redis.WatchError:
                continue
            return looked.state, looked.fire


def set_aside(services: Services, tenant: str, name: str, reason: str) -> None:
    """Disable one schedule with an alert; one that was removed meanwhile stays removed."""

    def disabled(state: ScheduleState, _: float) -> Looked:
        return Looked(state=replace(state, enabled=False, reason=reason[:500]))

    try:
        swap(services, tenant, name, disabled)
    except NotFoundError:
        return
    except ValueError:  # its state cannot be read
        services.ledger.client.hdel(state_key(tenant), name)
        begin_disabled(services, tenant, name, reason)
        return
    _tell(services, tenant, name, reason)


def begin_disabled(services: Services, tenant: str, name: str, reason: str) -> None:
    """Show a schedule of which nothing can be read, unless it has a state."""
    state = ScheduleState(
        name=name,
        cron="",
        timezone="UTC",
        overlap=Overlap.SKIP,
        missed=Missed.RECORD,
        next_due=0.0,
        enabled=False,
        reason=reason[:500],
    )
    client = services.ledger.client
    with client.pipeline() as pipe:
        pipe.hsetnx(state_key(tenant), name, state.to_json())
        pipe.zrem(DUE_KEY, f"{tenant}/{name}")
        pipe.execute()
    _tell(services, tenant, name, reason)


def _tell(services: Services, tenant: str, name: str, reason: str) -> None:
    _log.error("action=schedule_disabled tenant=%s schedule=%s reason=%s", tenant, name, reason)
    values = {"schedule": name, "state": "disabled", "reason": reason[:500]}
    services.emitter.emit(Event(tenant=tenant, workload=WORKLOAD, kind="schedule", values=values))
