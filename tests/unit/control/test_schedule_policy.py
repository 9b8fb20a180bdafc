"""What a schedule does: overlap (F71), missed firings (PF-48), pauses; never twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_platform.control.schedule_policy import (
    CLAIM_S,
    LATE_S,
    ScheduleState,
    begun,
    ended,
    look,
    moved,
)
from vla_platform.specs.evaluation import MOST_QUEUED, Missed, Overlap

HOUR = 3600.0


def state(overlap: Overlap = Overlap.SKIP, missed: Missed = Missed.RUN_ONCE) -> ScheduleState:
    return ScheduleState(
        name="s", cron="0 * * * *", timezone="UTC", overlap=overlap, missed=missed, next_due=HOUR
    )


def test_it_fires_at_its_time_and_once() -> None:
    assert look(state(), HOUR - 1).fire == ()
    looked = look(state(), HOUR + 1)
    assert (looked.fire, looked.state.next_due) == ((HOUR,), 2 * HOUR)
    assert look(looked.state, HOUR + 1).fire == ()


@pytest.mark.parametrize(
    ("overlap", "fired", "skipped", "queued"),
    [(Overlap.SKIP, (), 1, 0), (Overlap.QUEUE, (), 0, 1), (Overlap.ALLOW, (2 * HOUR,), 0, 0)],
)
def test_f71_while_the_one_before_runs(
    overlap: Overlap, fired: tuple[float, ...], skipped: int, queued: int
) -> None:
    running = begun(look(state(overlap), HOUR).state, "e1", HOUR)
    looked = look(running, 2 * HOUR)
    assert looked.fire == fired
    assert (looked.state.num_skipped, len(looked.state.queued)) == (skipped, queued)
    after = ended(looked.state, "e1")
    assert after.fire == ((2 * HOUR,) if queued else ())
    assert ended(after.state, "e1").fire == ()


def test_a_queue_is_bounded() -> None:
    running = begun(look(state(Overlap.QUEUE), HOUR).state, "e1", HOUR)
    for hour in range(2, 10):
        running = look(running, hour * HOUR).state
    assert (len(running.queued), running.num_skipped) == (MOST_QUEUED, 8 - MOST_QUEUED)


def test_pf48_a_daily_one_made_minutes_before_runs_at_its_time_and_not_before() -> None:
    daily = replace(state(), cron="0 6 * * *", next_due=6 * HOUR)
    assert look(daily, 6 * HOUR - 300).fire == ()
    assert look(daily, 6 * HOUR).fire == (6 * HOUR,)
    done = ended(begun(look(daily, 6 * HOUR).state, "e1", 6 * HOUR), "e1").state
    assert look(done, 29 * HOUR).fire == ()
    assert look(done, 30 * HOUR).fire == (30 * HOUR,)


@pytest.mark.parametrize(
    ("missed", "fire", "num_missed"), [(Missed.RUN_ONCE, (3 * HOUR,), 2), (Missed.RECORD, (), 3)]
)
def test_pf48_what_was_missed_runs_once_or_is_recorded(
    missed: Missed, fire: tuple[float, ...], num_missed: int
) -> None:
    looked = look(state(missed=missed), 3 * HOUR + LATE_S + 1)
    assert (looked.fire, looked.state.num_missed) == (fire, num_missed)
    assert looked.state.next_due == 4 * HOUR


def test_one_on_time_takes_the_place_of_those_missed_before() -> None:
    looked = look(state(), 3 * HOUR + 1)
    assert (looked.fire, looked.state.num_missed) == ((3 * HOUR,), 2)


def test_a_pause_is_not_made_up() -> None:
    paused = moved(state(), 0.0, enabled=False, reason="by tenant")
    assert look(paused, 10 * HOUR).fire == ()
    again = moved(paused, 10.5 * HOUR, enabled=True)
    assert (again.next_due, look(again, 11 * HOUR).fire) == (11 * HOUR, (11 * HOUR,))
    assert moved(again, 20 * HOUR, enabled=True) == again


@given(st.lists(st.floats(0, 4000), max_size=60), st.sampled_from(Overlap), st.sampled_from(Missed))
def test_no_firing_is_served_twice_and_none_is_lost(
    gaps: list[float], overlap: Overlap, missed: Missed
) -> None:
    """Whatever the moments at which anybody looks: fired + queued + skipped + missed = due."""
    current, now = state(overlap, missed), 0.0
    served: list[float] = []
    for number, gap in enumerate(gaps):
        now += gap
        looked = look(current, now)
        current = looked.state
        for at in looked.fire:
            served.append(at)
            current = begun(current, f"e{len(served)}", at)
        if number % 3 == 0 and current.running:
            after = ended(current, next(iter(current.running)))
            current = after.state
            for at in after.fire:
                served.append(at)
                current = begun(current, f"e{len(served)}", at)
    assert len(served) == len(set(served))
    counted = len(served) + len(current.queued) + current.num_skipped + current.num_missed
    assert counted == int(now // HOUR)


def test_anything_else_than_a_state_is_refused() -> None:
    assert ScheduleState.from_json(state().to_json()) == state()
    for text in ("", "{", "[]", "{}", state().to_json().replace('"skip"', '"x"')):
        with pytest.raises(ValueError):
            ScheduleState.from_json(text)


def test_a_firing_whose_taker_died_is_handed_out_again() -> None:
    looked = look(state(), HOUR)
    assert look(looked.state, HOUR + 30).fire == ()
    again = look(looked.state, HOUR + CLAIM_S + 1)
    assert again.fire == (HOUR,)
    done = begun(again.state, "e1", HOUR)
    assert (look(done, HOUR + 3 * CLAIM_S).fire, done.claimed) == ((), {})
