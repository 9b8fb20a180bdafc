"""Evaluations by cron, as tenants ask for them: made, paused, resumed, run now and removed."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import Any

from vla_platform.control import dispatch
from vla_platform.control.evaluations import now
from vla_platform.control.requests import token_of
from vla_platform.control.schedule_firings import fire
from vla_platform.control.schedule_policy import Looked, moved
from vla_platform.control.schedule_states import (
    DUE_KEY,
    begin,
    begin_disabled,
    load,
    parse_schedule,
    schedule_key,
    state_key,
    swap,
)
from vla_platform.control.services import Services
from vla_platform.envs.suites import suite
from vla_platform.errors import ConflictError, NotFoundError, QuotaError, SpecError
from vla_platform.specs import canonical_json
from vla_platform.specs.cron import firings, shortest_interval_s
from vla_platform.specs.evaluation import EvaluationSchedule, EvaluationSpec
from vla_storage.errors import CodedError, ObjectNotFoundError

MOST_PER_TENANT = 100


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
    check_evaluation(services, tenant, schedule.evaluation)
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
    begin(services, tenant, schedule)
    return {"schedule": schedule.name, "next": firing_table(schedule)}


def check_evaluation(services: Services, tenant: str, spec: EvaluationSpec) -> None:
    suite(spec.suite, episodes=spec.episodes, seed=spec.seed, options=spec.options)
    services.ledger.base_model_of(tenant, spec.policy)
    if spec.checkpoint is not None:
        services.checkpoints(tenant).manifest(spec.checkpoint)


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
        state, _ = swap(
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
        found = fire(services, tenant, name, at, token=token_of(tenant, request_id))
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
            begin(services, tenant, load(services, tenant, name))
            restored += 1
        except (CodedError, ValueError) as error:
            if isinstance(error, CodedError) and error.retryable:
                raise
            begin_disabled(services, tenant, name, f"its definition cannot be read: {error}")
    return restored
