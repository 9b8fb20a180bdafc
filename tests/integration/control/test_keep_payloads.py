"""The reconciler and the payload store: orphans go, live samples stay, tenants come back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import redis

from vla_platform.control import reconciler
from vla_platform.control.ledger import TrainingJob
from vla_platform.control.services import Services, connect
from vla_platform.control.tenant_records import TENANTS_KEY, Tenant, record_key
from vla_platform.settings import Settings
from vla_platform.stack.servers import S3Address
from vla_storage.payloads.arena_file import create_arena

pytestmark = pytest.mark.services
X = {"x": np.arange(30_000)}


@pytest.fixture
def services(
    control_redis_url: str, payload_redis_url: str, s3: S3Address, tmp_path: Path
) -> Iterator[Services]:
    create_arena(tmp_path / "arena", 1 << 20)
    found = connect(
        Settings(
            redis_url=control_redis_url,
            payload_url=payload_redis_url,
            arena=tmp_path / "arena",
            s3_endpoint=s3.endpoint,
            s3_access_key=s3.access_key,
            s3_secret_key=s3.secret_key,
            s3_bucket=s3.bucket,
            signing_key_file=tmp_path / "key",
        )
    )
    found.ledger.load()
    yield found
    found.payloads.close()
    found.emitter.close()
    found.ledger.close()
    found.objects.close()
    for client in found.payload_clients:
        with contextlib.suppress(redis.RedisError):
            client.execute_command("ACL", "DELUSER", "a")
        client.close()


def reserve(services: Services) -> TrainingJob:
    fields = {
        "tenant": "a", "policy": "pick", "policy_key": "a/pick", "kind": "sft",
        "base_model": "tiny", "schema_signature": "s" * 64, "spec_digest": "d" * 64,
        "priority": 0, "max_in_flight": 4,
    }  # fmt: skip
    services.ledger.submit("r", fields, max_pending=100)
    services.ledger.prepared("r", total_positions=3, total_steps=3)
    services.ledger.admit("r", max_running=10)
    job = services.ledger.reserve("r", lease_s=60)
    assert isinstance(job, TrainingJob)
    return job


def test_f36_f53_orphans_go_and_samples_of_live_jobs_stay(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "COLLECT_S", 0.001)
    job = reserve(services)
    assert services.ledger.live_partitions() == {(job.partition_id, "a")}
    for partition in (job.partition_id, "p-of-nobody"):
        info = services.payloads.put(partition, "a", X, ttl_s=600)["x"]
        assert info.tiers == ("arena",)
    services.payloads.put("mine", "a", X, ttl_s=600, owner="tenant")

    assert reconciler.keep_payloads(services) == 1
    left = {use.key.partition_id for use in services.payloads.partitions()}
    assert left == {job.partition_id, "mine"}
    services.ledger.cancel("r")
    assert services.ledger.live_partitions() == set()
    monkeypatch.setattr(reconciler, "COLLECT_S", 60.0)  # the ended job is cleared, not collected
    assert reconciler.keep_payloads(services) == 1
    assert not services.payloads.clear(job.partition_id, "a")


def test_one_of_several_reconcilers_collects_per_period(services: Services) -> None:
    assert [services.ledger.is_due("x", every_s=60) for _ in range(3)] == [True, False, False]


def test_a_restarted_payload_redis_knows_its_tenants_again(services: Services) -> None:
    tenant = Tenant(tenant_id="a", password_sha256="0" * 64, payload_quota_bytes=1000)
    services.objects.put(record_key("a"), json.dumps(asdict(tenant)).encode())
    services.ledger.client.sadd(TENANTS_KEY, "a")
    (client,) = services.payload_clients

    reconciler.keep_payloads(services)
    assert b"a" in client.execute_command("ACL", "USERS")
    assert client.get("a:quota:payload") == b"1000"
    client.flushall()
    reconciler.keep_payloads(services)
    assert client.get("a:quota:payload") == b"1000"


def test_an_outage_of_the_payload_redis_stops_no_reconciler(services: Services) -> None:
    nowhere = redis.Redis.from_url("redis://127.0.0.1:9/0")
    services.ledger.client.sadd(TENANTS_KEY, "a")
    assert reconciler.keep_payloads(replace(services, payload_clients=(nowhere,))) == 0
