"""An environment host as a real Celery worker: evaluations, remote sessions. Rollouts, and a host
that dies in one, are in `test_rl`."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
import redis
from celery import Celery

from tests.acceptance.stacks import Stack, started, with_tabletop
from tests.waiting import wait_until
from vla_platform.broker import evaluation_queue, queue
from vla_platform.client import Platform
from vla_platform.control.environment_hosts import HostTable
from vla_platform.envs.evaluation_records import EvaluationRecord
from vla_platform.envs.remote_protocol import acl_rules
from vla_platform.errors import QuotaError, SpecError

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
    table = HostTable(stack.admin.ledger.client)
    wait_until(lambda: table.hosts("tabletop"))
    assert [one.host_id for one in table.hosts("tabletop")] == [f"{HOST}.{socket.gethostname()}"]
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
