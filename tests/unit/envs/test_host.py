"""The environment host: many tenants' sessions, and what a failing one costs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.waiting import wait_until
from vla_platform.envs.failures import Failure, failure_of
from vla_platform.envs.groups import SessionGroup
from vla_platform.envs.host import EnvironmentHost
from vla_platform.envs.runner_pool import Isolation
from vla_platform.envs.sessions import EnvironmentRequest
from vla_platform.envs.worker import limits_of
from vla_platform.errors import (
    DataError,
    NotFoundError,
    QuotaError,
    SimulatorError,
    SpecError,
    UnavailableError,
)
from vla_platform.settings import Settings
from vla_storage.errors import CodedError

MakeHost = Callable[..., EnvironmentHost]
Request = Callable[..., EnvironmentRequest]
Threads = Callable[[], set[threading.Thread]]


def opened(
    host: EnvironmentHost,
    request: EnvironmentRequest,
    *,
    tenant: str = "a",
    isolation: Isolation = Isolation.THREAD,
) -> str:
    return host.call(host.open(tenant, request, isolation=isolation)).result(60)[0]


def test_no_session_is_isolated_less_than_the_host_says(
    make_host: MakeHost, faulty: Request
) -> None:
    """Rollouts ask for what the tenant's spec says, evaluations and remote sessions for nothing."""
    settings = Settings(
        redis_url="redis://", payload_url="redis://", signing_key_file=Path("key"),
        env_isolation="shared", env_processes=1,
    )  # fmt: skip
    host = make_host(**vars(limits_of(settings)))
    children = []
    for asked in Isolation:
        opened(host, faulty(), isolation=asked)
        found = [one for one in psutil.Process().children() if "child" in str(one.cmdline())]
        children.append(len(found))
    assert children == [1, 1, 2]  # one that two share, and one of its own


@pytest.mark.parametrize("isolation", [Isolation.THREAD, Isolation.SHARED])
def test_sixteen_sessions_of_three_tenants_never_mix(
    make_host: MakeHost, faulty: Request, one_action: Any, isolation: Isolation
) -> None:
    host = make_host()
    sessions: dict[str, list[tuple[int, str]]] = {"a": [], "b": [], "c": []}
    for mark in range(1, 17):
        tenant = "abc"[mark % 3]
        request = faulty(mark=mark, length=40)
        sessions[tenant].append((mark, opened(host, request, tenant=tenant, isolation=isolation)))
    errors: list[str] = []

    def play(tenant: str) -> None:
        mine = sessions[tenant]
        host.call(host.batch_reset(tenant, [(one, mark, None) for mark, one in mine])).result(60)
        for step in range(1, 31):
            work = host.batch_step(tenant, [(one, one_action) for _, one in mine])
            for (mark, _), outcome in zip(mine, host.call(work).result(60), strict=True):
                assert not isinstance(outcome, CodedError)
                seen = outcome.observation
                corner = seen.images["main"][0, 0].tolist()
                rest = seen.images["main"][5, 5].tolist()
                if (corner, rest) != ([mark] * 3, [step] * 3):
                    errors.append(f"{tenant}: frame of {corner}, {rest} for {mark}, {step}")
                if seen.state.tolist() != [mark, mark, step] or seen.task != f"mark {mark}":
                    errors.append(f"{tenant}: {seen.state} for {mark}")

    threads = [threading.Thread(target=play, args=(tenant,)) for tenant in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert host.num_sessions == 16


def test_a_blocking_call_delays_no_other_session(
    make_host: MakeHost, faulty: Request, one_action: Any
) -> None:
    host = make_host(step_s=3.0)
    slow, quick = opened(host, faulty("hang")), opened(host, faulty(length=1000))
    for session in (slow, quick):
        host.call(host.reset("a", session, 1)).result(10)
    hanging = host.call(host.step("a", slow, one_action))
    longest = 0.0
    for _ in range(50):
        begun = time.monotonic()
        host.call(host.step("a", quick, one_action)).result(10)
        longest = max(longest, time.monotonic() - begun)
    assert not hanging.done()
    assert longest < 1.0
    with pytest.raises(SimulatorError) as caught:
        hanging.result(20)
    assert failure_of(caught.value) == Failure.HUNG
    assert host.worn_out is not None and "hang" in host.worn_out


def test_a_partial_reset_leaves_the_others_untouched(
    make_host: MakeHost, faulty: Request, one_action: Any
) -> None:
    host = make_host()
    first, second = opened(host, faulty(mark=1)), opened(host, faulty(mark=2))
    host.call(host.batch_reset("a", [(first, 1, None), (second, 2, None)])).result(10)
    host.call(host.batch_step("a", [(first, one_action), (second, one_action)])).result(10)
    (again,) = host.call(host.batch_reset("a", [(first, 9, None)])).result(10)
    outcome = host.call(host.step("a", second, one_action)).result(10)
    assert again.state.tolist() == [1, 9, 0]  # type: ignore[union-attr]
    assert outcome.observation.state.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("raise", Failure.RAISED),
        ("system_exit", Failure.RAISED),
        ("arity", Failure.BAD_OUTPUT),
        ("shape", Failure.BAD_OUTPUT),
        ("reward", Failure.BAD_OUTPUT),
    ],
)
def test_b73_a_failing_environment_is_rebuilt_and_named(
    make_host: MakeHost, faulty: Request, one_action: Any, fault: str, failure: Failure
) -> None:
    host = make_host()
    bad, good = opened(host, faulty(fault, at=2)), opened(host, faulty())
    host.call(host.batch_reset("a", [(bad, 11, None), (good, 3, None)])).result(10)
    host.call(host.step("a", bad, one_action)).result(10)
    failed, fine = host.call(host.batch_step("a", [(bad, one_action), (good, one_action)])).result(
        10
    )
    assert isinstance(failed, SimulatorError)
    details = failed.details
    assert failure == failure_of(failed)
    assert (
        details["env_id"], details["seed"], details["step"], details["rebuilt"],
    ) == ("faulty/one", 11, 1, True)  # fmt: skip
    assert "\x1b" not in failed.message and "\n" not in failed.message  # B75
    assert not isinstance(fine, CodedError)
    assert host.call(host.reset("a", bad, 11)).result(10).state.tolist() == [0, 11, 0]


@pytest.mark.parametrize(
    ("fault", "failure", "ending"),
    [
        ("segv", Failure.CRASHED, "SIGSEGV"),
        ("exit", Failure.CRASHED, "exit status 7"),
        ("hang", Failure.HUNG, None),
    ],
)
def test_f49_f50_a_process_that_dies_or_hangs_costs_its_session_only(
    make_host: MakeHost, faulty: Request, one_action: Any, fault: str, failure: Failure,
    ending: str | None,
) -> None:  # fmt: skip
    host = make_host(step_s=2.0)
    bad = opened(host, faulty(fault), isolation=Isolation.PROCESS)
    good = opened(host, faulty(), isolation=Isolation.PROCESS)
    host.call(host.batch_reset("a", [(bad, 1, None), (good, 2, None)])).result(30)
    failed, fine = host.call(host.batch_step("a", [(bad, one_action), (good, one_action)])).result(
        30
    )
    assert isinstance(failed, SimulatorError) and not isinstance(fine, CodedError)
    assert (failure, True) == (failure_of(failed), failed.details["rebuilt"])
    assert ending == failed.details.get("ending")
    again = host.call(host.reset("a", bad, 5)).result(30)
    assert again.state.tolist() == [0, 5, 0]
    assert host.worn_out is None


def test_f50_rebuilds_are_bounded_and_the_last_failure_stays(
    make_host: MakeHost, faulty: Request, one_action: Any
) -> None:
    host = make_host(max_rebuilds=2)
    session = opened(host, faulty("raise"))
    rebuilt = []
    for _ in range(3):
        host.call(host.reset("a", session, 1)).result(10)
        with pytest.raises(SimulatorError) as caught:
            host.call(host.step("a", session, one_action)).result(10)
        rebuilt.append(caught.value.details["rebuilt"])
    assert rebuilt == [True, True, False]
    with pytest.raises(SimulatorError, match="broken"):
        host.call(host.reset("a", session, 1)).result(10)


def test_f50_hanging_reset_and_close_are_bounded(make_host: MakeHost, faulty: Request) -> None:
    host = make_host(reset_s=1.0, close_s=1.0)
    session = opened(host, faulty("hang_reset"), isolation=Isolation.PROCESS)
    with pytest.raises(SimulatorError) as caught:
        host.call(host.reset("a", session, 1)).result(10)
    assert failure_of(caught.value) == Failure.HUNG
    stubborn = opened(host, faulty("hang_close"), isolation=Isolation.PROCESS)
    host.call(host.close("a", stubborn)).result(10)
    assert host.num_sessions == 1


def test_f51_a_leaking_environment_is_recycled_at_its_limit(
    make_host: MakeHost, faulty: Request
) -> None:
    host = make_host(memory_bytes=300 << 20)
    session = opened(host, faulty("leak", leak_mb=50), isolation=Isolation.PROCESS)
    pids, largest = set(), 0
    for seed in range(16):  # 800 MB without recycling
        host.call(host.reset("a", session, seed)).result(30)
        (child,) = [one for one in psutil.Process().children() if "child" in str(one.cmdline())]
        pids.add(child.pid)
        largest = max(largest, child.memory_info().rss)
    assert len(pids) > 1
    assert largest < 450 << 20


def test_memory_that_explodes_within_an_episode_ends_the_process(
    make_host: MakeHost, faulty: Request
) -> None:
    host = make_host(memory_bytes=150 << 20)
    session = opened(host, faulty("leak", leak_mb=600), isolation=Isolation.PROCESS)
    with pytest.raises(SimulatorError) as caught:
        for seed in range(50):
            host.call(host.reset("a", session, seed)).result(30)
            time.sleep(0.3)
            host.call(host.step("a", session, np.zeros((1, 1), np.float32))).result(30)
    assert failure_of(caught.value) in (Failure.OUT_OF_MEMORY,)


def test_capacity_is_per_tenant_and_the_refusal_says_so(
    make_host: MakeHost, faulty: Request
) -> None:
    host = make_host(max_per_tenant=2, max_sessions=3)
    for _ in range(2):
        opened(host, faulty(), tenant="a")
    with pytest.raises(QuotaError, match="close one first") as caught:
        opened(host, faulty(), tenant="a")
    assert caught.value.details == {"tenant": "a", "limit": 2}
    opened(host, faulty(), tenant="b")
    with pytest.raises(UnavailableError):
        opened(host, faulty(), tenant="c")


def test_sessions_that_a_tenant_drives_are_told_apart_from_its_rollouts(
    make_host: MakeHost, faulty: Request
) -> None:
    """Its quota of those is over all hosts, and a rollout's sessions it cannot close."""
    host = make_host()
    opened(host, faulty(), tenant="a")
    remote, _ = host.call(host.open("a", faulty(), remote=True)).result(20)
    assert host.remote_sessions() == {"a": 1}
    host.call(host.close("a", remote)).result(20)
    assert (host.remote_sessions(), host.num_sessions) == ({}, 1)


def test_another_tenants_session_is_not_found_like_an_unknown_one(
    make_host: MakeHost, faulty: Request, one_action: Any
) -> None:
    host = make_host()
    session = opened(host, faulty(), tenant="a")
    for name in (session, "0" * 16):
        with pytest.raises(NotFoundError) as caught:
            host.call(host.step("b", name, one_action)).result(10)
        assert {"session": name} == caught.value.details
        with pytest.raises(NotFoundError):
            host.call(host.close("b", name)).result(10)


def test_sessions_that_nobody_uses_are_collected(make_host: MakeHost, faulty: Request) -> None:
    host = make_host(lease_s=0.4)
    dead = opened(host, faulty(), isolation=Isolation.PROCESS)
    kept = opened(host, faulty())
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        host._loop.call_soon_threadsafe(host.keep, "a", kept)
        time.sleep(0.05)
    assert host.num_sessions == 1
    with pytest.raises(NotFoundError):
        host.call(host.reset("a", dead, 1)).result(10)


def test_i10_nothing_is_left_running_after_shut_down(make_host: MakeHost, faulty: Request) -> None:
    before = set(threading.enumerate())
    ours = set(psutil.Process(os.getpid()).children())  # servers of other tests
    host = make_host()
    for isolation in Isolation:
        session = opened(host, faulty(), isolation=isolation)
        host.call(host.reset("a", session, 1)).result(30)
    assert len(set(psutil.Process(os.getpid()).children()) - ours) == 2
    host.shut_down()
    wait_until(lambda: set(psutil.Process(os.getpid()).children()) <= ours)
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_b36_b38_refused_actions_leave_the_session_running(
    make_host: MakeHost, faulty: Request, one_action: Any
) -> None:
    host = make_host()
    session = opened(host, faulty())
    host.call(host.reset("a", session, 1)).result(10)
    for bad in (
        np.full((1, 1), np.nan, np.float32), np.full((1, 1), np.inf, np.float32),
        np.zeros((1, 1)), np.zeros((1, 2), np.float32), np.zeros(1, np.float32),
        np.zeros((0, 1), np.float32), np.zeros((65, 1), np.float32), [[0.0]],
    ):  # fmt: skip
        with pytest.raises(DataError):
            host.call(host.step("a", session, bad)).result(10)  # type: ignore[arg-type]
    outcome = host.call(host.step("a", session, one_action)).result(10)
    assert outcome.observation.state.tolist() == [0, 1, 1]


def test_snapshot_and_restore_through_the_host(make_host: MakeHost) -> None:
    host = make_host()
    request = EnvironmentRequest(env_id="tabletop/push", options={"render": False}, expert=True)
    session = opened(host, request)
    seen = host.call(host.reset("a", session, 4)).result(10)
    taken = host.call(host.snapshot("a", session)).result(10)
    paths = []
    for _ in range(2):
        states = []
        for _ in range(6):
            assert seen.expert_action is not None
            outcome = host.call(host.step("a", session, seen.expert_action[None])).result(10)
            seen = outcome.observation
            states.append(seen.state.tolist())
        paths.append(states)
        seen = host.call(host.restore("a", session, taken)).result(10)
    assert paths[0] == paths[1]


def test_a_wrong_request_opens_nothing(make_host: MakeHost) -> None:
    host = make_host()
    with pytest.raises(SpecError, match="did you mean 'push'"):
        opened(host, EnvironmentRequest(env_id="tabletop/pusch"))
    assert host.num_sessions == 0


@pytest.fixture
def threads() -> Callable[[], set[threading.Thread]]:
    """The sessions' threads of this test, without what others abandoned."""
    before = set(threading.enumerate())

    def found() -> set[threading.Thread]:
        new = set(threading.enumerate()) - before
        return {one for one in new if one.name.startswith("session-")}

    return found


def group(host: EnvironmentHost, request: EnvironmentRequest, *, tenant: str = "a") -> SessionGroup:
    return SessionGroup(host, tenant=tenant, request=request, num_sessions=2)


def test_what_was_slow_to_make_is_there_for_the_next_group(
    make_host: MakeHost, faulty: Request, one_action: Any, threads: Threads
) -> None:
    host = make_host(slow_s=0.0)
    with group(host, faulty()) as first:
        first.reset([0, 1], [5, 6])
        first.step([0], [one_action])
    made = threads()
    assert (host.num_sessions, len(made)) == (0, 2)
    with group(host, faulty()) as again:
        assert threads() == made
        seen = again.reset([0, 1], [7, 8])
        assert [one.state.tolist() for one in seen] == [[0.0, 7.0, 0.0], [0.0, 8.0, 0.0]]
    with group(host, faulty(length=9)), group(host, faulty(), tenant="b"):
        assert len(threads() - made) == 4  # others' and other environments are others
    opened(host, faulty())  # a tenant's own session is made for it
    assert len(threads() - made) == 5


def test_what_is_made_fast_or_broken_is_not_kept(
    make_host: MakeHost, faulty: Request, one_action: Any, threads: Threads
) -> None:
    with group(make_host(slow_s=60.0), faulty()):
        pass
    host = make_host(slow_s=0.0)
    with group(host, faulty("raise")) as failing:
        failing.reset([0], [1])
        assert isinstance(failing.step([0], [one_action])[0], SimulatorError)
    wait_until(lambda: len(threads()) == 1)  # the other one, in which nothing failed


def test_parked_environments_go_in_time_and_make_room(
    make_host: MakeHost, faulty: Request, threads: Threads
) -> None:
    host = make_host(slow_s=0.0, parked_s=0.3)
    with group(host, faulty()):
        made = threads()
    wait_until(lambda: not threads())
    assert (host.num_sessions, len(made)) == (0, 2)
    host = make_host(slow_s=0.0, max_sessions=3)
    with group(host, faulty()):
        pass
    parked = threads()
    with group(host, faulty(mark=1)):
        wait_until(lambda: len(threads()) == 3)
        assert (host.num_sessions, len(parked), len(parked & threads())) == (2, 2, 1)
    host.shut_down()
    wait_until(lambda: not threads())
    assert host.num_sessions == 0
