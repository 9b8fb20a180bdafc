"""Whose turn the device is: training and inference of one worker share it and the base model.

Inference goes first, for somebody's robot stands still meanwhile; training gets its turn when it
has waited for `patience_s`, so that a flood of requests never stops it. Long training work offers
a pause between its parts (`pause`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from enum import StrEnum

import torch

from vla_platform.errors import DeviceLostError

DEFAULT_PATIENCE_S = 0.25


class Turn(StrEnum):
    TRAINING = "training"
    INFERENCE = "inference"


class DeviceTurns:
    def __init__(self, *, patience_s: float = DEFAULT_PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._busy = False
        self._inference_waits = 0
        self._training_since: float | None = None  # when training began to wait
        self._turn: tuple[Turn, float] | None = None  # whose it is, and since when
        self._busy_s = dict.fromkeys(Turn, 0.0)

    def busy_s(self) -> dict[Turn, float]:
        """Seconds that each had the device so far, up to now."""
        with self._changed:
            found = dict(self._busy_s)
            if self._turn is not None:
                turn, since = self._turn
                found[turn] += time.monotonic() - since
            return found

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        with self._changed:
            self._inference_waits += 1
            self._changed.wait_for(lambda: not self._busy and not self._training_is_due())
            self._inference_waits -= 1
            self._take(Turn.INFERENCE)
        try:
            yield
        finally:
            self._release()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        self._begin_training()
        try:
            yield
        finally:
            self._release()

    def pause(self) -> None:
        """Within `training`, between its parts: let inference that waits go in between."""
        if self._inference_waits:
            self._release()
            self._begin_training()
        else:
            with self._changed:
                self._count()
                self._take(Turn.TRAINING)

    @property
    def training_part_s(self) -> float:
        """How long the present part of training has had the device; 0 where none has."""
        turn, since = self._turn or (Turn.INFERENCE, 0.0)
        return time.monotonic() - since if turn is Turn.TRAINING else 0.0

    def _begin_training(self) -> None:
        with self._changed:
            self._training_since = time.monotonic()
            while self._busy or (self._inference_waits and not self._training_is_due()):
                self._changed.wait(self._patience_s)
            self._training_since = None
            self._take(Turn.TRAINING)

    def _take(self, turn: Turn) -> None:
        self._busy = True
        self._turn = (turn, time.monotonic())

    def _training_is_due(self) -> bool:
        since = self._training_since
        return since is not None and time.monotonic() - since >= self._patience_s

    def _release(self) -> None:
        with self._changed:
            self._count()
            self._busy, self._turn = False, None
            self._changed.notify_all()

    def _count(self) -> None:
        if self._turn is not None:
            turn, since = self._turn
            self._busy_s[turn] += time.monotonic() - since


def is_alive(device: torch.device) -> bool:
    """False for a device whose context is broken: whatever comes next fails on it, whoever asks."""
    try:
        return float(torch.ones(1, device=device).sum()) == 1.0
    except RuntimeError:
        return False


class DeviceCheck:
    """Tells a broken device from what is wrong with somebody's data."""

    def __init__(
        self, device: torch.device, is_alive: Callable[[torch.device], bool] = is_alive
    ) -> None:
        self._device = device
        self._is_alive = is_alive

    def __call__(self, error: Exception) -> None:
        """Raise `DeviceLostError` where `error` is nobody's fault, for the device is broken."""
        if not self._is_alive(self._device):
            raise DeviceLostError(f"the device is lost: {error}") from error
