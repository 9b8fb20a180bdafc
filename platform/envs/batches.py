"""Calls that wait together: one wake-up for a whole batch, of a loop or of a thread."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from vla_platform.envs.runners import Done


class _Collected(ABC):
    """Collects `num_calls` results from other threads."""

    MISSING: ClassVar[object] = object()
    """The result of a call that did not return in time."""

    def __init__(self, num_calls: int) -> None:
        self._left = num_calls
        self._lock = threading.Lock()
        self.results: list[tuple[Any, BaseException | None]]
        self.results = [(self.MISSING, None)] * num_calls

    def callback(self, at: int) -> Done:
        def done(result: Any, error: BaseException | None) -> None:
            with self._lock:
                self.results[at] = (result, error)
                self._left -= 1
                last = self._left == 0
            if last:
                self._wake()

        return done

    @abstractmethod
    def _wake(self) -> None: ...

    def _freeze(self) -> None:
        """What comes later is not looked at."""
        with self._lock:
            self.results = list(self.results)


class Batch(_Collected):
    """Awaited in an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_calls: int) -> None:
        super().__init__(num_calls)
        self._loop = loop
        self._all: asyncio.Future[None] = loop.create_future()
        if num_calls == 0:
            self._all.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Returns when all have reported, or time is up."""
        timer = self._loop.call_later(timeout_s, self._finish)
        try:
            await self._all
        finally:
            timer.cancel()
            self._freeze()

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self._all.done():
            self._all.set_result(None)


class BlockingBatch(_Collected):
    """Awaited by an ordinary thread: half the hand-overs of a way through the loop."""

    def __init__(self, num_calls: int) -> None:
        super().__init__(num_calls)
        self._pending = threading.Lock()
        if num_calls:
            self._pending.acquire()

    def wait(self, timeout_s: float) -> None:
        """Returns when all have reported, or time is up."""
        self._pending.acquire(timeout=timeout_s)
        self._freeze()

    def _wake(self) -> None:
        self._pending.release()
