"""Usage: counted with the job, by policy, workload and day; budgets; a lost Redis."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.integration.conftest import Process
from vla_platform.cli.usage import summed
from vla_platform.control import usage
from vla_platform.control.tenant_records import Tenant, read_tenant, record_key
from vla_platform.control.tenants import set_limits
from vla_platform.errors import QuotaError, TenantError
from vla_platform.metrics.collector import collect, open_group
from vla_platform.metrics.events import PLATFORM_STREAM
from vla_platform.specs import canonical_json

pytestmark = pytest.mark.services


@pytest.fixture
def some(some: Process) -> Process:
    for name in ("a", "b"):
        tenant = Tenant(tenant_id=name, password_sha256="0" * 64)
        some.objects.put(record_key(name), canonical_json(vars(tenant)))
    return some


def train(some: Process, run: str, tenant: str = "a", *, cost_s: float = 2.5) -> None:
    fields = {
        "tenant": tenant, "policy": "pick", "policy_key": f"{tenant}/pick", "kind": "sft",
        "base_model": "tiny", "schema_signature": "s", "spec_digest": run, "priority": 0,
        "max_in_flight": 2, "max_seconds": 0, "display_name": "", "lifecycle": "sft",
        "target": "positions",
    }  # fmt: skip
    ledger = some.ledger
    ledger.submit(run, fields, max_pending=10)
    ledger.prepared(run, total_positions=1, total_steps=1)
    assert ledger.admit(run, max_running=4) == "running"
    job = ledger.reserve(run, lease_s=10)
    assert not isinstance(job, str)
    ledger.mark(job, "ready")  # type: ignore[arg-type]
    (leased,) = ledger.lease_group("worker", "tiny", max_jobs=1, lease_s=10)
    ledger.complete(leased, step=1, result={}, cost_s=cost_s, samples=8)
    ledger.checkpointed(run, position=1, checkpoint=f"pick/{run}/1", step=1)
    ledger.finish(run)


def test_a_job_is_counted_where_it_completes(some: Process) -> None:
    train(some, "run-1")
    train(some, "run-2", cost_s=1.0)
    client = some.ledger.client
    found = usage.statement(client, "a", usage.today(client))
    assert [(o.policy, o.workload) for o in found.lines] == [("pick", "run-1"), ("pick", "run-2")]
    assert found.lines[0].amounts == {"worker_s": 2.5, "samples": 8, "jobs": 1}
    whole = client.hgetall("vla:usage:a")
    assert (float(whole["worker_s"]), int(whole["jobs"])) == (3.5, 2)
    assert found.totals == {"worker_s": 3.5, "samples": 16, "jobs": 2}
    assert found == usage.Statement.from_json(found.to_json())


def test_statements_are_written_once_and_outlive_the_redis(some: Process) -> None:
    train(some, "run-1")
    day = usage.today(some.ledger.client).isoformat()
    assert usage.write_statements(some) == 1  # type: ignore[arg-type]
    assert usage.write_statements(some) == 0  # type: ignore[arg-type]
    written = usage.read_statement(some.objects, "a", day)
    assert written is not None
    assert some.objects.get(usage.copy_key("a", day)) == written.to_json()
    some.ledger.client.flushall()
    some.ledger.load()
    train(some, "run-2")
    earlier = replace(written, day=f"{day[:8]}01")
    if day[8:] > "02":  # what was used before yesterday comes back with its statement
        some.objects.put(usage.statement_key("a", earlier.day), earlier.to_json())
    usage.write_statements(some)  # type: ignore[arg-type]
    whole = {"02": 5.0, "01": 5.0}.get(day[8:], 7.5)
    assert usage.month_so_far(some.ledger.client, ["a"])[0]["worker_s"] == whole
    again = usage.read_statement(some.objects, "a", day)
    assert again is not None
    assert again.totals == {"worker_s": 5.0, "samples": 16, "jobs": 2}
    assert usage.write_statements(some) == 0  # type: ignore[arg-type]
    rows = summed(usage.statements(some.objects, "platform/usage/a/", month=day[:7]), "policy")
    assert [(r["tenant"], r["policy"], r["worker_s"]) for r in rows] == [("a", "pick", whole)]


def test_inference_is_counted_with_its_acknowledgement(some: Process) -> None:
    client = some.ledger.client
    open_group(client)
    values = {
        "base_model": "tiny", "requests": 3, "backbone_s": 0.25, "waited_ms": 1, "batch_size": 2,
        "forward_ms": 1, "decode_ms": 1, "queue_depth": 0,
    }  # fmt: skip
    event = {"tenant": "b", "workload": "inference", "kind": "inference", "at": 1.0,
             "values": values, "version": 1}  # fmt: skip
    for _ in range(2):
        client.xadd(PLATFORM_STREAM, {"event": json.dumps(event)})
    assert collect(client, some.objects, block_ms=10) == 2
    assert collect(client, some.objects, block_ms=10) == 0
    assert usage.month_so_far(client, ["b"])[0]["backbone_s"] == 0.5
    assert usage.month_so_far(client, ["b"])[0]["requests"] == 6


def test_a_budget_is_enforced_with_a_clear_message(some: Process) -> None:
    train(some, "run-1")
    before = some.objects.head(record_key("a"))
    assert set_limits(some.objects, "a") == read_tenant(some.objects, "a")
    assert some.objects.head(record_key("a")) == before  # shown, not written
    tenant = set_limits(some.objects, "a", monthly_worker_s=2.0)
    assert tenant == read_tenant(some.objects, "a")
    with pytest.raises(QuotaError, match=r"2\.5 of 2 worker-seconds; it starts again on"):
        usage.check_budget(some, tenant)  # type: ignore[arg-type]
    usage.check_budget(some, replace(tenant, monthly_worker_s=3.0))  # type: ignore[arg-type]
    usage.check_budget(some, read_tenant(some.objects, "b"))  # type: ignore[arg-type]
    with pytest.raises(TenantError):
        set_limits(some.objects, "nobody", monthly_worker_s=1.0)
