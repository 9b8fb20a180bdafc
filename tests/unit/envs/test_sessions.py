"""A session: chunks, early stop, and what of a simulator's output is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vla_platform.envs.checks import plain_info
from vla_platform.envs.failures import Failure, failure_of
from vla_platform.envs.harnesses import open_session
from vla_platform.envs.sessions import EnvironmentRequest
from vla_platform.errors import ConfigurationError, SimulatorError

Request = Callable[..., EnvironmentRequest]


@pytest.mark.usefixtures("plugin")
class TestFaulty:
    def test_a_chunk_is_executed_step_by_step_and_stops_with_the_episode(
        self, faulty: Request
    ) -> None:
        session = open_session(faulty(length=5))
        session.reset(1)
        first = session.step(np.zeros((3, 1), np.float32), every_frame=True)
        last = session.step(np.zeros((8, 1), np.float32), every_frame=True)
        assert [first.num_steps, last.num_steps] == [3, 2]
        assert [int(seen.state[2]) for seen in first.frames] == [1, 2, 3]
        assert (last.terminated, last.truncated, last.success) == (False, True, True)
        with pytest.raises(ConfigurationError, match="reset"):
            session.step(np.zeros((1, 1), np.float32))

    def test_pf33_frames_are_copies_of_a_reused_buffer(self, faulty: Request) -> None:
        session = open_session(faulty(length=3))
        first = session.reset(1)
        outcome = session.step(np.zeros((3, 1), np.float32), every_frame=True)
        session.reset(2)
        shown = [int(seen.images["main"][5, 5, 0]) for seen in (first, *outcome.frames)]
        assert shown == [0, 1, 2, 3]
        assert outcome.observation.images["main"][5, 5, 0] == 3

    @pytest.mark.parametrize("reward", [None, 1e30, -1e30])
    def test_b39_rewards_that_are_no_numbers_are_refused(
        self, faulty: Request, reward: float | None
    ) -> None:
        session = open_session(faulty("reward", reward=reward))
        session.reset(1)
        with pytest.raises(SimulatorError) as caught:
            session.step(np.zeros((1, 1), np.float32))
        assert failure_of(caught.value) == Failure.BAD_OUTPUT

    def test_b41_termination_wins_over_truncation(self, faulty: Request) -> None:
        session = open_session(faulty("both_ends"))
        session.reset(1)
        outcome = session.step(np.zeros((1, 1), np.float32))
        assert (outcome.terminated, outcome.truncated) == (True, False)

    def test_b74_infos_become_plain(self, faulty: Request) -> None:
        session = open_session(faulty("info"))
        session.reset(1)
        outcome = session.step(np.zeros((1, 1), np.float32))
        assert dict(outcome.info) == {"success": False, "good": 1, "text": "a\\x00b"}

    @pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True, "1", None])
    def test_seeds_are_checked(self, faulty: Request, seed: Any) -> None:
        with pytest.raises(ConfigurationError, match="seed"):
            open_session(faulty()).reset(seed)


@pytest.mark.parametrize("reward", [np.nan, np.inf, np.zeros(1), None, True, "1"])
def test_b39_rewards(reward: Any) -> None:
    from vla_platform.envs.checks import check_reward

    with pytest.raises(ValueError, match="reward"):
        check_reward(reward)


def test_infos_are_bounded() -> None:
    assert len(plain_info({str(number): number for number in range(1000)})) == 64
    assert plain_info([1, 2]) == {}


@pytest.mark.parametrize("env_id", ["tabletop/reach", "tabletop/push"])
def test_equal_seeds_and_actions_give_equal_episodes(env_id: str) -> None:
    sessions = [open_session(EnvironmentRequest(env_id=env_id, expert=True)) for _ in range(2)]
    seen = [session.reset(5) for session in sessions]
    over = False
    while not over:
        assert seen[0].expert_action is not None
        outcomes = [session.step(seen[0].expert_action[None]) for session in sessions]
        seen = [outcome.observation for outcome in outcomes]
        np.testing.assert_array_equal(seen[0].images["top"], seen[1].images["top"])
        np.testing.assert_array_equal(outcomes[0].rewards, outcomes[1].rewards)
        over = outcomes[0].done
    assert outcomes[0].success


def test_pf41_twenty_episodes_differ_and_repeat() -> None:
    session = open_session(EnvironmentRequest(env_id="tabletop/reach", options={"render": False}))
    runs = [[session.reset(seed).state.tobytes() for seed in range(20)] for _ in range(2)]
    assert len(set(runs[0])) == 20
    assert runs[0] == runs[1]


@pytest.mark.parametrize("env_id", ["tabletop/reach", "tabletop/push"])
def test_snapshots_go_on_bit_for_bit(env_id: str) -> None:
    session = open_session(EnvironmentRequest(env_id=env_id))
    session.reset(3)
    actions = np.random.default_rng(0).uniform(-1, 1, (4, len(session.info.action_names)))
    session.step(actions[:2].astype(np.float32))
    taken = session.snapshot()
    first = session.step(actions[2:].astype(np.float32))
    session.restore(taken)
    second = session.step(actions[2:].astype(np.float32))
    np.testing.assert_array_equal(first.observation.state, second.observation.state)
    np.testing.assert_array_equal(
        first.observation.images["wrist"], second.observation.images["wrist"]
    )
