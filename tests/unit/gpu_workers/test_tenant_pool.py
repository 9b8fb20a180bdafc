"""Tenants take turns, whoever asks for more."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future

import pytest

from vla_platform.gpu_workers.tenant_pool import TenantPool


def test_one_tenants_flood_is_its_own_queue() -> None:
    pool, gate, done = TenantPool(1, name="test"), threading.Event(), list[str]()
    first = pool.submit("a", lambda: gate.wait(10))
    flood = [pool.submit("a", lambda at=at: done.append(f"a{at}")) for at in range(50)]
    others = [pool.submit(name, lambda name=name: done.append(name)) for name in ("b", "c")]
    gate.set()
    for one in (first, *flood, *others):
        one.result(10)
    assert {"b", "c"} <= set(done[:4])
    assert [one for one in done if one[0] == "a"] == [f"a{at}" for at in range(50)]
    pool.shutdown()


def test_a_call_that_fails_is_its_own_failure() -> None:
    pool = TenantPool(1, name="test")

    def fail() -> None:
        raise KeyError("x")

    failed = pool.submit("a", fail)
    assert isinstance(failed.exception(10), KeyError)
    assert pool.submit("a", lambda: 1).result(10) == 1
    pool.shutdown()


def test_what_waits_at_the_end_is_cancelled() -> None:
    pool, gate = TenantPool(1, name="test"), threading.Event()
    running = pool.submit("a", lambda: gate.wait(10))
    waiting: Future[int] = pool.submit("a", lambda: 1)
    pool.shutdown()
    gate.set()
    assert running.result(10)
    with pytest.raises(CancelledError):
        waiting.result(10)
