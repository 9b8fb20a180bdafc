"""What a broker can do to the platform beside dying: fall silent, forget, lose a reply.

Real processes; the control Redis stands behind a proxy that the tests control.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import redis

from tests.acceptance.stacks import RANDOM, WORKERS, demonstrate, losses, sft, started
from tests.conftest import running
from tests.proxy import Proxy
from tests.waiting import wait_until
from vla_platform.client import Platform, Run
from vla_platform.control.ledger import Ledger
from vla_platform.stack.ports import LOOPBACK, free_ports
from vla_platform.stack.servers import redis_ready, redis_server

STEPS = 40
TIMEOUT_S = 150
RECOVERY_S = 90.0
"""A silent connection is given up within 30 s; a worker may have several, and one worker may wait
for another."""
numbers = itertools.count()


class ControlRedis:
    """An append-only Valkey that can be stopped, killed and set back."""

    def __init__(self, folder: Path) -> None:
        self._port = free_ports(("redis",))["redis"]
        self.url = f"redis://{LOOPBACK}:{self._port}/0"
        folder.mkdir()
        users = folder / "users.acl"  # as in the stack: users outlive the server
        users.write_text("user default on nopass ~* &* +@all\n")
        self._server = redis_server("redis", folder, self._port, persistent=True, acl_file=users)
        self._running = ExitStack()
        self.start()

    def start(self) -> None:
        process = self._running.enter_context(running(self._server, lambda: redis_ready(self.url)))
        found = psutil.Process(process.pid)
        self.process = next(iter(found.children(recursive=True)), found)

    def kill(self) -> None:
        self._running.close()

    def copy(self, to: Path) -> None:
        shutil.copytree(self._server.folder, to)

    def set_back(self, copy: Path) -> None:
        self.kill()
        shutil.rmtree(self._server.folder)
        shutil.copytree(copy, self._server.folder)
        self.start()


class Tenant:
    """One, and the broker that fails it."""

    def __init__(self, broker: ControlRedis, proxy: Proxy, platform: Platform) -> None:
        self.broker, self.proxy, self.platform = broker, proxy, platform
        self.ledger = Ledger.connect(broker.url)  # past the proxy

    def submit(self) -> Run:
        return self.platform.submit(sft(f"p{next(numbers)}", steps=STEPS))


@pytest.fixture(scope="module")
def tenant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenant]:
    folder = tmp_path_factory.mktemp("broker")
    demonstrate(folder, episodes=8)
    broker = ControlRedis(folder / "redis")
    proxy = Proxy(broker.url)
    environment = {**RANDOM, "VLA_REDIS_URL": proxy.url}
    try:
        with (
            started(folder, environment=environment, roles=WORKERS) as stack,
            Platform(stack.admin.add("a")) as platform,
        ):
            found = Tenant(broker, proxy, platform)
            yield found
            found.ledger.close()
    finally:
        proxy.close()
        broker.kill()


@pytest.fixture(scope="module")
def calm(tenant: Tenant) -> dict[int, float]:
    run = tenant.submit()
    run.result(TIMEOUT_S)
    return losses(run)


def step_of(tenant: Tenant, run: Run) -> int:
    return int(tenant.ledger.workload(run.id)["step"])


def reach(tenant: Tenant, run: Run, step: int) -> None:
    wait_until(lambda: step_of(tenant, run) >= step, TIMEOUT_S)


def assert_each_step_once(tenant: Tenant, run: Run, calm: dict[int, float]) -> None:
    assert run.result(TIMEOUT_S).step == STEPS
    assert list(tenant.ledger.steps(run.id)) == list(range(1, STEPS + 1))
    assert losses(run) == calm


@pytest.mark.slow  # a minute of time-outs
def test_half_open_connections_are_given_up_f25(tenant: Tenant, calm: dict[int, float]) -> None:
    """Bytes are taken and nothing comes back, without an error: all notice by their time-outs."""
    run = tenant.submit()
    reach(tenant, run, 5)
    assert tenant.proxy.freeze() > 0
    silent_since = time.monotonic()
    reach(tenant, run, step_of(tenant, run) + 1)
    assert time.monotonic() - silent_since < RECOVERY_S
    assert_each_step_once(tenant, run, calm)


@pytest.mark.slow  # a minute of time-outs
def test_a_broker_that_stands_still_is_waited_for_f26(
    tenant: Tenant, calm: dict[int, float]
) -> None:
    """Stopped for longer than any socket waits: clients send again, and it counts once."""
    run = tenant.submit()
    reach(tenant, run, 5)
    tenant.broker.process.suspend()
    try:
        time.sleep(40)  # the fault itself: the longest time-out is 30 s
    finally:
        tenant.broker.process.resume()
    assert_each_step_once(tenant, run, calm)


def test_a_submit_whose_reply_is_lost_is_one_run_f43_f44(
    tenant: Tenant, calm: dict[int, float]
) -> None:
    tenant.proxy.swallow_reply_to(b"ingress.submit")
    before = {run.id for run in tenant.platform.runs()}
    run = tenant.submit()
    assert tenant.proxy.has_swallowed
    assert {one.id for one in tenant.platform.runs()} - before == {run.id}
    assert_each_step_once(tenant, run, calm)


def test_deleted_routing_keys_are_declared_again_f29_pf04(
    tenant: Tenant, calm: dict[int, float]
) -> None:
    with redis.Redis.from_url(tenant.broker.url) as admin:
        for _ in range(5):
            for key in admin.scan_iter("_kombu.binding.*"):
                admin.delete(key)
            run = tenant.submit()
            for key in admin.scan_iter("_kombu.binding.*"):
                admin.delete(key)
            assert_each_step_once(tenant, run, calm)


def test_thousands_of_orphaned_messages_starve_nobody_f34_pf05(
    tenant: Tenant, calm: dict[int, float]
) -> None:
    """Messages whose workers died come back within the recovery time, and new work goes on."""
    with redis.Redis.from_url(tenant.broker.url, decode_responses=True) as admin:
        tenant.submit().result(TIMEOUT_S)
        orphan = '[{"body": "", "headers": {}, "properties": {"delivery_info": {"exchange": "",'
        orphan += ' "routing_key": "lost"}, "delivery_tag": "%d"}}, "", "lost"]'
        with admin.pipeline(transaction=False) as pipe:
            for number in range(5000):
                pipe.hset("unacked", f"orphan-{number}", orphan % number)
                pipe.zadd("unacked_index", {f"orphan-{number}": time.time() - 3600})
            pipe.execute()
        began = time.monotonic()
        run = tenant.submit()
        assert_each_step_once(tenant, run, calm)
        while left := admin.zcount("unacked_index", "-inf", time.time() - 1800):
            assert time.monotonic() - began < 60, left
            time.sleep(0.2)
        assert admin.llen("lost") == 5000
        admin.delete("lost")


def test_a_server_that_forgot_the_last_seconds_goes_on_f31(
    tenant: Tenant, calm: dict[int, float], tmp_path: Path
) -> None:
    """A replica that lacks what was written last is promoted. Steps that a checkpoint holds are not
    done again, and stay out of the log that forgot them; every other one is there once."""
    run = tenant.submit()
    reach(tenant, run, 8)
    tenant.broker.copy(tmp_path / "older")
    reach(tenant, run, 14)
    tenant.broker.set_back(tmp_path / "older")
    assert run.result(TIMEOUT_S).step == STEPS
    told = losses(run)
    assert told == {step: calm[step] for step in told}
    log = list(tenant.ledger.steps(run.id))
    forgotten = set(range(1, STEPS + 1)) - set(log)
    assert (sorted(set(log)), forgotten - {9, 10}) == (log, set())
    assert tenant.platform.verify(run.status().checkpoint or "").step == STEPS
