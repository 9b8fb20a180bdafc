"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    timeout_s: float = 120.0,
    *,
    every_s: float = 0.02,
    what: str = "the condition",
) -> None:
    """Fails where `condition` has not come true in `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true"
        time.sleep(every_s)


def nothing_is_read_ahead() -> bool:
    """The thread that decodes frames ahead ends when none is missing."""
    return all(thread.name != "read-ahead" for thread in threading.enumerate())
