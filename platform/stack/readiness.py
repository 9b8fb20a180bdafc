"""How a Celery process tells the stack that it works: it creates a file when it is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from celery.signals import beat_init, worker_ready


def announce(ready_file: Path) -> None:
    """Create `ready_file` once this process, a Celery worker or beat, is ready."""

    def touch(**_: Any) -> None:
        ready_file.touch()

    # weak=False: the closure has no other owner.
    worker_ready.connect(touch, weak=False)
    beat_init.connect(touch, weak=False)
