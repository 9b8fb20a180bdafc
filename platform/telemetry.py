"""How a Celery process logs and traces: its format, and the context that messages carry."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from typing import Any

from celery import Celery, signals

from vla_platform import tracing
from vla_platform.logs import formatter
from vla_platform.settings import Settings


def install(app: Celery, settings: Settings) -> None:
    """Connect Celery's signals; takes effect when the process starts as a worker or as beat."""
    # By task and thread: one that is delivered again may run beside its first delivery.
    causes: dict[tuple[str, int], AbstractContextManager[None]] = {}

    def format_lines(logger: logging.Logger, **_: Any) -> None:
        for handler in logger.handlers:
            handler.setFormatter(formatter(settings.log_format, process=settings.role))

    def begin(**_: Any) -> None:
        tracing.start(settings.traces, process=settings.role)

    def end(**_: Any) -> None:
        tracing.stop()

    def sent(headers: dict[str, Any] | None = None, **_: Any) -> None:
        if headers is not None:
            headers.update(tracing.headers())

    def taken(task_id: str, task: Any, **_: Any) -> None:
        if tracing.is_on():
            cause = tracing.caused_by(task.request.get(tracing.HEADER))
            causes[task_id, threading.get_ident()] = cause
            cause.__enter__()

    def done(task_id: str, **_: Any) -> None:
        cause = causes.pop((task_id, threading.get_ident()), None)
        if cause is not None:
            cause.__exit__(None, None, None)

    # weak=False: the closures have no other owner.
    signals.after_setup_logger.connect(format_lines, weak=False)
    signals.after_setup_task_logger.connect(format_lines, weak=False)
    if settings.traces:
        signals.worker_init.connect(begin, weak=False)
        signals.beat_init.connect(begin, weak=False)
        signals.worker_shutdown.connect(end, weak=False)
        signals.before_task_publish.connect(sent, weak=False)
        signals.task_prerun.connect(taken, weak=False)
        signals.task_postrun.connect(done, weak=False)
