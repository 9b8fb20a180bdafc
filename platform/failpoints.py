"""Named places where a test lets a process die, raise or stall. Off unless `VLA_FAILPOINT` is set.

`VLA_FAILPOINT=name:action:nth`, such as `after_step:kill:3`. With `@FILE` the same text is read
from `FILE-<pid>` once that is there: a test arms a process that runs, no other, and not the one
that follows it.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from vla_platform.errors import ConfigurationError
from vla_platform.settings import load_settings


class Failpoint(StrEnum):
    """Where a process can be made to fail."""

    AFTER_POP = "after_pop"
    """A message has left its queue and is not yet recorded as un-acknowledged."""
    AFTER_LEDGER_CLAIM = "after_ledger_claim"
    """A training worker has leased a group."""
    BEFORE_STEP = "before_step"
    """Its samples are fetched; nothing is changed yet."""
    BEFORE_OPTIMIZER = "before_optimizer"
    """A policy's gradients are there; its optimizer has not moved."""
    AFTER_STEP = "after_step"
    """Modules are updated; the ledger has not heard of it."""
    AFTER_STEPLOG = "after_steplog"
    """The ledger has recorded a job's effect."""
    BEFORE_ACK = "before_ack"
    """The training task is done; its message is not yet acknowledged."""
    PAYLOAD_WRITTEN = "payload_written"
    """A producer has written samples; the ledger does not call them ready."""
    COLUMNS_WRITTEN = "columns_written"
    """A stage (scores, the actor's forward) has written its columns; the ledger has not heard."""
    META_PUBLISHED = "meta_published"
    """The ledger calls them ready; no task was sent."""
    STAGE_DONE = "stage_done"
    """A checkpoint is staged on the local disk."""
    PART_K = "part_k"
    """One object of a checkpoint is uploaded."""
    AFTER_MANIFEST = "after_manifest"
    """The manifest is visible; the ledger has not heard of it."""


_FROM_STORAGE = {
    "checkpoint.object": Failpoint.PART_K,
    "checkpoint.manifest": Failpoint.AFTER_MANIFEST,
}


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail() -> None:
    raise RuntimeError("a failpoint was reached")


def _stall() -> None:
    time.sleep(3600)


_ACTIONS: dict[str, Callable[[], None]] = {"kill": _kill, "raise": _fail, "stall": _stall}


@dataclass
class _Armed:
    name: Failpoint
    action: Callable[[], None]
    left: int
    lock: threading.Lock


def reach(name: Failpoint) -> None:
    """A process passes a named place. Costs nothing to speak of while no failpoint is set."""
    armed = _trigger().armed
    if armed is None or armed.name is not name:
        return
    with armed.lock:
        armed.left -= 1
        due = armed.left == 0
    if due:
        armed.action()


def reach_in_storage(name: str) -> None:
    """The storage package's places, by its own names."""
    reach(_FROM_STORAGE[name])


class _Trigger:
    def __init__(self, setting: str) -> None:
        self._file = Path(f"{setting[1:]}-{os.getpid()}") if setting.startswith("@") else None
        self._armed = _parsed(setting) if setting and self._file is None else None
        self._lock = threading.Lock()

    @property
    def armed(self) -> _Armed | None:
        if self._armed is None and self._file is not None:
            with self._lock:
                if self._armed is None and self._file.exists():
                    self._armed = _parsed(self._file.read_text())
        return self._armed


@functools.cache
def _trigger() -> _Trigger:
    try:
        setting = load_settings().failpoint
    except ConfigurationError:
        setting = ""  # no process of a stack: somebody trains a slot by hand
    return _Trigger(setting)


def _parsed(text: str) -> _Armed:
    try:
        name, action, nth = text.split(":")
        return _Armed(Failpoint(name), _ACTIONS[action], int(nth), threading.Lock())
    except (ValueError, KeyError) as error:
        raise ConfigurationError(
            f"VLA_FAILPOINT {text!r}: use NAME:kill|raise|stall:NTH with a NAME of "
            + ", ".join(Failpoint)
        ) from error
