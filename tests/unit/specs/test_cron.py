"""Cron expressions: what is refused (B67-B70), and the table of firings around clock changes
(F72, PF-46)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_platform.specs.cron import (
    check_cron,
    check_timezone,
    firings,
    hint_minutes,
    missed_firings,
    next_firing,
    shortest_interval_s,
)

NEW_YORK = "America/New_York"


@pytest.mark.parametrize(
    "expression",
    [
        "61 * * * *", "*/0 * * * *", "-1 * * * *", "a * * * *", "", "* * *", "1,,2 * * * *",
        "* * * * * *", "0 0 31 2 *", "\u0663 * * * *", "*" * 10_000, "5-1 * * * *", "@daily",
        "0 0 L * *", "0 0 * * 1#2", "0 0 * * \n", "0\u00a00 * * *",
    ],
)  # fmt: skip
def test_b67_b69_bad_expressions_are_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        check_cron(expression)


@pytest.mark.parametrize(
    ("given_text", "kept"),
    [("0 */6 * * *", "0 */6 * * *"), ("  30  1 * *  MON-fri ", "30 1 * * mon-fri"),
     ("0 0 29 2 *", "0 0 29 2 *"), ("0 0 1 jan,jul *", "0 0 1 jan,jul *")],
)  # fmt: skip
def test_good_ones_are_kept_in_one_form(given_text: str, kept: str) -> None:
    assert check_cron(given_text) == kept


@pytest.mark.parametrize("name", ["Mars/X", "EST5EDT", "utc", "", "Etc/GMT+5", "../etc/passwd"])
def test_b70_other_time_zones_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="regional"):
        check_timezone(name)


def table(expression: str, start: str, count: int, zone: str = NEW_YORK) -> list[str]:
    after = datetime.fromisoformat(start).replace(tzinfo=UTC)
    return [
        one.astimezone(UTC).strftime("%m-%d %H:%M")
        for one in islice(firings(expression, zone, after=after), count)
    ]


@pytest.mark.parametrize(
    ("expression", "start", "expected"),
    [
        # Autumn: 01:00 comes twice. Hourly runs each hour of real time, daily once.
        ("0 * * * *", "2026-11-01T04:30", ["11-01 05:00", "11-01 06:00", "11-01 07:00"]),
        ("30 1 * * *", "2026-11-01T00:00", ["11-01 05:30", "11-02 06:30", "11-03 06:30"]),
        # Spring: 02:30 is not there; it fires at the end of the gap.
        ("30 2 * * *", "2026-03-07T23:00", ["03-08 07:00", "03-09 06:30", "03-10 06:30"]),
        ("0 * * * *", "2026-03-08T05:30", ["03-08 06:00", "03-08 07:00", "03-08 08:00"]),
        # Leap day and the end of a year.
        ("0 0 29 2 *", "2026-01-01T00:00", ["02-29 05:00", "02-29 05:00"]),
        ("59 23 31 12 *", "2026-12-31T00:00", ["01-01 04:59", "01-01 04:59"]),
    ],
)
def test_f72_pf46_the_documented_table(expression: str, start: str, expected: list[str]) -> None:
    assert table(expression, start, len(expected)) == expected


def test_an_hourly_job_fires_every_hour_of_a_year_with_clock_changes() -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    every = list(islice(firings("0 * * * *", NEW_YORK, after=start), 365 * 24))
    assert every[-1].astimezone(UTC) == start + timedelta(hours=365 * 24)
    assert len({one.astimezone(UTC) for one in every}) == len(every)


def test_b68_the_shortest_interval_is_told() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert shortest_interval_s("* * * * *", "UTC", after=now) == 60
    assert shortest_interval_s("0,5 0 * * *", "UTC", after=now) == 300


@given(
    minute=st.integers(0, 59),
    zone=st.sampled_from(["UTC", NEW_YORK, "Asia/Kathmandu", "Australia/Lord_Howe"]),
    start=st.integers(0, 365 * 24),
)
def test_every_firing_falls_on_a_minute_of_its_hints(minute: int, zone: str, start: int) -> None:
    expression = f"{minute} */3 * * *"
    after = datetime.now(UTC) + timedelta(hours=start)
    hints = hint_minutes(expression, zone)
    for one in islice(firings(expression, zone, after=after), 20):
        assert one.astimezone(UTC).minute in hints


def test_missed_firings_are_counted_to_a_bound() -> None:
    first = next_firing("*/5 * * * *", "UTC", after=0.0)
    assert first == 300.0
    found = missed_firings("*/5 * * * *", "UTC", after=first, until=1500.0)
    assert found == [600.0, 900.0, 1200.0, 1500.0]
    assert len(missed_firings("* * * * *", "UTC", after=0.0, until=1e6, most=10)) == 10
