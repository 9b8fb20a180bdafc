"""Trends of evaluations, and when a drop is an alarm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_platform.client.evaluation_page import render
from vla_platform.control.trends import Point, compare, latest_change, read_trend, record
from vla_platform.envs.evaluation_records import EpisodeRecord, record_of
from vla_platform.envs.intervals import wilson_interval
from vla_platform.envs.suites import suite
from vla_storage.objects import MemoryObjectStore


def point(successes: int, episodes: int, number: int = 0, suite: str = "tabletop/push") -> Point:
    low, high = wilson_interval(successes, episodes)
    return Point(
        evaluation_id=f"e{number}", suite=suite, policy_version=number, num_episodes=episodes,
        num_successes=successes, success_rate=successes / episodes, interval_low=low,
        interval_high=high, finished=float(number),
    )  # fmt: skip


def test_newcombes_published_example() -> None:
    """56/70 against 48/80: 0.2 with 0.0524 to 0.3339 (Newcombe 1998, table II, method 10)."""
    change = compare(point(48, 80), point(56, 70))
    assert (change.change, change.low, change.high) == pytest.approx(
        (0.2, 0.0524, 0.3339), abs=1e-4
    )
    assert change.is_improvement


@pytest.mark.parametrize(("now", "alarm"), [(40, True), (70, False), (90, False)])
def test_only_a_drop_larger_than_its_interval_is_an_alarm(now: int, alarm: bool) -> None:
    assert compare(point(80, 100), point(now, 100)).is_regression is alarm


@given(st.integers(1, 50), st.data())
def test_no_change_is_never_an_alarm(episodes: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, episodes))
    change = compare(point(successes, episodes), point(successes, episodes))
    assert not change.is_regression
    assert not change.is_improvement
    assert change.low <= 0.0 <= change.high


def test_other_suites_are_not_compared() -> None:
    assert latest_change([]) is None
    assert latest_change([point(9, 10, 0, "tabletop/reach"), point(1, 10, 1)]) is None
    change = latest_change([point(9, 10, 0), point(5, 10, 1, "tabletop/reach"), point(1, 10, 2)])
    assert change is not None
    assert change.before.evaluation_id == "e0"


def evaluation(number: int, successes: int, episodes: int = 20) -> Any:
    cases = suite("tabletop/push", episodes=episodes)
    kept = [
        EpisodeRecord(
            index=case.index, env_id=case.env_id, seed=case.seed, init_state=None, task="<push>",
            success=case.index < successes, end="terminated", total_reward=1.0, num_steps=3,
            num_clipped=0, policy_version=number, module_digest="d" * 64,
        )
        for case in cases.cases
    ]  # fmt: skip
    return record_of(
        cases, kept, evaluation_id=f"e{number}", tenant="a", policy_key="a/push", failures={},
        seconds=1.0,
    )  # fmt: skip


def test_a_regression_is_told_as_an_event_and_shown_on_the_page() -> None:
    events: list[Any] = []
    services: Any = SimpleNamespace(
        objects=MemoryObjectStore(), emitter=SimpleNamespace(emit=events.append)
    )
    record(services, evaluation(1, 18))
    record(services, evaluation(1, 18))  # done again, it is still one point
    change = record(services, last := evaluation(2, 3))
    assert change is not None
    assert change.is_regression
    assert [e.values["regression"] for e in events] == [False, False, True]
    points = read_trend(services.objects, "a", "push")
    assert [p.policy_version for p in points] == [1, 2]
    page = render(last, points, {0: b"film"})
    assert "Regression" in page
    assert "data:video/mp4;base64," in page
    assert page.count("<circle") == 2
