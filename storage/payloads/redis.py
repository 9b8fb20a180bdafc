"""A payload store on a Redis of its own, without persistence, away from the control Redis.

One hash per partition, `<tenant>:payload:<partition>`: a tenant's key prefix is also its ACL
prefix. Field `h:<column>` holds the header, `c:<column>` header and bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from vla_storage.errors import (
    PayloadCorruptError,
    PayloadError,
    PayloadExistsError,
    PayloadNotFoundError,
    StorageAccessError,
    StorageUnavailableError,
)
from vla_storage.payloads.base import (
    ColumnInfo,
    PayloadStore,
    check_partition,
    pack,
    parse_header,
    unpack,
)
from vla_storage.tensors import Array

_HEADER = b"h:"


class RedisPayloadStore(PayloadStore):
    def __init__(self, client: redis.Redis) -> None:
        # Replies are bytes, which redis-py's types do not say.
        self._redis: Any = client

    @classmethod
    def from_url(cls, url: str, *, timeout_s: float = 15.0) -> RedisPayloadStore:
        """With bounded waits, and retries of what a dropped connection interrupts."""
        return cls(
            redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=5.0,
                health_check_interval=30,
                retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), 5),
            )
        )

    def put(
        self, partition_id: str, tenant_id: str, columns: Mapping[str, Array], *, ttl_s: float
    ) -> dict[str, ColumnInfo]:
        key = _key(partition_id, tenant_id)
        infos: dict[str, ColumnInfo] = {}
        with _translated(partition_id), self._redis.pipeline(transaction=True) as pipe:
            for name, array in columns.items():
                infos[name], value = pack(partition_id, tenant_id, name, array)
                pipe.hsetnx(key, f"h:{name}", _header(value))
                pipe.hsetnx(key, f"c:{name}", value)
            pipe.pexpire(key, max(1, round(ttl_s * 1000)))
            replies = pipe.execute()
        if not all(replies[:-1]):
            # Written before: by an earlier try of ours whose reply got lost, or by another.
            stored = self.metadata(partition_id, tenant_id)
            for name, info in infos.items():
                if stored.get(name, info) != info:
                    raise PayloadExistsError(
                        f"column {name} holds other content", column=name, partition_id=partition_id
                    )
        return infos

    def get(
        self, partition_id: str, tenant_id: str, columns: Iterable[str] | None = None
    ) -> dict[str, Array]:
        key = _key(partition_id, tenant_id)
        names = list(self.metadata(partition_id, tenant_id)) if columns is None else list(columns)
        if not names:
            raise _absent(partition_id, ["columns"])
        try:
            return self._read(key, partition_id, tenant_id, names)
        except PayloadCorruptError:
            # A connection may be one reply behind: drop them all and ask once more.
            self._redis.connection_pool.disconnect()
            return self._read(key, partition_id, tenant_id, names)

    def metadata(self, partition_id: str, tenant_id: str) -> dict[str, ColumnInfo]:
        key = _key(partition_id, tenant_id)
        with _translated(partition_id):
            names = [name for name in self._redis.hkeys(key) if name.startswith(_HEADER)]
            values = self._redis.hmget(key, names) if names else []
        infos = {}
        for name, value in zip(names, values, strict=True):
            if value is not None:  # expired or cleared since
                infos[name.removeprefix(_HEADER).decode()] = parse_header(value)
        return infos

    def clear(self, partition_id: str, tenant_id: str) -> bool:
        with _translated(partition_id):
            # UNLINK frees large values off the server's main thread.
            return bool(self._redis.unlink(_key(partition_id, tenant_id)))

    def close(self) -> None:
        self._redis.close()

    def _read(
        self, key: str, partition_id: str, tenant_id: str, names: list[str]
    ) -> dict[str, Array]:
        with _translated(partition_id):
            values = self._redis.hmget(key, [f"c:{n}" for n in names])
        absent = [name for name, value in zip(names, values, strict=True) if value is None]
        if absent:
            raise _absent(partition_id, absent)
        return {
            name: unpack(partition_id, tenant_id, name, value)
            for name, value in zip(names, values, strict=True)
        }


def _key(partition_id: str, tenant_id: str) -> str:
    tenant, partition = check_partition(partition_id, tenant_id)
    return f"{tenant}:payload:{partition}"


def _header(value: bytes) -> bytes:
    return value[: 4 + int.from_bytes(value[:4], "little")]


def _absent(partition_id: str, names: list[str]) -> PayloadNotFoundError:
    return PayloadNotFoundError(
        f"partition {partition_id} has no {', '.join(names)}",
        partition_id=partition_id,
        columns=names,
    )


@contextlib.contextmanager
def _translated(partition_id: str) -> Iterator[None]:
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError, redis.OutOfMemoryError) as error:
        raise StorageUnavailableError(
            f"payload store: {error}", partition_id=partition_id
        ) from error
    except redis.exceptions.NoPermissionError as error:
        raise StorageAccessError(f"payload store: {error}", partition_id=partition_id) from error
    except redis.RedisError as error:
        if "OOM" in str(error):  # inside a transaction the server answers EXECABORT
            raise StorageUnavailableError(
                "payload store: full", partition_id=partition_id
            ) from error
        raise PayloadError(f"payload store: {error}", partition_id=partition_id) from error
