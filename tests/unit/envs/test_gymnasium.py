"""Environments of gymnasium, in a process of their own: it serves one simulator only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vla_platform.envs.host import EnvironmentHost
from vla_platform.envs.runner_pool import Isolation
from vla_platform.envs.sessions import EnvironmentRequest
from vla_platform.errors import SimulatorError

MakeHost = Callable[..., EnvironmentHost]


def opened(host: EnvironmentHost, name: str, **options: Any) -> tuple[str, Any]:
    request = EnvironmentRequest(env_id=f"gymnasium/{name}", options=options)
    return host.call(host.open("a", request, isolation=Isolation.PROCESS)).result(60)


def test_a_choice_is_the_largest_of_the_numbers(make_host: MakeHost) -> None:
    host = make_host()
    session, info = opened(host, "CartPole-v1", success_return=20.0, task="balance")
    assert (len(info.state_names), len(info.action_names), info.max_steps) == (4, 2, 500)
    seen = host.call(host.reset("a", session, 3)).result(30)
    assert seen.task == "balance"
    total, outcome = 0.0, None
    for _ in range(500):
        lean = seen.state[2] + 0.5 * seen.state[3]
        choice = np.array([[0.0, 1.0]] if lean > 0 else [[1.0, 0.0]], np.float32)
        outcome = host.call(host.step("a", session, choice)).result(30)
        seen = outcome.observation
        total += float(outcome.rewards.sum())
        if outcome.done:
            break
    assert outcome is not None and outcome.success and total >= 20
    again = host.call(host.reset("a", session, 3)).result(30)
    first = host.call(host.reset("a", session, 3)).result(30)
    np.testing.assert_array_equal(first.state, again.state)


def test_the_time_limit_truncates(make_host: MakeHost) -> None:
    host = make_host()
    session, _ = opened(host, "Pendulum-v1", max_steps=5)
    host.call(host.reset("a", session, 1)).result(30)
    outcome = host.call(host.step("a", session, np.zeros((8, 1), np.float32))).result(30)
    assert (outcome.num_steps, outcome.terminated, outcome.truncated) == (5, False, True)


def test_an_unregistered_id_is_not_built(make_host: MakeHost) -> None:
    host = make_host()
    with pytest.raises(SimulatorError, match="NameNotFound"):
        opened(host, "NoSuchThing-v3")
