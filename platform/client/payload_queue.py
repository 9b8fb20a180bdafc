"""The low-level calls on samples: `queue_put`, `queue_get`, `queue_clear`.

A tenant's partitions lie beside those of its jobs, in the payload store, within the same quota.
They are its own to clear; what it forgets goes when its time is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vla_platform.client.connection import Connection
from vla_storage.payloads import Column, ColumnInfo
from vla_storage.payloads.columns import ColumnData

_OWNER = "tenant"
"""Nothing of the ledger's: the collector of orphans leaves it alone."""


class PayloadQueue:
    """Mixed into `Platform`."""

    tenant: str
    _connection: Connection

    def queue_put(
        self, partition_id: str, columns: Mapping[str, ColumnData],
        rows: Sequence[int] | None = None, *, ttl_s: float = 3600.0, wait_s: float = 0.0,
    ) -> dict[str, ColumnInfo]:  # fmt: skip
        """Write columns of some rows; late columns join the rows that are there.

        `columns`: an array with leading B, a list of B arrays of different shapes, or `Frames`.
        Raises `PayloadExistsError` where a row holds other content, `PayloadFullError` (retryable)
        where the tenant's quota or the store is full for `wait_s`.
        """
        return self._connection.payloads.put(
            partition_id, self.tenant, columns, rows, ttl_s=ttl_s, wait_s=wait_s, owner=_OWNER
        )

    def queue_get(
        self, partition_id: str, columns: Iterable[str] | None = None,
        rows: Sequence[int] | None = None,
    ) -> dict[str, Column]:  # fmt: skip
        """Read the named columns of the given rows, nothing else; all without names or rows.

        Raises `PayloadNotFoundError` where a column lacks a row.
        """
        return self._connection.payloads.get(partition_id, self.tenant, columns, rows)

    def queue_clear(self, partition_id: str) -> bool:
        """Delete a partition; whether there was anything. Safe to repeat."""
        return self._connection.payloads.clear(partition_id, self.tenant)
