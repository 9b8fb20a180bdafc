"""Where the ranks of a worker meet: a folder of its user's, locked while the worker lives.

A worker that ends without a word (`os._exit`) leaves its folder; who starts next sweeps it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "vla-ranks-"
YOUNG_S = 60.0
"""A folder may be this old and not locked yet."""


@contextlib.contextmanager
def meeting_folder(root: Path | None = None) -> Iterator[Path]:
    """A new folder, gone afterwards, under `root` (None: where temporary files go)."""
    root = root or Path(tempfile.gettempdir())
    _sweep(root)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=root) as name, _locked(Path(name)):
        yield Path(name)


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, another user's, or another's to sweep
            if time.time() - folder.stat().st_mtime > YOUNG_S:
                with _locked(folder):
                    shutil.rmtree(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises `OSError` where another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
