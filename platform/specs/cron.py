"""When a cron expression fires: checked strictly, in a time zone, with the clock changes of summer.

Five fields (minute, hour, day of month, month, day of week), as Debian's cron reads them. Where
the clock jumps forward, what falls into the gap fires right after it; where it falls back, a fixed
hour fires once and `*` in the hour field fires in both: an hourly job is neither lost nor doubled.
"""

from __future__ import annotations

import functools
import re
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice, pairwise

from cronsim import CronSim, CronSimError

MAX_EXPRESSION = 120
HORIZON = timedelta(days=4 * 366)
_NAMES = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|mon|tue|wed|thu|fri|sat|sun"
_FIELD = rf"(?:[0-9*,/-]|{_NAMES})+"
_EXPRESSION = re.compile(rf"{_FIELD}(?: {_FIELD}){{4}}")
_REGIONS = frozenset(
    ("Africa", "America", "Antarctica", "Asia", "Atlantic", "Australia", "Europe", "Indian",
     "Pacific")
)  # fmt: skip
_COMPARED = 200


@functools.cache
def timezones() -> frozenset[str]:
    """`UTC` and the regional names; abbreviations and fixed offsets (`EST5EDT`) are not among
    them."""
    regional = (
        name for name in zoneinfo.available_timezones() if name.partition("/")[0] in _REGIONS
    )
    return frozenset({"UTC", *regional})


def check_cron(expression: str) -> str:
    """The expression with single spaces, in lower case. Raises `ValueError`."""
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"{len(expression)} characters; at most {MAX_EXPRESSION} are taken")
    if not expression.isascii():
        raise ValueError("ASCII digits only")
    text = " ".join(expression.lower().split())
    if len(text.split(" ")) != 5:
        raise ValueError(
            "five fields: minute, hour, day of month, month, day of week, such as '0 */6 * * *'"
        )
    if not _EXPRESSION.fullmatch(text):
        raise ValueError("fields hold numbers, '*', ',', '-', '/', and names such as mon or jan")
    try:
        first = next(CronSim(text, datetime.now(UTC)))
    except CronSimError as error:
        raise ValueError(str(error)) from error
    except StopIteration:
        raise ValueError("it never fires") from None
    if first - datetime.now(UTC) > HORIZON:
        raise ValueError(f"its next firing is on {first:%Y-%m-%d}, more than four years ahead")
    return text


def check_timezone(name: str) -> str:
    """Raises `ValueError`."""
    if name not in timezones():
        raise ValueError("use UTC or a regional name such as Europe/Berlin")
    return name


def firings(expression: str, timezone: str, *, after: datetime) -> Iterator[datetime]:
    """The times after `after`, in the time zone, without end."""
    if after.tzinfo is None:
        raise ValueError("a time without a zone")
    zone: tzinfo = UTC if timezone == "UTC" else zoneinfo.ZoneInfo(timezone)
    return iter(CronSim(expression, after.astimezone(zone)))


def next_firing(expression: str, timezone: str, *, after: float) -> float:
    """In seconds since the epoch."""
    start = datetime.fromtimestamp(after, UTC)
    return next(firings(expression, timezone, after=start)).timestamp()


def missed_firings(
    expression: str, timezone: str, *, after: float, until: float, most: int = 1000
) -> list[float]:
    """Those in `(after, until]`, oldest first; the newest `most` of many would take too long, so
    the count stops there."""
    found: list[float] = []
    for one in firings(expression, timezone, after=datetime.fromtimestamp(after, UTC)):
        at = one.timestamp()
        if at > until or len(found) >= most:
            break
        found.append(at)
    return found


def shortest_interval_s(expression: str, timezone: str, *, after: datetime) -> float:
    """Between two of the coming firings."""
    coming = [
        one.astimezone(UTC) for one in islice(firings(expression, timezone, after=after), _COMPARED)
    ]
    return min((late - early).total_seconds() for early, late in pairwise(coming))


def hint_minutes(expression: str, timezone: str) -> frozenset[int]:
    """Minutes of the UTC hour in which a firing may fall, whatever the zone's offset is then."""
    zone: tzinfo = UTC if timezone == "UTC" else zoneinfo.ZoneInfo(timezone)
    now = datetime.now(UTC)
    offsets = set()
    for week in range(60):
        offset = (now + timedelta(weeks=week)).astimezone(zone).utcoffset()
        assert offset is not None
        offsets.add(int(offset.total_seconds() // 60) % 60)
    minutes = CronSim(expression, now).minutes
    # What falls into the gap of a clock change fires at its end, on the full hour.
    return frozenset((minute - offset) % 60 for minute in {*minutes, 0} for offset in offsets)
