"""What carries one session: a thread of this process, or a thread of a child process.

A runner takes one call after the other and reports each through a callback, from whatever thread.
The thread that makes an environment makes all its calls, because graphics contexts belong to
threads: an environment made in one and drawn in another gives black frames without an error.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from vla_platform.envs.harnesses import open_session
from vla_platform.envs.sessions import EnvironmentRequest, Session
from vla_platform.envs.turnstile import turnstile
from vla_platform.errors import ConfigurationError


class Op(StrEnum):
    """A call of a session; its arguments are those of the method of the same name."""

    OPEN = "open"
    """Make the environment; returns its `EnvironmentInfo`."""
    RESET = "reset"
    STEP = "step"
    SNAPSHOT = "snapshot"
    RESTORE = "restore"
    CLOSE = "close"


Done = Callable[[Any, BaseException | None], None]
"""Called once per call with the result or the error."""


@dataclass(frozen=True)
class Call:
    """One call of one session."""

    op: Op
    arguments: Mapping[str, Any]
    done: Done


class Runner(ABC):
    @abstractmethod
    def submit(self, call: Call) -> None:
        """Queue a call. Never blocks, never raises."""

    @classmethod
    def submit_all(cls, calls: Sequence[tuple[Self, Call]]) -> None:
        """Queue calls of several runners of this class at once."""
        for runner, call in calls:
            runner.submit(call)

    @abstractmethod
    def abandon(self) -> None:
        """Give the session up, whatever it is doing; `done` of a running call may never come."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Of the process that belongs to this session alone; 0 where it has none."""

    @property
    @abstractmethod
    def usable(self) -> bool:
        """Whether it lives, in a process that may have more sessions."""


class SessionThread(Runner):
    """A thread with at most one session. It ends after `close`."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._session: Session | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name=f"session-{name}", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> None:
        self._calls.put(call)

    def abandon(self) -> None:
        self._abandoned = True
        self._calls.put(None)

    @property
    def memory_bytes(self) -> int:
        return 0

    @property
    def usable(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None and not self._abandoned:
            try:
                with self._turn():
                    result = self._perform(call.op, call.arguments)
            except BaseException as error:  # whoever waits for the call gets it
                call.done(None, error)
            else:
                call.done(result, None)
            if call.op is Op.CLOSE:
                return
        with contextlib.suppress(Exception):
            if self._session is not None:
                self._session.close()

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        waits_elsewhere = self._session is not None and not self._session.computes_here
        return contextlib.nullcontext() if waits_elsewhere else turnstile

    def _perform(self, op: Op, arguments: Mapping[str, Any]) -> Any:
        if op is Op.OPEN:
            request: EnvironmentRequest = arguments["request"]
            if self._session is not None:  # it failed before: make it anew in the same thread
                with contextlib.suppress(Exception):
                    self._session.close()
            self._session = None
            self._session = open_session(request)
            return self._session.info
        if op is Op.CLOSE:
            session, self._session = self._session, None
            return session.close() if session is not None else None
        if self._session is None:
            raise ConfigurationError("the session was not opened")
        return getattr(self._session, op)(**arguments)
