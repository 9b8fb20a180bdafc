"""What the operators' page shows, read from the ledger in a few round trips.

The server sorts and cuts; what crosses the wire is one page, however many workloads there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vla_platform.control.environment_hosts import HostState, HostTable
from vla_platform.control.gpu_reports import GpuReport, read_reports
from vla_platform.control.ledger import Ledger
from vla_platform.control.maintenance import maintenance_reason
from vla_platform.control.tenant_records import TENANTS_KEY
from vla_platform.control.usage import month_so_far
from vla_platform.metrics.events import PLATFORM_STREAM

PAGE_SIZE = 50
MOST_TENANTS = 100
STATES = ("running", "pending", "paused")
_FIELDS = (
    "tenant", "policy", "kind", "state", "step", "total_steps", "waits", "priority", "updated",
    "policy_version", "dropped",
)  # fmt: skip
_RECENT_EVENTS = 400


@dataclass(frozen=True, kw_only=True)
class WorkloadRow:
    id: str
    tenant: str
    policy: str
    kind: str
    state: str
    step: str
    total_steps: str
    waits: str  # why it does not go on; empty: it does
    priority: str
    updated: float  # seconds since the epoch
    policy_version: str
    dropped: str


@dataclass(frozen=True, kw_only=True)
class TenantRow:
    tenant: str
    running: int
    pending: int
    rollouts: int
    weight: float
    used: Mapping[str, float]  # this month


@dataclass(frozen=True, kw_only=True)
class SlotRow:
    worker: str
    policy: str
    trained_version: str
    served_version: str


@dataclass(frozen=True, kw_only=True)
class BaseRow:
    name: str
    ready: int
    stages: int
    is_drained: bool  # a worker is taking jobs of it right now
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    counts: Mapping[str, int]
    state: str  # of the workloads shown
    page: int
    num_pages: int
    workloads: tuple[WorkloadRow, ...]
    tenants: tuple[TenantRow, ...]
    num_tenants: int
    workers: tuple[str, ...]
    slots: tuple[SlotRow, ...]
    bases: tuple[BaseRow, ...]
    hosts: tuple[HostState, ...]
    gpus: tuple[GpuReport, ...]
    staleness: Mapping[str, int]  # versions, of the newest RL update of each workload
    inference: Mapping[str, Mapping[str, Any]]  # newest numbers by base model
    training: Mapping[str, Any]  # newest step of SFT or update of RL
    maintenance: str  # why nothing is taken; empty: all is


def take(
    ledger: Ledger, *, state: str = "running", page: int = 1, size: int = PAGE_SIZE
) -> Snapshot:
    """Raises `UnavailableError` or `redis.RedisError` where the ledger does not answer."""
    client = ledger.client
    with client.pipeline(transaction=False) as pipe:
        for name in STATES:
            pipe.scard(f"vla:{name}")
        pipe.scard("vla:rollouts")
        pipe.zcard("vla:leases")
        pipe.smembers(TENANTS_KEY)
        pipe.zrange("vla:workers", 0, -1)
        pipe.hgetall("vla:bases")
        pipe.hgetall("vla:weights")
        *counted, tenants, workers, bases, weights = pipe.execute()
    counts = dict(zip((*STATES, "rollouts", "leases"), counted, strict=True))
    num_pages = max(1, -(-counts.get(state, 0) // size))
    page = min(max(1, page), num_pages)
    shown = sorted(tenants)[:MOST_TENANTS]
    return Snapshot(
        counts=counts,
        state=state,
        page=page,
        num_pages=num_pages,
        workloads=_workloads(client, state, (page - 1) * size, size),
        tenants=_tenants(client, shown, weights),
        num_tenants=len(tenants),
        workers=tuple(workers),
        slots=_slots(client, workers),
        bases=_bases(client, bases, workers),
        hosts=_hosts(client),
        gpus=read_reports(client),
        **_newest(client),
        maintenance=maintenance_reason(client),
    )


def _workloads(client: Any, state: str, start: int, size: int) -> tuple[WorkloadRow, ...]:
    fields = ["#", *(f"vla:w:*->{name}" for name in _FIELDS)]
    pattern = [word for name in fields for word in ("GET", name)]
    # redis-py's own `sort_ro` sends SORT, which writes and which this process may not call.
    flat = client.execute_command(
        "SORT_RO", f"vla:{state}", "BY", "vla:w:*->created", "LIMIT", start, size, *pattern, "DESC"
    )
    found = []
    for at in range(0, len(flat), len(fields)):
        values = dict(zip(("id", *_FIELDS), flat[at : at + len(fields)], strict=True))
        if values["tenant"] is None:
            continue  # it ended between the two reads
        text = {name: value or "" for name, value in values.items()}
        updated = float(text.pop("updated") or 0) / 1000
        found.append(WorkloadRow(**text, updated=updated))
    return tuple(found)


def _tenants(client: Any, names: list[str], weights: dict[str, str]) -> tuple[TenantRow, ...]:
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            for what in ("running", "pending", "rollouts"):
                pipe.scard(f"vla:tenant:{name}:{what}")
        counts = pipe.execute()
    used = month_so_far(client, names)
    return tuple(
        TenantRow(
            tenant=name,
            running=counts[3 * at],
            pending=counts[3 * at + 1],
            rollouts=counts[3 * at + 2],
            weight=float(weights.get(name, 1)),
            used=used[at],
        )
        for at, name in enumerate(names)
    )


def _slots(client: Any, workers: list[str]) -> tuple[SlotRow, ...]:
    with client.pipeline(transaction=False) as pipe:
        for worker in workers:
            pipe.smembers(f"vla:slots:{worker}")
        owned = [
            (worker, policy)
            for worker, policies in zip(workers, pipe.execute(), strict=True)
            for policy in sorted(policies)
        ]
        for _, policy in owned:
            pipe.hmget(f"vla:policy:{policy}", "policy_version", "current_version")
        versions = pipe.execute()
    return tuple(
        SlotRow(worker=worker, policy=policy, trained_version=new or "", served_version=old or "")
        for (worker, policy), (new, old) in zip(owned, versions, strict=True)
    )


def _bases(client: Any, bases: dict[str, str], workers: list[str]) -> tuple[BaseRow, ...]:
    found = []
    for name, raw in sorted(bases.items()):
        with client.pipeline(transaction=False) as pipe:
            pipe.zcard(f"vla:ready:{name}")
            for worker in workers:
                pipe.zcard(f"vla:ready:{name}:{worker}")
            pipe.zcard(f"vla:stage:scores:{name}")
            pipe.zcard(f"vla:stage:actor_forward:{name}")
            pipe.exists(f"vla:draining:{name}")
            *ready, scores, forwards, drained = pipe.execute()
        found.append(
            BaseRow(
                name=name, ready=sum(ready), stages=scores + forwards, is_drained=bool(drained),
                facts=json.loads(raw),
            )
        )  # fmt: skip
    return tuple(found)


def _hosts(client: Any) -> tuple[HostState, ...]:
    table = HostTable(client)
    harnesses = [key.rpartition(":")[2] for key in client.scan_iter("vla:env:hosts:*", count=1000)]
    return tuple(host for harness in sorted(harnesses) for host in table.hosts(harness))


def _newest(client: Any) -> dict[str, Any]:
    inference: dict[str, dict[str, Any]] = {}
    training: dict[str, Any] = {}
    staleness: dict[str, int] = {}
    for _, fields in client.xrevrange(PLATFORM_STREAM, count=_RECENT_EVENTS):
        event = json.loads(fields["event"])
        if event["kind"] == "inference":
            inference.setdefault(event["values"]["base_model"], event["values"])
        elif event["kind"] in ("step", "update") and not training:
            training = event["values"] | {"at": event["at"]}
        if event["kind"] == "update" and "staleness" in event["values"]:
            staleness.setdefault(event["workload"], event["values"]["staleness"])
    return {"inference": inference, "training": training, "staleness": staleness}
