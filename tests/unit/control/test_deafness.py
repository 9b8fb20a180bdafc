"""PF-03: a worker that is idle beside waiting messages hears nothing."""

from __future__ import annotations

import pytest
from celery import Celery, signals
from celery.worker import state
from hypothesis import given
from hypothesis import strategies as st

from vla_platform.control import deafness
from vla_platform.control.deafness import Hearing, install

SILENT = {"num_waiting": 2, "is_idle": True, "num_taken": 5}


def test_who_takes_nothing_for_several_looks_is_deaf_pf03() -> None:
    hearing = Hearing(looks=3)
    found = [hearing.is_deaf(**SILENT) for _ in range(5)]
    assert found == [False, False, False, True, True]  # the first look only learns the count


@given(st.sampled_from([{"num_waiting": 0}, {"is_idle": False}, {"num_taken": 6}, None]))
def test_one_sign_of_hearing_begins_the_count_anew(sign: dict[str, int] | None) -> None:
    hearing = Hearing(looks=3)
    for _ in range(3):
        assert not hearing.is_deaf(**SILENT)
    if sign is None:
        hearing.missed()
    else:
        assert not hearing.is_deaf(**{**SILENT, **sign})
    again = {**SILENT, **(sign or {}), "num_waiting": 2, "is_idle": True}
    assert [hearing.is_deaf(**again) for _ in range(3)] == [False, False, True]


def test_it_listens_to_no_signal_of_celerys() -> None:
    """They are sent from signal handlers, and a second one would meet the first one's lock."""
    before = len(signals.worker_shutting_down.receivers or ())
    install(Celery("test"))
    assert len(signals.worker_shutting_down.receivers or ()) == before


@pytest.mark.parametrize("flag", ["should_stop", "should_terminate"])
@pytest.mark.parametrize("exit_code", [0, 1])
def test_it_sees_that_the_worker_stops(
    monkeypatch: pytest.MonkeyPatch, flag: str, exit_code: int
) -> None:
    assert not deafness._is_stopping()
    monkeypatch.setattr(state, flag, exit_code)
    assert deafness._is_stopping()
