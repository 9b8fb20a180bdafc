"""Threads that serve tenants in turn: who asks for much waits for himself."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class TenantPool:
    """One call of each tenant after the other; a tenant's own in order."""

    def __init__(self, num_threads: int, *, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = (
            OrderedDict()
        )

    def submit(self, tenant: str, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((future, call))
        self._threads.submit(self._next)
        return future

    def shutdown(self) -> None:
        """Begin nothing more, and wait for nothing; what waits is cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = [future for calls in self._waiting.values() for future, _ in calls]
            self._waiting.clear()
        for future in left:
            future.cancel()

    def _next(self) -> None:
        with self._lock:
            if not self._waiting:
                return  # shut down
            tenant, calls = self._waiting.popitem(last=False)
            future, call = calls.popleft()
            if calls:
                self._waiting[tenant] = calls  # behind the others
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
