"""Evaluations by cron: made, listed, paused and removed at run time, per tenant.

    <tenant>/schedules/<name>.json     what was asked for (`EvaluationSchedule`): the truth
    vla:t:<tenant>:schedules           hash  name -> `ScheduleState`; the tenant may read it
    vla:schedules                      zset  <tenant>/<name> -> next_due (s)
    vla:beat:schedule:<tenant>:<name>  RedBeat's entry: a hint to look

A hint that comes twice, or late, or not at all changes nothing: whoever looks compares the state
with the server's time and swaps it for the next in one transaction; only the winner sends. One
schedule that cannot be read is set aside with an alert; the others go on.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import redis
from pydantic import ValidationError

from vla_platform.control import dispatch
from vla_platform.control.evaluations import (
    Outstanding,
    asked_of,
    checkpoint_of,
    evaluations_key,
    now,
    send,
    take_off,
)
from vla_platform.control.requests import token_of
from vla_platform.control.schedule_policy import (
    Looked,
    ScheduleState,
    begun,
    ended,
    failed,
    look,
    moved,
)
from vla_platform.control.services import Services
from vla_platform.envs.evaluation_records import EvaluationRecord
from vla_platform.envs.suites import suite
from vla_platform.errors import ConflictError, NotFoundError, QuotaError, SpecError
from vla_platform.metrics.events import Event
from vla_platform.specs import canonical_json
from vla_platform.specs.cron import firings, next_firing, shortest_interval_s
from vla_platform.specs.evaluation import (
    EvaluationSchedule,
    EvaluationSpec,
    Missed,
    Overlap,
)
from vla_platform.specs.parsing import load_json, spec_error
from vla_storage.checkpoints import CheckpointStore
from vla_storage.errors import CodedError, ObjectNotFoundError
from vla_storage.names import check_name

DUE_KEY = "vla:schedules"
WORKLOAD = "schedules"
"""Under this name a schedule's events are among a tenant's metrics."""
MOST_PER_TENANT = 100
_log = logging.getLogger(__name__)


def state_key(tenant: str) -> str:
    return f"vla:t:{tenant}:schedules"


def schedule_key(tenant: str, name: str) -> str:
    return f"{tenant}/schedules/{check_name('schedule', name)}.json"


def parse_schedule(text: str | bytes) -> EvaluationSchedule:
    """Raises `SpecError` naming every problem."""
    document = load_json(text)
    try:
        return EvaluationSchedule.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise spec_error(error.errors(include_url=False)) from error


def firing_table(schedule: EvaluationSchedule, *, count: int = 10) -> list[str]:
    """The next firings in the schedule's zone, with their offset from UTC."""
    coming = firings(schedule.cron, schedule.timezone, after=datetime.now(UTC))
    return [one.isoformat(timespec="minutes") for one in islice(coming, count)]


def add(services: Services, tenant: str, text: str, *, min_interval_s: float) -> dict[str, Any]:
    """Validate, write and begin a schedule; the same one again is fine.

    Raises `SpecError`, `ConflictError` (the name is taken by another one), `QuotaError`.
    """
    schedule = parse_schedule(text)
    interval_s = shortest_interval_s(schedule.cron, schedule.timezone, after=datetime.now(UTC))
    if interval_s < min_interval_s:
        raise SpecError(
            f"cron {schedule.cron!r} fires every {interval_s:.0f} s; the shortest interval here is "
            f"{min_interval_s:.0f} s",
            problems=[{"field": "cron", "value": schedule.cron, "problem": "too often"}],
        )
    _check_evaluation(services, tenant, schedule.evaluation)
    client = services.ledger.client
    content = canonical_json(schedule.model_dump(mode="json"))
    key = schedule_key(tenant, schedule.name)
    try:
        if services.objects.get(key) != content:
            raise ConflictError(
                f"schedule {schedule.name} exists; remove it first, or choose another name",
                schedule=schedule.name,
            )
    except ObjectNotFoundError:
        if client.hlen(state_key(tenant)) >= MOST_PER_TENANT:
            raise QuotaError(f"{MOST_PER_TENANT} schedules are the most for a tenant") from None
        services.objects.put(key, content)
    _begin(services, tenant, schedule)
    return {"schedule": schedule.name, "next": firing_table(schedule)}


def _check_evaluation(services: Services, tenant: str, spec: EvaluationSpec) -> None:
    suite(spec.suite, episodes=spec.episodes, seed=spec.seed, options=spec.options)
    services.ledger.base_model_of(tenant, spec.policy)
    if spec.checkpoint is not None:
        _checkpoints(services, tenant).manifest(spec.checkpoint)


def _begin(services: Services, tenant: str, schedule: EvaluationSchedule) -> None:
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


def change(
    services: Services, tenant: str, name: str, what: str, request_id: str
) -> dict[str, Any]:
    """`pause`, `resume`, `run-now` or `remove`. Raises `NotFoundError`, also for another tenant's,
    and `SpecError`. All are safe to repeat; `run-now` runs once for each request."""
    if services.ledger.client.hget(state_key(tenant), name) is None:
        raise NotFoundError(f"no schedule {name[:80]}", schedule=name[:80])
    if what == "remove":
        remove(services, tenant, name)
        return {"schedule": name, "state": "removed"}
    if what in ("pause", "resume"):
        state, _ = _swap(
            services, tenant, name,
            lambda s, at: Looked(
                state=moved(
                    s, at, enabled=what == "resume",
                    reason="" if what == "resume" else "paused by the tenant",
                )
            ),
        )  # fmt: skip
        return {"schedule": name, "state": "enabled" if state.enabled else "paused"}
    if what == "run-now":
        at = now(services.ledger.client)
        found = _fire(services, tenant, name, at, token=token_of(tenant, request_id))
        return {"schedule": name, "evaluation": found}
    raise SpecError(f"{what[:40]!r}: use pause, resume, run-now or remove", problems=[])


def remove(services: Services, tenant: str, name: str) -> None:
    """What runs of it ends by itself; its records stay."""
    services.objects.delete(schedule_key(tenant, name))
    with services.ledger.client.pipeline() as pipe:
        pipe.hdel(state_key(tenant), name)
        pipe.zrem(DUE_KEY, f"{tenant}/{name}")
        pipe.execute()
    dispatch.remove_hint(tenant, name)


def look_at(services: Services, tenant: str, name: str) -> list[str]:
    """Serve what is due of one schedule; returns the evaluations begun."""
    try:
        _, fire = _swap(services, tenant, name, look)
    except NotFoundError:
        services.ledger.client.zrem(DUE_KEY, f"{tenant}/{name}")
        dispatch.remove_hint(tenant, name)
        return []
    except ValueError as error:
        set_aside(services, tenant, name, f"its state cannot be read: {error}")
        return []
    return [one for at in fire if (one := _fire(services, tenant, name, at)) is not None]


def look_at_due(services: Services, *, most: int = 100) -> int:
    """Serve every schedule that is due, whether or not a hint came; returns how many."""
    client = services.ledger.client
    due = client.zrangebyscore(DUE_KEY, "-inf", now(client), start=0, num=most)
    for place in due:
        tenant, _, name = place.partition("/")
        try:
            look_at(services, tenant, name)
        except CodedError as error:
            _log.error("action=schedule_failed schedule=%s reason=%s", place, error)
    return len(due)


def look_at_claimed(services: Services, tenant: str) -> None:
    """Firings that somebody took and did not begin."""
    for name, raw in services.ledger.client.hgetall(state_key(tenant)).items():
        try:
            if not ScheduleState.from_json(raw).claimed:
                continue
        except ValueError:
            continue  # the next look sets it aside
        look_at(services, tenant, name)


def set_aside(services: Services, tenant: str, name: str, reason: str) -> None:
    """Disable one schedule with an alert."""
    _log.error("action=schedule_disabled tenant=%s schedule=%s reason=%s", tenant, name, reason)
    client = services.ledger.client
    try:
        state = ScheduleState.from_json(client.hget(state_key(tenant), name) or "")
    except ValueError:
        state = ScheduleState(
            name=name,
            cron="",
            timezone="UTC",
            overlap=Overlap.SKIP,
            missed=Missed.RECORD,
            next_due=0.0,
        )
    disabled = replace(state, enabled=False, reason=reason[:500])
    with client.pipeline() as pipe:
        pipe.hset(state_key(tenant), name, disabled.to_json())
        pipe.zrem(DUE_KEY, f"{tenant}/{name}")
        pipe.execute()
    values = {"schedule": name, "state": "disabled", "reason": reason[:500]}
    services.emitter.emit(Event(tenant=tenant, workload=WORKLOAD, kind="schedule", values=values))


def finished(
    services: Services,
    tenant: str,
    evaluation_id: str,
    *,
    error: str = "",
    record: EvaluationRecord | None = None,
) -> None:
    """An evaluation is over, well or not; one that waited for it begins. Safe to repeat: what its
    `record` used is charged once."""
    client = services.ledger.client
    raw = client.hget(evaluations_key(tenant), evaluation_id)
    if raw is None:
        return
    known = Outstanding.from_json(raw)
    fire: tuple[float, ...] = ()
    if known.schedule:
        with contextlib.suppress(NotFoundError, ValueError):
            _, fire = _swap(
                services, tenant, known.schedule,
                lambda s, at: ended(s, evaluation_id, error, now=at),
            )  # fmt: skip
    elif error:
        _log.error("action=evaluation_failed evaluation=%s reason=%s", evaluation_id, error)
        values = {"evaluation": evaluation_id, "state": "failed", "reason": error[:500]}
        services.emitter.emit(
            Event(tenant=tenant, workload=known.run, kind="evaluation", values=values)
        )
    take_off(client, tenant, evaluation_id, record)
    for at in fire:
        _fire(services, tenant, known.schedule, at)


def restore(services: Services, tenant: str) -> int:
    """Begin again the schedules that the control Redis has lost; returns how many."""
    client = services.ledger.client
    known = set(client.hkeys(state_key(tenant)))
    restored = 0
    prefix = f"{tenant}/schedules/"
    for info in services.objects.list(prefix):
        name = info.key.removeprefix(prefix).removesuffix(".json")
        if name in known:
            continue
        try:
            _begin(services, tenant, _load(services, tenant, name))
            restored += 1
        except (CodedError, ValueError) as error:
            set_aside(services, tenant, name, f"its definition cannot be read: {error}")
    return restored


def _fire(services: Services, tenant: str, name: str, at: float, *, token: str = "") -> str | None:
    """Resolve the version once and send; None where that is not possible, which is counted.

    `token`: of the request that asks for it beside its times.
    """
    stamp = datetime.fromtimestamp(at, UTC).strftime("%Y%m%dT%H%M%S")
    evaluation_id = f"{name}-{token or stamp}"
    client = services.ledger.client
    try:
        spec = _load(services, tenant, name).evaluation
        version, checkpoint = _resolve(services, tenant, spec)
    except (SpecError, ValueError) as error:
        set_aside(services, tenant, name, f"its definition cannot be read: {error}")
        return None
    except CodedError as error:
        if error.retryable:
            raise
        reason = str(error)[:500]
        _swap(
            services, tenant, name, lambda s, _: Looked(state=failed(s, at, reason))
        )  # fmt: skip
        return None
    known = Outstanding(
        evaluation_id=evaluation_id,
        schedule=name,
        policy=spec.policy,
        policy_version=version,
        suite=spec.suite,
        due=at,
        sent=now(client),
        checkpoint=checkpoint,
        asked=asked_of(spec),
    )
    is_new = client.hsetnx(evaluations_key(tenant), evaluation_id, known.to_json())
    if token and not is_new:
        return evaluation_id  # the same request, by another thread
    _swap(
        services, tenant, name,
        lambda s, _: Looked(state=begun(s, evaluation_id, at)),
    )  # fmt: skip
    send(tenant, known)
    values = {
        "schedule": name, "state": "fired", "evaluation": evaluation_id,
        "policy_version": version, "late_s": round(max(0.0, known.sent - at), 3),
    }  # fmt: skip
    services.emitter.emit(Event(tenant=tenant, workload=WORKLOAD, kind="schedule", values=values))
    return evaluation_id


def _resolve(services: Services, tenant: str, spec: EvaluationSpec) -> tuple[int, str]:
    """The version that this evaluation holds on to, and the checkpoint that it is of."""
    if spec.checkpoint is not None:
        manifest = _checkpoints(services, tenant).manifest(spec.checkpoint)
        return manifest.policy_version, spec.checkpoint
    version = spec.policy_version
    if version is None:
        version = services.ledger.current_version(f"{tenant}/{spec.policy}")
    if version is None:
        raise NotFoundError(
            f"policy {spec.policy} has no published version yet", policy_key=spec.policy
        )
    return version, checkpoint_of(_checkpoints(services, tenant), spec.policy, version)


def _load(services: Services, tenant: str, name: str) -> EvaluationSchedule:
    try:
        schedule = parse_schedule(services.objects.get(schedule_key(tenant, name)))
    except ObjectNotFoundError as error:
        raise SpecError(f"the definition of schedule {name} is gone", problems=[]) from error
    if schedule.name != name:
        raise SpecError(f"schedule {name} holds the definition of {schedule.name}", problems=[])
    return schedule


def _swap(
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


def _checkpoints(services: Services, tenant: str) -> CheckpointStore:
    return CheckpointStore(
        objects=services.objects, tenant_id=tenant, signing_key=services.signing_key
    )
