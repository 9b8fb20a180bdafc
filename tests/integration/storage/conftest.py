"""Payload stores of every kind, behind the one interface."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from vla_storage.objects import MemoryObjectStore
from vla_storage.payloads import (
    ArenaTier,
    MemoryPayloadStore,
    ObjectTier,
    PayloadStore,
    RedisPayloadStore,
)
from vla_storage.payloads.arena_file import create_arena
from vla_storage.payloads.redis_connections import Shards
from vla_storage.payloads.redis_index import RedisIndex

KINDS = ("memory", "redis", "shards", "arena", "objects", "tiered")
MakeStore = Callable[..., PayloadStore]


@pytest.fixture
def arena_path(tmp_path: Path) -> Path:
    return tmp_path / "arena"


@pytest.fixture
def make_store(request: pytest.FixtureRequest, arena_path: Path) -> Iterator[MakeStore]:
    """`make_store(kind, quota_bytes=...)`; two of the same kind reach the same partitions, except
    in memory."""
    objects = MemoryObjectStore()
    with contextlib.ExitStack() as stack:

        def make(kind: str, *, arena_bytes: int = 64 << 20, **named: int) -> PayloadStore:
            if kind == "memory":
                return MemoryPayloadStore(**named)
            url = request.getfixturevalue("payload_redis_url")
            # Databases of one server stand in for servers.
            urls = [url.replace("/0", f"/{n}") for n in range(3)] if kind == "shards" else [url]
            store: PayloadStore
            if kind == "objects":
                store = PayloadStore(RedisIndex(Shards(urls)), [ObjectTier(objects)], **named)
            elif kind in ("arena", "tiered"):
                create_arena(arena_path, arena_bytes)
                spill = [ObjectTier(objects)] if kind == "tiered" else []
                store = RedisPayloadStore(urls, local=[ArenaTier(arena_path)], spill=spill, **named)
            else:
                store = RedisPayloadStore(urls, **named)
            stack.callback(store.close)
            return store

        yield make


@pytest.fixture(params=KINDS)
def payloads(request: pytest.FixtureRequest, make_store: MakeStore) -> PayloadStore:
    # The tiered one has an arena that is soon full.
    return make_store(request.param, arena_bytes=1 << 20 if request.param == "tiered" else 64 << 20)


@pytest.fixture
def raw(payload_redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(payload_redis_url) as client:
        yield client
