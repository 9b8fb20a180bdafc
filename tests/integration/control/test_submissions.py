"""What a refused submission leaves in the object store."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from celery import Celery

from tests.integration.conftest import Process
from vla_platform.control import admission, dispatch
from vla_platform.control.tenant_records import Tenant, record_key
from vla_platform.control.workloads import (
    batch_state,
    release_batch,
    reserve_batch,
    spec_key,
    submit,
    submit_batch,
    workload_id,
)
from vla_platform.errors import LeaseLostError, NotFoundError, QuotaError

pytestmark = pytest.mark.services


@pytest.fixture
def one_pending(some: Process, monkeypatch: pytest.MonkeyPatch) -> Process:
    """A tenant `a` that may have one run that waits."""
    monkeypatch.setattr(admission, "check", lambda *_: "s" * 64)
    app = Celery("hints", broker="memory://", set_as_current=False)
    monkeypatch.setattr(dispatch, "current_app", app)
    tenant = Tenant(tenant_id="a", password_sha256=hashlib.sha256(b"").hexdigest())
    some.objects.put(record_key("a"), json.dumps(asdict(tenant)).encode())
    return replace(some, settings=some.settings.model_copy(update={"max_pending_per_tenant": 1}))


def spec(**changes: Any) -> str:
    return json.dumps(
        {"kind": "rl", "policy": "p", "init_from": "p/x/1", "updates": 5,
         "algorithm": {"kind": "reinforce"}, "environment": {"id": "tabletop/reach"}, **changes}
    )  # fmt: skip


def test_a_refused_spec_is_not_kept(one_pending: Process) -> None:
    kept = spec_key("a", submit(one_pending, "a", spec(), "first"))
    with pytest.raises(QuotaError):
        submit(one_pending, "a", spec(), "second")
    assert [info.key for info in one_pending.objects.list("a/workloads/")] == [kept]


def test_a_spec_that_was_accepted_before_outlives_a_refusal(one_pending: Process) -> None:
    """It is sent again while the ledger, lost and not recovered yet, does not know it."""
    run = submit(one_pending, "a", spec(), "first")
    one_pending.ledger.client.flushdb()
    submit(one_pending, "a", spec(), "second")
    with pytest.raises(QuotaError):
        submit(one_pending, "a", spec(), "first")
    assert run == workload_id("a", "rl", "first")
    assert one_pending.objects.get(spec_key("a", run))


def test_a_reserved_batch_given_back_is_the_next_ones(one_pending: Process) -> None:
    """A slip before the samples are there locks no run; what is given back twice, or after it was
    handed out again, changes nothing."""
    run = submit(one_pending, "a", spec(environment=None), "own")
    one_pending.ledger.prepared(run, total_positions=5, total_steps=5)
    one_pending.ledger.admit(run, max_running=9)
    for token in "0123456789":
        job = reserve_batch(one_pending, "a", run, token)
        fence = str(job["fence"])
        with pytest.raises(NotFoundError):
            release_batch(one_pending, "b", run, job["job_id"], fence)
        for _ in range(2):
            assert release_batch(one_pending, "a", run, job["job_id"], fence) == "reserved"
        assert job["position"] == 0
    last = reserve_batch(one_pending, "a", run, "last")
    assert last["position"] == 0
    release_batch(one_pending, "a", run, job["job_id"], fence)
    with pytest.raises(LeaseLostError):
        submit_batch(one_pending, "a", run, job["job_id"], fence, "1")
    submit_batch(one_pending, "a", run, last["job_id"], str(last["fence"]), "1")
    told = batch_state(one_pending, "a", run, last["job_id"])["state"]
    assert release_batch(one_pending, "a", run, last["job_id"], str(last["fence"])) == told
    assert batch_state(one_pending, "a", run, last["job_id"])["state"] == told != "reserved"
