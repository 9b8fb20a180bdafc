"""Saving checkpoints off the training path: staged → uploaded → published.

`save` writes the tensors into a local folder, which is what takes training time, and returns a
future; one thread hashes, uploads and publishes in order. Staging is bounded: when the store is
slow, `save` waits for room, so training pauses rather than fills the disk. The folder is not the
truth of anything: what a dead process left in it is deleted by the next one.
"""

from __future__ import annotations

import fcntl
import logging
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from vla_storage import tensors
from vla_storage.checkpoint_types import (
    MODULE,
    OPTIMIZER,
    STATE,
    Checkpoint,
    CheckpointHeader,
    encode_state,
)
from vla_storage.checkpoints import CheckpointStore
from vla_storage.errors import CodedError, StorageUnavailableError
from vla_storage.manifests import Manifest
from vla_storage.objects.base import Body

_log = logging.getLogger(__name__)

_LOCK = "lock"
Guard = Callable[[], None]


@dataclass(kw_only=True)
class _Staged:
    store: CheckpointStore
    header: CheckpointHeader
    folder: Path
    guard: Guard | None
    future: Future[Manifest] = field(default_factory=Future)


class CheckpointWriter:
    """One per worker process, for all its tenants. `save` and `close` are thread-safe.

    `folder` is best on tmpfs or a local disk; processes may share it. `on_published` runs on the
    writer's thread. Uploads, guards and callbacks that fail with a retryable error are tried
    again with back-off (up to `max_backoff_s` between tries) for
    `retry_s`, then given up.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_staged: int = 4,
        on_published: Callable[[CheckpointStore, Manifest], None] | None = None,
        retry_s: float = 600.0,
        max_backoff_s: float = 15.0,
    ) -> None:
        self._on_published = on_published
        self._retry_s = retry_s
        self._max_backoff_s = max_backoff_s
        self._room = threading.BoundedSemaphore(max_staged)
        self._queue: queue.SimpleQueue[_Staged | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        # Between the making of a folder and its lock, another process would take it for dead.
        with _locked(folder, wait=True):
            collect_dead(folder)
            self._folder = Path(tempfile.mkdtemp(prefix="staging-", dir=folder))
            self._lock_file = _locked(self._folder)
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def save(
        self,
        store: CheckpointStore,
        checkpoint: Checkpoint,
        *,
        guard: Guard | None = None,
        timeout_s: float | None = None,
    ) -> Future[Manifest]:
        """Stage a copy and return; the future ends with the manifest or the upload's error.

        The arrays may change as soon as this returns. Blocks only while `max_staged` saves are
        under way; raises `StorageUnavailableError` when that lasts `timeout_s`, or when the
        staging folder is full (nothing is left behind then; the next save may work).
        `guard` is called right before the manifest: see `CheckpointStore.publish`.
        """
        if not self._room.acquire(timeout=timeout_s):
            raise StorageUnavailableError(f"checkpoint staging stayed full for {timeout_s} s")
        try:
            staged = _Staged(
                store=store,
                header=checkpoint.header,
                folder=self._stage(checkpoint),
                guard=guard,
            )
            with self._lock:
                self._refuse_if_closed()
                self._queue.put(staged)
        except BaseException:
            self._room.release()
            raise
        return staged.future

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait for what is staged, then stop; False where `timeout_s` cut it short.

        What was not published by then is dropped, and its futures end with
        `StorageUnavailableError`. Closing again is fine.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(timeout_s)
        drained = not self._thread.is_alive()
        if not drained:
            self._stopping.set()
            self._thread.join(timeout_s)
        if not self._lock_file.closed:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock_file.close()
        return drained

    def _stage(self, checkpoint: Checkpoint) -> Path:
        """A folder with copies of the checkpoint's objects, or nothing at all."""
        self._refuse_if_closed()
        try:
            folder = Path(tempfile.mkdtemp(dir=self._folder))
        except OSError as error:
            raise StorageUnavailableError(f"cannot stage a checkpoint: {error}") from error
        try:
            for name, content in ((MODULE, checkpoint.module), (OPTIMIZER, checkpoint.optimizer)):
                with (folder / name).open("wb") as file:
                    tensors.write(content, file)
            (folder / STATE).write_bytes(encode_state(checkpoint.state))
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise StorageUnavailableError(f"cannot stage a checkpoint: {error}") from error
            raise
        return folder

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this checkpoint writer is closed")

    def _run(self) -> None:
        while (staged := self._queue.get()) is not None:
            try:
                if not staged.future.set_running_or_notify_cancel():
                    continue
                manifest = self._publish(staged)
            except Exception as error:
                # The owner of the future decides what a failed save means for its workload.
                header = staged.header
                _log.warning(
                    "action=checkpoint_not_published step=%d reason=%s", header.step, error,
                    # This thread works for many: nothing else says whose line it is.
                    extra={"tenant": staged.store.tenant_id, "workload": header.workload_id},
                )  # fmt: skip
                staged.future.set_exception(error)
            else:
                staged.future.set_result(manifest)
            finally:
                shutil.rmtree(staged.folder, ignore_errors=True)
                self._room.release()

    def _publish(self, staged: _Staged) -> Manifest:
        bodies: dict[str, Body] = {n: staged.folder / n for n in (MODULE, OPTIMIZER, STATE)}
        deadline = time.monotonic() + self._retry_s
        backoff_s = 0.25
        while not self._stopping.is_set():
            try:
                manifest = staged.store.publish(staged.header, bodies, guard=staged.guard)
                # Publishing what is published is a no-op, so both are tried again as one.
                if self._on_published is not None:
                    self._on_published(staged.store, manifest)
                return manifest
            except CodedError as error:
                if not error.retryable or time.monotonic() + backoff_s > deadline:
                    raise
            self._stopping.wait(backoff_s)
            backoff_s = min(2 * backoff_s, self._max_backoff_s)
        raise StorageUnavailableError("the checkpoint writer was stopped before it could publish")


def collect_dead(folder: Path) -> list[Path]:
    """Delete the staging of processes that are gone; returns what was deleted.

    A live process holds the lock inside its folder; the kernel drops it at death.
    """
    collected = []
    for left in folder.glob("staging-*"):
        try:
            with _locked(left):
                shutil.rmtree(left, ignore_errors=True)
        except (BlockingIOError, FileNotFoundError):
            continue
        collected.append(left)
    return collected


def _locked(folder: Path, *, wait: bool = False) -> IO[bytes]:
    file = (folder / _LOCK).open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        raise
    return file
