"""How an environment can fail, by name, and what of its output is taken."""

from __future__ import annotations

from enum import StrEnum

from vla_platform.errors import SimulatorError

MAX_SHOWN = 500


class Failure(StrEnum):
    """The class of a `SimulatorError`."""

    RAISED = "raised"
    """The simulator raised an exception."""
    HUNG = "hung"
    """A call did not return within its deadline."""
    CRASHED = "crashed"
    """The process that carried the session ended: a signal, or `os._exit`."""
    OUT_OF_MEMORY = "out_of_memory"
    """The process that carried the session grew over its limit."""
    BAD_OUTPUT = "bad_output"
    """An observation, reward or flag breaks the session contract."""
    NOT_BUILT = "not_built"
    """The environment could not be made: assets, drivers or packages are missing."""


def printable(text: object) -> str:
    """Text of a simulator, fit for a log line: bounded, no control characters (B75)."""
    shown = str(text)[:MAX_SHOWN]
    if shown.isprintable():
        return shown
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown
    )


def failure_of(error: SimulatorError) -> Failure:
    return Failure(error.details["failure"])
