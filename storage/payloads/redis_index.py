"""The index on payload Redis: one small hash per partition, changed by functions on the server.

The functions (`payloads.lua`) are loaded by whoever may and finds them absent; a tenant's user
may call them only.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import redis

from vla_storage.errors import InvalidKeyError, StorageUnavailableError
from vla_storage.payloads.base import Append, PartitionUse, PayloadIndex
from vla_storage.payloads.redis_connections import Shard, Shards, as_bytes, translated
from vla_storage.payloads.segments import SEGMENT_ID, Key, Place

_APPENDED = {1: Append.DONE, 0: Append.BEHIND, -1: Append.GONE}
_HEADER = re.compile(rb"s:[0-9]{1,9}")
_REGISTRY = ":payload:~partitions"


class RedisIndex(PayloadIndex):
    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def begin(
        self, key: Key, segment_id: str, place: Place, *, size_bytes: int, ttl_s: float,
        quota_bytes: int, owner: str,
    ) -> list[bytes]:  # fmt: skip
        found = self._call(
            key, "begin", segment_id, json.dumps(place), size_bytes, max(1, int(ttl_s * 1000)),
            quota_bytes, owner,
        )  # fmt: skip
        return [as_bytes(header) for header in found]

    def append(self, key: Key, segment_id: str, header: bytes, *, seq: int) -> Append:
        return _APPENDED[self._call(key, "append", segment_id, header, seq)]

    def abandon(self, key: Key, segment_id: str) -> None:
        self._call(key, "abandon", segment_id)

    def read(self, key: Key) -> list[bytes]:
        with translated(key):
            raw = self._shards.of(key).call("HGETALL", meta_key(key))
        pairs = zip(raw[::2], raw[1::2], strict=True)
        headers = {int(f[2:]): as_bytes(v) for f, v in pairs if _HEADER.fullmatch(f)}
        return [headers[number] for number in sorted(headers)]

    def clear(self, key: Key) -> tuple[list[bytes], dict[str, Place]]:
        raw = self._call(key, "clear")
        headers: list[bytes] = []
        drafts: dict[str, Place] = {}
        for field, value in zip(raw[::2], raw[1::2], strict=True):
            kind, _, name = as_bytes(field).decode().partition(":")
            if kind == "s":
                headers.append(as_bytes(value))
            elif kind == "d" and SEGMENT_ID.fullmatch(name):
                with contextlib.suppress(ValueError):
                    drafts[name] = dict(json.loads(as_bytes(value)))
        return headers, drafts

    def mark(self, key: Key, consumer: str, rows: Sequence[int]) -> list[int]:
        found = self._call(key, "mark", consumer, *rows)
        return [int(row) for row in found]

    def consumed(self, key: Key, consumer: str) -> set[int]:
        with translated(key):
            found = self._shards.of(key).client.smembers(f"{meta_key(key)}:~{consumer}")
        return {int(row) for row in found if row.isdigit()}

    def partitions(self) -> Iterator[PartitionUse]:
        for shard in self._shards.all:
            with translated():
                found = list(self._of_shard(shard))
            yield from found

    def _of_shard(self, shard: Shard) -> Iterator[PartitionUse]:
        seconds, microseconds = shard.client.time()
        now_ms = seconds * 1000 + microseconds / 1000
        for registry in shard.client.scan_iter(match=f"*{_REGISTRY}", count=1000):
            tenant = as_bytes(registry).decode().removesuffix(_REGISTRY)
            # A tenant may write what it likes here; it is then not listed.
            try:
                lines = shard.client.hgetall(registry)
            except redis.ResponseError:
                continue
            for partition, line in lines.items():
                with contextlib.suppress(ValueError, InvalidKeyError):
                    size, expires, created, owner = as_bytes(line).decode().split()
                    use = PartitionUse(
                        key=Key.checked(as_bytes(partition).decode(), tenant),
                        size_bytes=int(size),
                        age_s=(now_ms - float(created)) / 1000,
                        owner=owner,
                    )
                    if float(expires) > now_ms:
                        yield use

    def reset(self) -> None:
        self._shards.reset()

    def close(self) -> None:
        self._shards.close()

    def _call(self, key: Key, name: str, *args: Any) -> Any:
        shard = self._shards.of(key)
        with translated(key):
            try:
                return shard.call("FCALL", f"vla_payload_{name}", 1, meta_key(key), *args)
            except redis.ResponseError as error:
                if "Function not found" not in str(error):
                    raise
            load_functions(shard.client)
            return shard.call("FCALL", f"vla_payload_{name}", 1, meta_key(key), *args)


def load_functions(client: Any) -> None:
    """Put the function library on a server. Raises `StorageUnavailableError` for a tenant: some
    process of the platform is about to do it."""
    source = resources.files("vla_storage.payloads").joinpath("payloads.lua").read_text()
    try:
        client.function_load(source, replace=True)
    except redis.exceptions.NoPermissionError as error:
        raise StorageUnavailableError("payload store: it has just been started") from error


def meta_key(key: Key) -> str:
    return f"{key.tenant_id}:payload:{key.partition_id}"


def quota_key(tenant_id: str) -> str:
    """Where a tenant's own quota lies, in bytes; a tenant may read it."""
    return f"{tenant_id}:quota:payload"
