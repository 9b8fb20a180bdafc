"""What tenants use: per policy, workload and day, in the control Redis while the day is young, and
as statements in the object store.

    vla:use:<tenant>:<day>                  hash  <policy>|<workload>|<what> -> amount; `day` counts
                                                  from 1970-01-01, UTC
    vla:use:<tenant>:<month>                hash  <what> -> amount; `month` is such as 2026-11
    platform/usage/<tenant>/<date>.json     the statement; <tenant>/usage/<date>.json is its copy

Training is counted by the ledger in the same step that completes a job: exactly once. Inference is
counted in the same transaction that acknowledges its event: never twice, and not at all where the
event was lost in an outage of more than a minute.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from typing import Any

from vla_platform.control.services import Services
from vla_platform.control.tenant_records import Tenant, list_tenants
from vla_platform.errors import QuotaError
from vla_platform.specs import canonical_json
from vla_storage.audit_archive import AuditArchive
from vla_storage.errors import ObjectNotFoundError
from vla_storage.objects import ObjectStore

KEEP_S = 40 * 86400
WRITE_S = 60.0
_EPOCH = date(1970, 1, 1)
_MARK = "restored"


class Use(StrEnum):
    """What is counted."""

    WORKER_S = "worker_s"
    """Seconds of training workers; a shared forward is split by rows."""
    BACKBONE_S = "backbone_s"
    """Seconds of the shared forward of inference, split by tokens."""
    SIMULATOR_S = "simulator_s"
    """Seconds of environments, of rollouts and evaluations."""
    SAMPLES = "samples"
    JOBS = "jobs"
    REQUESTS = "requests"
    """Answered predictions."""


@dataclass(frozen=True, kw_only=True)
class UsageLine:
    policy: str
    workload: str
    amounts: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One tenant's day."""

    tenant: str
    day: str  # ISO date, UTC
    lines: tuple[UsageLine, ...]
    totals: Mapping[str, float]
    stored_bytes: int | None = None  # as the last audit found it; None: never audited
    version: int = 1

    def to_json(self) -> bytes:
        return canonical_json(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Statement:
        raw = json.loads(text)
        return cls(**raw | {"lines": tuple(UsageLine(**line) for line in raw["lines"])})


def use_key(tenant: str, day: int) -> str:
    return f"vla:use:{tenant}:{day}"


def month_key(tenant: str, day: date) -> str:
    return f"vla:use:{tenant}:{day:%Y-%m}"


def day_number(day: date) -> int:
    return (day - _EPOCH).days


def today(client: Any) -> date:
    """By the server's clock, as everything that is counted."""
    return datetime.fromtimestamp(client.time()[0], UTC).date()


def count(
    pipe: Any, tenant: str, day: date, *, policy: str, workload: str, amounts: Mapping[str, float]
) -> None:
    """Add to a day, on a pipeline or a client."""
    key = use_key(tenant, day_number(day))
    for what, amount in amounts.items():
        pipe.hincrbyfloat(key, f"{policy}|{workload}|{what}", amount)
        pipe.hincrbyfloat(key, f"||{what}", amount)
        pipe.hincrbyfloat(month_key(tenant, day), what, amount)
    pipe.expire(key, KEEP_S)
    pipe.expire(month_key(tenant, day), KEEP_S)


def statement(client: Any, tenant: str, day: date, *, stored_bytes: int | None = None) -> Statement:
    """What the ledger has counted of a day."""
    amounts: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for field, raw in client.hgetall(use_key(tenant, day_number(day))).items():
        if field.count("|") == 2:
            policy, workload, what = field.split("|")
            amounts[policy, workload][what] = round(float(raw), 6)
    totals = amounts.pop(("", ""), {})
    return Statement(
        tenant=tenant,
        day=day.isoformat(),
        lines=tuple(
            UsageLine(policy=policy, workload=workload, amounts=found)
            for (policy, workload), found in sorted(amounts.items())
        ),
        totals=totals,
        stored_bytes=stored_bytes,
    )


def statement_key(tenant: str, day: str) -> str:
    return f"platform/usage/{tenant}/{day}.json"


def copy_key(tenant: str, day: str) -> str:
    return f"{tenant}/usage/{day}.json"


def write_statements(services: Services) -> int:
    """Bring today's and yesterday's statements of all tenants up to date; returns how many changed.

    Where the control Redis has lost a day that was written before, it gets it back first.
    """
    client, objects = services.ledger.client, services.objects
    now = today(client)
    changed = 0
    for tenant in list_tenants(objects):
        name = tenant.tenant_id
        _give_back_month(client, objects, name, now)
        for day in (now - timedelta(days=1), now):
            written = read_statement(objects, name, day.isoformat())
            _give_back(client, name, day, written)
            if not client.exists(use_key(name, day_number(day))):
                continue
            stored = stored_bytes(objects, name) if day == now else None
            if written is not None and stored is None:
                stored = written.stored_bytes
            found = statement(client, name, day, stored_bytes=stored)
            if found != written and (found.lines or written):
                text = found.to_json()
                objects.put(statement_key(name, found.day), text)
                objects.put(copy_key(name, found.day), text)
                changed += 1
    return changed


def _give_back(client: Any, tenant: str, day: date, written: Statement | None) -> None:
    key = use_key(tenant, day_number(day))
    if written is None:
        if client.exists(key):
            client.hset(key, _MARK, 0)
        return
    if client.hexists(key, _MARK):
        return
    with client.pipeline() as pipe:
        pipe.hset(key, _MARK, 1)
        for line in written.lines:
            count(
                pipe, tenant, day, policy=line.policy, workload=line.workload, amounts=line.amounts
            )
        pipe.expire(key, KEEP_S)
        pipe.execute()


def _give_back_month(client: Any, objects: ObjectStore, tenant: str, now: date) -> None:
    """What was used before yesterday; the other days come back with their own statements."""
    key = month_key(tenant, now)
    if client.hexists(key, _MARK):
        return
    totals: dict[str, float] = defaultdict(float)
    if not client.exists(key) or not client.exists(
        use_key(tenant, day_number(now - timedelta(days=2)))
    ):
        for one in statements(objects, f"platform/usage/{tenant}/", month=f"{now:%Y-%m}"):
            if date.fromisoformat(one.day) < now - timedelta(days=1):
                for what, amount in one.totals.items():
                    totals[what] += amount
    with client.pipeline() as pipe:
        pipe.hset(key, _MARK, 1)
        for what, amount in totals.items():
            pipe.hincrbyfloat(key, what, amount)
        pipe.expire(key, KEEP_S)
        pipe.execute()


def read_statement(objects: ObjectStore, tenant: str, day: str) -> Statement | None:
    try:
        return Statement.from_json(objects.get(statement_key(tenant, day)))
    except ObjectNotFoundError:
        return None


def statements(objects: ObjectStore, prefix: str, *, month: str) -> list[Statement]:
    """Of one month (`2026-11`), oldest first; `prefix` ends before the date."""
    return [
        Statement.from_json(objects.get(info.key)) for info in objects.list(f"{prefix}{month}-")
    ]


def stored_bytes(objects: ObjectStore, tenant: str) -> int | None:
    """What the tenant stored when it was last audited."""
    last = AuditArchive(objects, tenant).latest()
    return None if last is None else last.counts.size_bytes


def month_so_far(client: Any, tenants: Sequence[str]) -> list[dict[str, float]]:
    """Totals of the current month of each tenant, by the ledger."""
    now = today(client)
    with client.pipeline(transaction=False) as pipe:
        for tenant in tenants:
            pipe.hmget(month_key(tenant, now), *Use)
        found = pipe.execute()
    return [
        {str(what): float(amount or 0) for what, amount in zip(Use, amounts, strict=True)}
        for amounts in found
    ]


def check_budget(services: Services, tenant: Tenant) -> None:
    """Raises `QuotaError` where the month's worker-seconds or the storage are used up."""
    if tenant.monthly_worker_s is not None:
        client = services.ledger.client
        (used,) = month_so_far(client, [tenant.tenant_id])
        spent = used[Use.WORKER_S] + used[Use.BACKBONE_S]
        if spent >= tenant.monthly_worker_s:
            following = (today(client).replace(day=1) + timedelta(days=32)).replace(day=1)
            raise QuotaError(
                f"the month's budget is used up: {spent:.1f} of {tenant.monthly_worker_s:g} "
                f"worker-seconds; it starts again on {following.isoformat()} (UTC), or ask the "
                "operator (`vla tenants limits`)",
                used=spent, budget=tenant.monthly_worker_s, what=str(Use.WORKER_S),
            )  # fmt: skip
    if tenant.storage_quota_bytes is not None:
        stored = stored_bytes(services.objects, tenant.tenant_id)
        if stored is not None and stored > tenant.storage_quota_bytes:
            raise QuotaError(
                f"storage is full: {stored} of {tenant.storage_quota_bytes} bytes at the last "
                "audit; remove checkpoints (`vla checkpoints prune`) or ask the operator",
                used=stored, budget=tenant.storage_quota_bytes, what="stored_bytes",
            )  # fmt: skip
