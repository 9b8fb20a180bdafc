"""What a worker process does not outlive: without it, it would only look alive."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import NoReturn

_log = logging.getLogger(__name__)


def end_process(why: str, reason: object) -> NoReturn:
    """Leases run out, and whoever started this process starts it anew."""
    _log.critical("action=%s reason=%s", why, reason)
    os._exit(os.EX_SOFTWARE)


def vital_thread(
    run: Callable[[], None], *, name: str, end: Callable[[], None] | None = None
) -> threading.Thread:
    """A thread, not started yet, whose failure ends the process, or does `end` instead."""

    def guarded() -> None:
        try:
            run()
        except Exception as error:
            _log.exception("action=thread_failed thread=%s", name)
            if end is None:
                end_process("thread_failed", f"{name}: {error!r}")
            else:
                end()

    return threading.Thread(target=guarded, name=name, daemon=True)
