"""Ends what is left of a stack, found by the marker in the environment of its processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from vla_platform.stack.arena import arena_path
from vla_platform.stack.supervisor import MARKER

_TERM_S = 3.0


def leftovers(var: Path) -> list[psutil.Process]:
    """Every process that carries the marker of this folder, except the caller and its parents."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid not in own
                and process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(MARKER) == str(var)
            ):
                found.append(process)
        except psutil.Error:
            continue  # gone, or another user's: not ours
    return found


def sweep(var: Path) -> int:
    """End all leftovers, politely first, and remove their shared memory; returns how many processes
    there were.

    Repeats until none is found: a supervisor that still lives would start its children again.
    """
    total = 0
    while found := leftovers(var):
        total += len(found)
        # Parents before children, so that nobody restarts what was just ended.
        for process in sorted(found, key=lambda item: item.pid):
            _signal(process, polite=True)
        _, alive = psutil.wait_procs(found, timeout=_TERM_S)
        for process in alive:
            _signal(process, polite=False)
        psutil.wait_procs(alive, timeout=_TERM_S)
    arena_path(var).unlink(missing_ok=True)
    return total


def _signal(process: psutil.Process, *, polite: bool) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        if polite:
            process.terminate()
        else:
            process.kill()
