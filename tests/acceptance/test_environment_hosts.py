"""Environment hosts as real Celery workers: rollouts, evaluations, remote sessions, a death."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import redis
from celery import Celery

from tests.acceptance.stacks import Stack, started, with_tabletop
from tests.waiting import wait_until
from vla_platform.broker import evaluation_queue, queue, rollout_queue
from vla_platform.client import Platform
from vla_platform.control.environment_hosts import HostTable
from vla_platform.envs.evaluation_records import EvaluationRecord
from vla_platform.envs.remote_protocol import acl_rules
from vla_platform.envs.rollout_messages import RolloutConfig
from vla_platform.errors import QuotaError, SpecError
from vla_storage.payloads import ArenaTier, RedisPayloadStore

HOST = "env-tabletop-1"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    roles = [role for role in with_tabletop(folder) if role.name in ("control", HOST)]
    environment = {"VLA_MAX_SESSIONS_PER_TENANT": "4"}
    with started(folder, environment=environment, roles=roles) as found:
        yield found


@pytest.fixture
def app(stack: Stack) -> Iterator[Celery]:
    with Celery("test", broker=stack.admin.info.redis_url, set_as_current=False) as app:
        app.conf.update(broker_transport="vla_platform.broker:Transport")
        yield app


@pytest.fixture
def payloads(stack: Stack) -> Iterator[RedisPayloadStore]:
    info = stack.admin.info
    local = [ArenaTier(info.arena)] if info.arena is not None else []
    store = RedisPayloadStore([info.payload_url], local=local)
    yield store
    store.close()


def config(partition: str, **changes: object) -> RolloutConfig:
    return RolloutConfig(
        tenant="a", policy_key="a/p", partition_id=partition, env_id="tabletop/push",
        cameras=("top",), image_size=32, chunk=1, env_options={"image_size": 32}, **changes,
    )  # type: ignore[arg-type]  # fmt: skip


def send(app: Celery, asked: RolloutConfig, *, horizon: int, host_id: str | None) -> None:
    arguments = {
        "config": asked.to_dict(), "job_id": "j1", "num_envs": 3, "horizon": horizon,
        "version": 4, "policy": "expert", "workload": "w1",
    }  # fmt: skip
    destination = queue(rollout_queue("tabletop", host_id))
    app.send_task("rollout.rollout", kwargs=arguments, queue=destination, ignore_result=True)


def test_a_rollout_on_the_assigned_host(
    stack: Stack, app: Celery, payloads: RedisPayloadStore
) -> None:
    admin = stack.admin
    host_id = HostTable(admin.ledger.client).assign("tabletop", instances=3)
    assert host_id == f"{HOST}.{socket.gethostname()}"
    send(app, config("p1", num_videos=1), horizon=12, host_id=HOST)
    wait_until(lambda: payloads.metadata("p1", "a"))
    rows = payloads.get("p1", "a")
    assert int(rows["is_transition"].sum()) == 36
    assert {4} == set(rows["policy_version"].tolist())
    assert admin.objects.get("a/workloads/w1/videos/j1-000.mp4")[4:8] == b"ftyp"
    wait_until(lambda: admin.ledger.client.xlen("vla:t:a:w:w1:events") == 12)


def test_an_evaluation_on_its_queue(stack: Stack, app: Celery) -> None:
    arguments = {
        "evaluation_id": "e1", "tenant": "a", "policy_key": "a/p", "version": 4,
        "policy": "expert", "suite_name": "tabletop/push", "episodes": 5,
    }  # fmt: skip
    destination = queue(evaluation_queue("tabletop"))
    for _ in range(3):  # a broker delivers again what takes long
        app.send_task(
            "evaluation.evaluate", kwargs=arguments, queue=destination, ignore_result=True
        )
    key = "a/evaluations/e1/record.json"
    wait_until(lambda: [info for info in stack.admin.objects.list(key)])
    record = EvaluationRecord.from_json(stack.admin.objects.get(key))
    assert (record.num_episodes, record.success_rate, record.policy_version) == (5, 1.0, 4)
    played = stack.admin.ledger.client.xlen("vla:t:a:w:e1:events")
    assert played == 5  # each episode once


def test_f53_a_killed_host_publishes_nothing_and_done_again_it_is_the_same(
    stack: Stack, app: Celery, payloads: RedisPayloadStore
) -> None:
    admin = stack.admin
    send(app, config("p2"), horizon=40, host_id=None)
    wait_until(lambda: payloads.metadata("p2", "a"))
    stream = "vla:t:a:w:w1:events"
    before = admin.ledger.client.xlen(stream)
    send(app, config("p3"), horizon=4000, host_id=HOST)
    wait_until(lambda: admin.ledger.client.xlen(stream) > before + 5)
    stack.kill(HOST)
    assert payloads.metadata("p3", "a") == {}
    # A message that the dying worker took along is sent again, as a reconciler does.
    resent = time.monotonic()
    send(app, config("p4"), horizon=40, host_id=None)
    while not payloads.metadata("p4", "a"):
        if time.monotonic() - resent > 8:
            send(app, config("p4"), horizon=40, host_id=None)
            resent = time.monotonic()
        time.sleep(0.1)
    expected, found = payloads.get("p2", "a"), payloads.get("p4", "a")
    assert expected.keys() == found.keys()
    for name, column in expected.items():
        np.testing.assert_array_equal(column, found[name])


@pytest.fixture
def tenant_url(stack: Stack) -> Iterator[str]:
    url = stack.admin.add("walker")
    parts = urlsplit(url)
    with redis.Redis.from_url(stack.admin.info.payload_url) as client:
        rules = ["reset", "on", f">{parts.password}", *acl_rules("walker"), "+@connection"]
        client.execute_command("ACL", "SETUSER", "walker", *rules)
    if "payload" not in parse_qs(parts.query):
        payload = urlsplit(stack.admin.info.payload_url)
        url += f"&payload={payload.hostname}:{payload.port}/0"
    yield url
    stack.admin.remove("walker")


def test_a_tenant_drives_a_session_from_python(stack: Stack, tenant_url: str) -> None:
    wait_until(lambda: HostTable(stack.admin.ledger.client).hosts("tabletop"))
    with Platform(tenant_url) as platform:
        with pytest.raises(SpecError, match="did you mean 'push'"):
            platform.environment("tabletop/puch")
        with platform.environment("tabletop/push", expert=True) as env:
            seen = env.reset(seed=5)
            while True:
                assert seen.expert_action is not None
                outcome = env.step(seen.expert_action)
                seen = outcome.observation
                if outcome.done:
                    break
            assert outcome.success
            with contextlib.ExitStack() as more:
                for _ in range(3):
                    more.enter_context(platform.environment("tabletop/reach"))
                with pytest.raises(QuotaError, match="close one first"):
                    platform.environment("tabletop/reach")
