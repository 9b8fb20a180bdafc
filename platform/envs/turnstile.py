"""Lets the simulators of one process step one after the other, as long as they are quick.

Python threads that compute at the same time take the interpreter from each other at every library
call: sixteen simulators on sixteen threads are half as fast as one after the other. A call that
takes longer than the grace no longer holds up anybody, so a simulator that hangs, or renders for
long, costs the others at most one grace.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

GRACE_S = 0.02


class Turnstile:
    """A context manager around each call."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._changed = threading.Condition(threading.Lock())
        self._holder = 0  # ident of the thread inside; 0: nobody
        self._since = 0.0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            while self._holder:
                left_s = self._since + self._grace_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            self._holder, self._since = me, time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            if self._holder == threading.get_ident():
                self._holder = 0
                self._changed.notify()


turnstile = Turnstile()
"""The one of this process."""
