"""Requests that come again have one effect, on real Valkeys."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest
import redis

from tests.integration.conftest import Process
from vla_platform.control.environment_hosts import HostState, HostTable
from vla_platform.control.environments import open_environment
from vla_platform.control.requests import once, token_of
from vla_platform.control.services import payload_clients
from vla_platform.envs import wire
from vla_platform.envs.remote_protocol import open_requests
from vla_platform.errors import QuotaError, UnavailableError

pytestmark = pytest.mark.services


@pytest.fixture
def some(some: Process, payload_redis_url: str) -> Process:
    for host_id in ("h1", "h2"):
        HostTable(some.ledger.client, ttl_s=60.0).announce(
            HostState(host_id=host_id, harness="tabletop", capacity=4, in_flight=0, accepting=True)
        )
    # Sessions go by the first of several.
    url = f"{payload_redis_url},redis://127.0.0.1:9/0"
    found = with_settings(some, payload_url=url, max_sessions_per_tenant=2)
    return replace(found, payload_clients=payload_clients(found.settings.payload_urls))


def with_settings(some: Process, **changes: Any) -> Process:
    return replace(some, settings=some.settings.model_copy(update=changes))


def asked(payload_redis_url: str) -> list[tuple[str, str]]:
    """(host, session) of the sessions that hosts were asked to open."""
    with redis.Redis.from_url(payload_redis_url) as client:
        return [
            (host_id, wire.decode(raw)["session"])
            for host_id in ("h1", "h2")
            for raw in client.lrange(open_requests(host_id), 0, -1)
        ]


ENVIRONMENT = json.dumps({"env_id": "tabletop/push", "options": {}})


def test_the_same_request_has_the_same_answer_and_one_effect(some: Process) -> None:
    effects: list[int] = []

    def change() -> dict[str, int]:
        effects.append(1)
        return {"number": len(effects)}

    answers = [once(some.ledger.client, "a", "r1", change) for _ in range(3)]
    assert answers == [{"number": 1}] * 3
    assert once(some.ledger.client, "a", "r2", change) == {"number": 2}
    assert once(some.ledger.client, "b", "r1", change) == {"number": 3}


def test_what_was_refused_may_be_tried_again(some: Process) -> None:
    answers: list[Exception | str] = [UnavailableError("no"), "yes"]

    def change() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(UnavailableError):
        once(some.ledger.client, "a", "r1", change)
    assert once(some.ledger.client, "a", "r1", change) == "yes"


def test_an_environment_asked_for_again_is_the_same_session_on_the_same_host(
    some: Process, payload_redis_url: str
) -> None:
    found = [open_environment(some, "a", ENVIRONMENT, "r1") for _ in range(4)]
    assert [found[0]] * 4 == found
    assert token_of("a", "r1") == found[0]["session"]
    assert {(found[0]["host"], found[0]["session"])} == set(asked(payload_redis_url))
    other = open_environment(some, "a", ENVIRONMENT, "r2")
    assert other["session"] != found[0]["session"]
    with pytest.raises(QuotaError):  # two requests, two sessions
        open_environment(some, "a", ENVIRONMENT, "r3")


def test_requests_that_come_at_once_open_one_session(some: Process, payload_redis_url: str) -> None:
    some = with_settings(some, max_sessions_per_tenant=8)
    gate = threading.Barrier(4)

    def open_one() -> None:
        gate.wait()
        open_environment(some, "a", ENVIRONMENT, "r1")

    threads = [threading.Thread(target=open_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(asked(payload_redis_url))) == 1
