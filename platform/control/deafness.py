"""A worker that lives but hears nothing ends, and is started anew.

After several broken connections in a row a Celery worker may go on without consuming
(celery#8030): its heart beats, its queues grow, and nothing tells. Here every worker looks for
itself: idle, while messages lie in its queues, for several looks in a row.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from celery import Celery, signals
from celery.worker import state
from kombu.transport import redis
from redis import RedisError

from vla_platform.control.services import services
from vla_platform.errors import UnavailableError

LOOK_S = 5.0
LOOKS = 6
"""Looks and not seconds: a process that was stopped for a while has to look again first."""
_log = logging.getLogger(__name__)


class Hearing:
    """Whether a worker hears: pure policy."""

    def __init__(self, *, looks: int = LOOKS) -> None:
        self._looks = looks
        self._num_silent = 0
        self._num_taken = -1

    def is_deaf(self, *, num_waiting: int, is_idle: bool, num_taken: int) -> bool:
        """One look. `num_taken`: tasks that this worker has begun so far."""
        silent = num_waiting > 0 and is_idle and num_taken == self._num_taken
        self._num_silent = self._num_silent + 1 if silent else 0
        self._num_taken = num_taken
        return self._num_silent >= self._looks

    def missed(self) -> None:
        """A look told nothing: the broker is away, which is no deafness."""
        self._num_silent = 0


def install(app: Celery) -> None:
    """Look from when a worker is ready until it begins to stop."""

    def begin(**_: Any) -> None:
        threading.Thread(target=_watch, args=(app,), name="hearing", daemon=True).start()

    signals.worker_ready.connect(begin, weak=False)


def _is_stopping() -> bool:
    """Celery's own flags: its signal `worker_shutting_down` is sent from within a signal handler,
    where setting an event hangs the process if a second one comes meanwhile."""
    flags = (state.should_stop, state.should_terminate)
    return any(flag is not None and flag is not False for flag in flags)


def _watch(app: Celery) -> None:
    hearing = Hearing()
    while True:
        time.sleep(LOOK_S)
        if _is_stopping():
            return
        queues = list(app.amqp.queues.consume_from)  # those that operators cancelled are not there
        try:
            num_waiting = _num_waiting(queues)
        except (RedisError, OSError, UnavailableError):
            hearing.missed()
            continue
        if hearing.is_deaf(
            num_waiting=num_waiting,
            is_idle=not state.active_requests and not state.reserved_requests,
            num_taken=sum(state.total_count.values()),
        ):
            _log.critical("action=worker_is_deaf waiting=%d queues=%s", num_waiting, queues)
            os._exit(os.EX_SOFTWARE)


def _num_waiting(queues: list[str]) -> int:
    with services().ledger.client.pipeline(transaction=False) as pipe:
        for name in queues:
            for priority in redis.PRIORITY_STEPS:  # a list each
                pipe.llen(f"{name}{redis.Channel.sep}{priority}" if priority else name)
        return sum(pipe.execute())
