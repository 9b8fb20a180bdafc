"""The payload store for asyncio: the same verbs, awaited.

An exchange runs to its end on a thread whatever becomes of the one who waits for it. So a
cancelled call cannot leave a shared connection one reply behind (redis/redis-py#2624); its put may
have taken effect, and putting again is safe.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from vla_storage.payloads.columns import Column, ColumnData, ColumnInfo
from vla_storage.payloads.store import JOB, PayloadStore

T = TypeVar("T")


class AsyncPayloadStore:
    """Wraps a store, which stays the caller's to close. `concurrency` calls run at once."""

    def __init__(self, store: PayloadStore, *, concurrency: int = 8) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="payloads")

    async def put(
        self, partition_id: str, tenant_id: str, columns: Mapping[str, ColumnData],
        rows: Sequence[int] | None = None, *, ttl_s: float, wait_s: float = 0.0, owner: str = JOB,
    ) -> dict[str, ColumnInfo]:  # fmt: skip
        return await self._run(
            self._store.put, partition_id, tenant_id, columns, rows,
            ttl_s=ttl_s, wait_s=wait_s, owner=owner,
        )  # fmt: skip

    async def get(
        self, partition_id: str, tenant_id: str, columns: Iterable[str] | None = None,
        rows: Sequence[int] | None = None, *, copy: bool = False,
    ) -> dict[str, Column]:  # fmt: skip
        return await self._run(self._store.get, partition_id, tenant_id, columns, rows, copy=copy)

    async def metadata(self, partition_id: str, tenant_id: str) -> dict[str, ColumnInfo]:
        return await self._run(self._store.metadata, partition_id, tenant_id)

    async def ready_rows(
        self, partition_id: str, tenant_id: str, columns: Iterable[str], *, consumer: str = ""
    ) -> list[int]:
        return await self._run(
            self._store.ready_rows, partition_id, tenant_id, columns, consumer=consumer
        )

    async def mark_consumed(
        self, partition_id: str, tenant_id: str, consumer: str, rows: Sequence[int]
    ) -> list[int]:
        return await self._run(self._store.mark_consumed, partition_id, tenant_id, consumer, rows)

    async def clear(self, partition_id: str, tenant_id: str) -> bool:
        return await self._run(self._store.clear, partition_id, tenant_id)

    def close(self) -> None:
        """Wait for calls that are under way."""
        self._threads.shutdown()

    async def _run(self, call: Callable[..., T], *args: Any, **named: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(call, *args, **named))
