"""Tenants' remote sessions over a real Valkey, each with a user that reaches its own keys only."""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import redis

from vla_platform.client.environments import RemoteEnvironment, batch_step
from vla_platform.envs import wire
from vla_platform.envs.host import EnvironmentHost, HostLimits
from vla_platform.envs.remote import RemoteSessions
from vla_platform.envs.remote_protocol import acl_rules, from_session, open_requests, to_host
from vla_platform.envs.sessions import EnvironmentRequest
from vla_platform.errors import (
    ConfigurationError,
    DataError,
    NotFoundError,
    QuotaError,
    UnavailableError,
)
from vla_storage.errors import CodedError

HOST = "env-tabletop-1"
Open = Callable[..., RemoteEnvironment]


@pytest.fixture
def host() -> Iterator[EnvironmentHost]:
    host = EnvironmentHost(HostLimits(max_per_tenant=3, lease_s=3.0))
    yield host
    host.shut_down()


@pytest.fixture
def serving(payload_redis_url: str, host: EnvironmentHost) -> Iterator[RemoteSessions]:
    with redis.Redis.from_url(payload_redis_url) as client:
        sessions = RemoteSessions(client, host, HOST)
        yield sessions
        sessions.close()


@pytest.fixture
def client_of(payload_redis_url: str) -> Iterator[Callable[[str], redis.Redis]]:
    with contextlib.ExitStack() as stack, redis.Redis.from_url(payload_redis_url) as admin:

        def make(tenant: str) -> redis.Redis:
            password = secrets.token_hex(8)
            rules = ["reset", "on", f">{password}", *acl_rules(tenant), "+@connection"]
            admin.execute_command("ACL", "SETUSER", tenant, *rules)
            stack.callback(admin.execute_command, "ACL", "DELUSER", tenant)
            client = redis.Redis.from_url(
                payload_redis_url, username=tenant, password=password, socket_timeout=70
            )
            return stack.enter_context(client)

        yield make


@pytest.fixture
def open_session(
    payload_redis_url: str, serving: RemoteSessions, client_of: Callable[[str], redis.Redis]
) -> Iterator[Open]:
    """As the control worker does it, after it has assigned the host."""
    clients: dict[str, redis.Redis] = {}
    opened: list[RemoteEnvironment] = []
    with redis.Redis.from_url(payload_redis_url) as admin:

        def open_one(tenant: str, env_id: str = "tabletop/push", **options: Any) -> Any:
            session = secrets.token_hex(8)
            request = EnvironmentRequest(env_id=env_id, options=options, expert=True)
            message = {"tenant": tenant, "session": session, "request": request}
            admin.rpush(open_requests(HOST), wire.encode(message))
            if tenant not in clients:
                clients[tenant] = client_of(tenant)
            env = RemoteEnvironment(
                clients[tenant], tenant=tenant, host_id=HOST, session=session, timeout_s=10.0
            )
            opened.append(env)
            return env

        yield open_one
        for env in opened:
            with contextlib.suppress(CodedError):
                env.close()


def test_a_tenant_drives_an_environment_to_its_end(open_session: Open) -> None:
    with open_session("a") as env:
        assert env.info.action_names == ("dx", "dy")
        assert dict(env.info.cameras) == {"top": (128, 128), "wrist": (128, 128)}
        seen = env.reset(seed=3)
        taken = env.snapshot()
        rewards = []
        while True:
            assert seen.expert_action is not None
            outcome = env.step(seen.expert_action)
            seen = outcome.observation
            rewards.append(float(outcome.rewards.sum()))
            if outcome.done:
                break
        assert outcome.success
        with pytest.raises(ConfigurationError, match="reset"):
            env.step(np.zeros(2, np.float32))
        again = env.restore(taken)
        np.testing.assert_array_equal(env.reset(seed=3).images["top"], again.images["top"])


def test_a_session_asked_for_again_is_not_opened_again(
    open_session: Open, payload_redis_url: str, host: EnvironmentHost
) -> None:
    env = open_session("a")
    request = EnvironmentRequest(env_id="tabletop/push", options={}, expert=True)
    with redis.Redis.from_url(payload_redis_url) as admin:
        again = {"tenant": "a", "session": env._session, "request": request}
        admin.rpush(open_requests(HOST), wire.encode(again))
        open_session("b")  # read after it
        assert admin.llen(from_session("a", env._session)) == 0
    assert host.num_sessions == 2
    env.reset(seed=1)


def test_a_session_that_ended_is_said_to_be_gone(open_session: Open) -> None:
    """Its tenant's last one, though the host has looked about since."""
    env = open_session("a")
    env.close()
    open_session("b")
    with pytest.raises(NotFoundError):
        env._call("reset", {"seed": 1})


def test_errors_of_a_session_arrive_typed(open_session: Open) -> None:
    env = open_session("a")
    env.reset(seed=1)
    for bad in (np.zeros(2), np.full(2, np.nan, np.float32), np.zeros((1, 3), np.float32)):
        with pytest.raises(DataError):
            env.step(bad)
    with pytest.raises(ConfigurationError, match="seed"):
        env.reset(seed=-1)
    with pytest.raises(DataError, match="unknown call"):
        env._call("__class__", {})
    with pytest.raises(DataError, match="needs"):
        env._call("step", {})
    env.close()
    env.close()
    with pytest.raises(NotFoundError):
        env._call("reset", {"seed": 1})


def test_tenants_reach_only_their_own_sessions(
    open_session: Open, payload_redis_url: str, client_of: Callable[[str], redis.Redis]
) -> None:
    mine, theirs = open_session("a"), open_session("ab")
    mine.reset(seed=1)
    theirs.reset(seed=2)
    foreign = theirs._redis
    for key in (to_host("a", HOST), from_session("a", mine._session), open_requests(HOST)):
        with pytest.raises(redis.exceptions.NoPermissionError):
            foreign.rpush(key, b"x")
        with pytest.raises(redis.exceptions.NoPermissionError):
            foreign.blpop([key], timeout=0.1)
    # By its own list, but with the name of another's session.
    message = {"session": mine._session, "call": 1, "op": "reset", "arguments": {"seed": 9}}
    foreign.rpush(to_host("ab", HOST), wire.encode(message))
    found = foreign.blpop([from_session("ab", mine._session)], timeout=10)
    assert isinstance(wire.decode(found[1])["error"], NotFoundError)
    assert mine.step(np.zeros(2, np.float32)).num_steps == 1


def test_capacity_is_refused_by_name(open_session: Open) -> None:
    for _ in range(3):
        open_session("a")
    with pytest.raises(QuotaError, match="close one first"):
        open_session("a")
    assert open_session("b").info.max_steps == 80


def test_b26_b30_garbage_is_dropped_and_the_host_goes_on(open_session: Open) -> None:
    env = open_session("a")
    env.reset(seed=1)
    key = to_host("a", HOST)
    for raw in (b"", b"\x80\x04N.", b"x" * 2_000_000, wire.encode({"session": 1, "call": "x"})):
        env._redis.rpush(key, raw)
    env._redis.rpush(key, wire.encode({"session": "../x", "call": 1, "op": "keep",
                                       "arguments": {}}))  # fmt: skip
    assert env.step(np.zeros(2, np.float32)).num_steps == 1


def test_sessions_of_dead_clients_are_collected(open_session: Open, host: EnvironmentHost) -> None:
    env = open_session("a")
    env.reset(seed=1)
    env._closed.set()  # nothing keeps it any more, as after a crash
    end = time.monotonic() + 15
    while host.num_sessions and time.monotonic() < end:
        time.sleep(0.05)
    assert host.num_sessions == 0
    with pytest.raises(NotFoundError):
        env._call("reset", {"seed": 1})


def test_a_host_that_is_gone_is_reported_in_time(
    open_session: Open, serving: RemoteSessions
) -> None:
    env = open_session("a")
    serving.close()
    env._timeout_s = 1.0
    with pytest.raises(UnavailableError, match="gave no answer"):
        env.reset(seed=1)


def test_steps_of_several_sessions_travel_together(open_session: Open) -> None:
    envs = [open_session("a") for _ in range(3)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    chunk = np.zeros((2, 2), np.float32)
    outcomes = batch_step([(env, chunk) for env in envs[:2]] + [(envs[2], chunk[:, :1])])
    assert [one.num_steps for one in outcomes[:2]] == [2, 2]  # type: ignore[union-attr]
    assert isinstance(outcomes[2], DataError)


def test_a_remote_step_costs_milliseconds(open_session: Open) -> None:
    env = open_session("a", render=False)
    env.reset(seed=1)
    took = []
    for _ in range(60):
        begun = time.perf_counter()
        env.step(np.zeros(2, np.float32))
        took.append(time.perf_counter() - begun)
    assert statistics.median(took) < 0.02
