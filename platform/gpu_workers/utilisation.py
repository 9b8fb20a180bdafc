"""How busy a worker's device is: measured at its turns, told to operators every few seconds."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import redis

from vla_platform.control.gpu_reports import GpuReport, keep_report
from vla_platform.control.services import Services
from vla_platform.gpu_workers.device import DeviceTurns, Turn

WINDOW_S = 60.0
EVERY_S = 3.0
_log = logging.getLogger(__name__)


class Shares:
    """Shares of a sliding window, from totals that only rise. Not thread-safe."""

    def __init__(self, *, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, Mapping[Turn, float]]] = deque()

    def take(self, now_s: float, busy_s: Mapping[Turn, float]) -> dict[Turn, float]:
        """Add what the totals are at `now_s`; returns each one's share since the window began."""
        self._seen.append((now_s, dict(busy_s)))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= self._window_s:
            self._seen.popleft()
        begun_s, before = self._seen[0]
        passed = now_s - begun_s
        if passed <= 0:
            return dict.fromkeys(busy_s, 0.0)
        return {
            turn: min(1.0, max(0.0, (total - before[turn]) / passed))
            for turn, total in busy_s.items()
        }


class UtilisationReport:
    """A thread that tells; an outage of the control Redis is waited for.

    `now()` gives what is not measured here: everything of a report but its shares.
    """

    def __init__(
        self, services: Services, turns: DeviceTurns, now: Callable[[], dict[str, str | int]]
    ) -> None:
        self._services = services
        self._turns = turns
        self._now = now
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="utilisation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(EVERY_S + 2)

    def _run(self) -> None:
        shares = Shares()
        while not self._stopping.wait(EVERY_S):
            found = shares.take(time.monotonic(), self._turns.busy_s())
            report = GpuReport(
                training_share=round(found[Turn.TRAINING], 4),
                inference_share=round(found[Turn.INFERENCE], 4),
                **self._now(),  # type: ignore[arg-type]
            )
            try:
                keep_report(self._services.ledger.client, report)
            except redis.RedisError as error:
                _log.warning("action=utilisation_not_told reason=%s", error)
