"""Windows of recent frames, for policies that look back: a session ships each frame once.

A window is lost when the worker restarts, when others push it out, or when the request goes to
another worker; the session then sends the whole window again (`HistoryLostError`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vla_platform.errors import HistoryLostError
from vla_platform.inference.protocol import SessionStep

DEFAULT_MAX_BYTES = 256 << 20
Frame = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Window:
    step: int  # of its newest frame
    frames: tuple[Frame, ...]  # oldest first

    @property
    def size_bytes(self) -> int:
        return sum(frame.nbytes for frame in self.frames)


class SessionWindows:
    """Bounded, least recently used first out. Thread-safe."""

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._windows: OrderedDict[tuple[str, str, str], _Window] = OrderedDict()
        self._lock = threading.Lock()

    def advance(
        self, tenant: str, client: str, step: SessionStep, frames: list[Frame]
    ) -> tuple[Frame, ...]:
        """The `history` newest frames, oldest first, with the new ones taken in.

        The first frame stands for those before the session began. The same step again gives the
        same window. Raises `HistoryLostError` where frames between are missing.
        """
        key = (tenant, client, step.session)
        with self._lock:
            known = self._windows.get(key)
            if known is not None and known.step == step.step and not step.is_whole:
                window = known  # asked for again
            elif step.is_whole or step.step == 0 or step.history == 1:
                window = _Window(step.step, tuple(frames[-step.history :]))
            elif known is None or known.step != step.step - 1:
                raise HistoryLostError(
                    f"the window of session {step.session[:40]} is not here",
                    session=step.session[:64],
                )
            else:
                kept = (*known.frames, *frames)[-step.history :]
                window = _Window(step.step, kept)
            self._keep(key, window)
        missing = step.history - len(window.frames)
        return (window.frames[0],) * missing + window.frames

    def _keep(self, key: tuple[str, str, str], window: _Window) -> None:
        old = self._windows.pop(key, None)
        if old is not None:
            self.size_bytes -= old.size_bytes
        self._windows[key] = window
        self.size_bytes += window.size_bytes
        while self.size_bytes > self.max_bytes and self._windows:
            _, dropped = self._windows.popitem(last=False)
            self.size_bytes -= dropped.size_bytes
