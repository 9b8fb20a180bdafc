"""Events go once to the tenant's stream and once to S3, also when the collector dies in between."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from prometheus_client import REGISTRY

from vla_platform.control import usage
from vla_platform.metrics.collector import collect, open_group
from vla_platform.metrics.events import PLATFORM_STREAM, Emitter, Event, stream_of
from vla_storage.errors import StorageUnavailableError
from vla_storage.objects import Body, MemoryObjectStore


@pytest.fixture
def client(control_redis_url: str) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(control_redis_url, decode_responses=True)
    yield client
    client.close()


def emit(client: redis.Redis, *, steps: int, workload: str = "run-1", tenant: str = "a") -> None:
    emitter = Emitter(client)
    for step in range(1, steps + 1):
        values: dict[str, Any] = {"step": step, "loss": 0.5, "samples": 8, "cache_hits": 2}
        values["group_size"] = 1
        emitter.emit(Event(tenant=tenant, workload=workload, kind="step", values=values))
    emitter.close()


def stored_steps(objects: MemoryObjectStore, tenant: str, workload: str) -> list[int]:
    lines: list[str] = []
    for info in objects.list(f"{tenant}/workloads/{workload}/metrics/"):
        lines += objects.get(info.key).decode().splitlines()
    return [json.loads(line)["step"] for line in lines]


class Failing(MemoryObjectStore):
    """A store that is down for the first write."""

    down = True

    def put(
        self,
        key: str,
        data: Body,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        sha256: str | None = None,
    ) -> str:
        if self.down:
            raise StorageUnavailableError("down")
        return super().put(key, data, if_absent=if_absent, if_match=if_match, sha256=sha256)


def test_every_event_reaches_its_tenants_prefix_once(client: redis.Redis) -> None:
    open_group(client)
    open_group(client)  # a restart finds its group
    objects = MemoryObjectStore()
    emit(client, steps=3)
    emit(client, steps=2, workload="run-2", tenant="b")
    while collect(client, objects, block_ms=10):
        pass
    assert stored_steps(objects, "a", "run-1") == [1, 2, 3]
    assert stored_steps(objects, "b", "run-2") == [1, 2]
    assert client.xlen(stream_of("a", "run-1")) == 3


def test_updates_of_rl_count_as_training(client: redis.Redis) -> None:
    """An alert says that training stands by these."""
    open_group(client)
    emitter = Emitter(client)
    for step in (1, 2):
        values: dict[str, Any] = {"step": step, "loss": 0.25, "num_rows": 32, "staleness": 1}
        emitter.emit(Event(tenant="a", workload="rl-1", kind="update", values=values))
    emitter.close()
    while collect(client, MemoryObjectStore(), block_ms=10):
        pass
    shown = {
        name: REGISTRY.get_sample_value(name, {"tenant": "a", "workload": "rl-1"})
        for name in ("vla_steps_total", "vla_samples_total", "vla_loss", "vla_policy_staleness")
    }
    assert list(shown.values()) == [2, 64, 0.25, 1]


def test_what_was_read_and_not_stored_is_stored_later(client: redis.Redis) -> None:
    open_group(client)
    emit(client, steps=3)
    objects = Failing()
    with pytest.raises(StorageUnavailableError):
        collect(client, objects, block_ms=10)
    objects.down = False
    while collect(client, objects, block_ms=10):
        pass
    assert stored_steps(objects, "a", "run-1") == [1, 2, 3]


def test_a_redis_that_is_gone_holds_up_nobody() -> None:
    emitter = Emitter(redis.Redis(port=1, socket_connect_timeout=0.1))
    emitter.emit(Event(tenant="a", workload="r", kind="step"))
    emitter.close(timeout_s=5)
    assert not emitter._thread.is_alive()


class Deaf:
    """A client whose first transaction reaches the server, and its answer nobody."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self.heard = False

    @contextlib.contextmanager
    def pipeline(self, *, transaction: bool) -> Iterator[Any]:
        with self._client.pipeline(transaction=transaction) as pipe:
            yield pipe
            if not self.heard:
                self.heard = True
                raise redis.TimeoutError("no answer")


def test_what_an_emitter_sends_twice_is_stored_and_billed_once(client: redis.Redis) -> None:
    open_group(client)
    emitter = Emitter(Deaf(client))
    values = {"base_model": "tiny", "requests": 3, "backbone_s": 0.5, "waited_ms": 1.0,
              "batch_size": 3, "forward_ms": 1.0, "decode_ms": 1.0, "queue_depth": 0}  # fmt: skip
    emitter.emit(Event(tenant="a", workload="serving", kind="inference", values=values))
    while client.xlen(PLATFORM_STREAM) < 2:
        time.sleep(0.01)
    emitter.close()
    objects = MemoryObjectStore()
    while collect(client, objects, block_ms=10):
        pass
    (stored,) = objects.list("a/workloads/serving/metrics/")
    assert len(objects.get(stored.key).splitlines()) == 1
    totals = usage.statement(client, "a", usage.today(client)).totals
    assert totals == {"requests": 3.0, "backbone_s": 0.5}
