"""A payload store in memory, for unit tests and for a worker that samples for itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping

from vla_storage.errors import PayloadExistsError, PayloadNotFoundError
from vla_storage.payloads.base import (
    ColumnInfo,
    PayloadStore,
    check_partition,
    pack,
    parse_header,
    unpack,
)
from vla_storage.tensors import Array


class MemoryPayloadStore(PayloadStore):
    def __init__(self) -> None:
        self._partitions: dict[tuple[str, str], dict[str, bytes]] = {}
        self._expires: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def put(
        self, partition_id: str, tenant_id: str, columns: Mapping[str, Array], *, ttl_s: float
    ) -> dict[str, ColumnInfo]:
        key = check_partition(partition_id, tenant_id)
        packed = {n: pack(partition_id, tenant_id, n, array) for n, array in columns.items()}
        with self._lock:
            stored = self._live(key)
            for name, (_, value) in packed.items():
                if stored.setdefault(name, value) != value:
                    raise PayloadExistsError(
                        f"column {name} holds other content", column=name, partition_id=partition_id
                    )
            self._partitions[key] = stored
            self._expires[key] = time.monotonic() + ttl_s
        return {name: info for name, (info, _) in packed.items()}

    def get(
        self, partition_id: str, tenant_id: str, columns: Iterable[str] | None = None
    ) -> dict[str, Array]:
        key = check_partition(partition_id, tenant_id)
        with self._lock:
            stored = dict(self._live(key))
        names = list(stored) if columns is None else list(columns)
        absent = [name for name in names if name not in stored]
        if absent or not stored:
            raise PayloadNotFoundError(
                f"partition {partition_id} has no {', '.join(absent) or 'columns'}",
                partition_id=partition_id,
                columns=absent,
            )
        return {name: unpack(partition_id, tenant_id, name, stored[name]) for name in names}

    def metadata(self, partition_id: str, tenant_id: str) -> dict[str, ColumnInfo]:
        key = check_partition(partition_id, tenant_id)
        with self._lock:
            return {name: parse_header(value) for name, value in self._live(key).items()}

    def clear(self, partition_id: str, tenant_id: str) -> bool:
        key = check_partition(partition_id, tenant_id)
        with self._lock:
            return bool(self._live(key)) and bool(self._partitions.pop(key))

    def _live(self, key: tuple[str, str]) -> dict[str, bytes]:
        if self._expires.get(key, 0.0) <= time.monotonic():
            self._partitions.pop(key, None)
        return self._partitions.get(key, {})
