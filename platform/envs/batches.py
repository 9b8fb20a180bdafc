"""Calls that wait together: one wake-up of the loop for a whole batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from vla_platform.envs.runners import Done


class Batch:
    """Collects `num_calls` results from other threads."""

    MISSING: ClassVar[object] = object()
    """The result of a call that did not return in time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_calls: int) -> None:
        self._loop = loop
        self._left = num_calls
        self._lock = threading.Lock()
        self._all: asyncio.Future[None] = loop.create_future()
        self.results: list[tuple[Any, BaseException | None]]
        self.results = [(self.MISSING, None)] * num_calls
        if num_calls == 0:
            self._all.set_result(None)

    def callback(self, at: int) -> Done:
        def done(result: Any, error: BaseException | None) -> None:
            with self._lock:
                self.results[at] = (result, error)
                self._left -= 1
                last = self._left == 0
            if last:
                self._call_soon(self._finish)

        return done

    async def wait(self, timeout_s: float) -> None:
        """Returns when all have reported, or time is up. What comes later is not looked at."""
        timer = self._loop.call_later(timeout_s, self._finish)
        try:
            await self._all
        finally:
            timer.cancel()
            with self._lock:
                self.results = list(self.results)

    def _finish(self) -> None:
        if not self._all.done():
            self._all.set_result(None)

    def _call_soon(self, call: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)
