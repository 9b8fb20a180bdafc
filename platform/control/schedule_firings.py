"""What is due of schedules, and how an evaluation begins and ends: once, whoever looks."""

from __future__ import annotations

import contextlib
import logging
from datetime import UTC, datetime

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
from vla_platform.control.schedule_policy import Looked, ScheduleState, begun, ended, failed, look
from vla_platform.control.schedule_states import (
    DUE_KEY,
    WORKLOAD,
    load,
    set_aside,
    state_key,
    swap,
)
from vla_platform.control.services import Services
from vla_platform.envs.evaluation_records import EvaluationRecord
from vla_platform.errors import NotFoundError, SpecError
from vla_platform.metrics.events import Event
from vla_platform.specs.evaluation import EvaluationSpec
from vla_storage.errors import CodedError

_log = logging.getLogger(__name__)


def look_at(services: Services, tenant: str, name: str) -> list[str]:
    """Serve what is due of one schedule; returns the evaluations begun."""
    try:
        _, times = swap(services, tenant, name, look)
    except NotFoundError:
        services.ledger.client.zrem(DUE_KEY, f"{tenant}/{name}")
        dispatch.remove_hint(tenant, name)
        return []
    except ValueError as error:
        set_aside(services, tenant, name, f"its state cannot be read: {error}")
        return []
    return [one for at in times if (one := fire(services, tenant, name, at)) is not None]


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


def fire(services: Services, tenant: str, name: str, at: float, *, token: str = "") -> str | None:
    """Resolve the version once and send; None where that is not possible, which is counted.

    `token`: of the request that asks for it beside its times.
    """
    stamp = datetime.fromtimestamp(at, UTC).strftime("%Y%m%dT%H%M%S")
    evaluation_id = f"{name}-{token or stamp}"
    client = services.ledger.client
    try:
        spec = load(services, tenant, name).evaluation
        version, checkpoint = resolve(services, tenant, spec)
    except (SpecError, ValueError) as error:
        set_aside(services, tenant, name, f"its definition cannot be read: {error}")
        return None
    except CodedError as error:
        if error.retryable:
            raise
        reason = str(error)[:500]
        swap(
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
    swap(
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


def resolve(services: Services, tenant: str, spec: EvaluationSpec) -> tuple[int, str]:
    """The version that this evaluation holds on to, and the checkpoint that it is of."""
    if spec.checkpoint is not None:
        manifest = services.checkpoints(tenant).manifest(spec.checkpoint)
        return manifest.policy_version, spec.checkpoint
    version = spec.policy_version
    if version is None:
        version = services.ledger.current_version(f"{tenant}/{spec.policy}")
    if version is None:
        raise NotFoundError(
            f"policy {spec.policy} has no published version yet", policy_key=spec.policy
        )
    return version, checkpoint_of(services.checkpoints(tenant), spec.policy, version)


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
    times: tuple[float, ...] = ()
    if known.schedule:
        with contextlib.suppress(NotFoundError, ValueError):
            _, times = swap(
                services, tenant, known.schedule,
                lambda s, at: ended(s, evaluation_id, error, now=at),
            )  # fmt: skip
    elif error:
        _log.error("action=evaluation_failed evaluation=%s reason=%s", evaluation_id, error)
        values = {"evaluation": evaluation_id, "state": "failed", "reason": error[:500]}
        services.emitter.emit(
            Event(
                tenant=tenant, workload=known.run or evaluation_id, kind="evaluation", values=values
            )
        )
    take_off(client, tenant, evaluation_id, record)
    for at in times:
        fire(services, tenant, known.schedule, at)
