"""Tenants `a` and `ab` at a real payload Redis, each with its own user."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import pytest
import redis

from vla_platform.client.connection import as_user
from vla_platform.control.payload_access import (
    apply_payload_access,
    remove_payload_access,
    restore_payload_access,
)
from vla_platform.control.tenant_records import Tenant, record_key
from vla_storage.errors import PayloadFullError, StorageAccessError, StorageUnavailableError
from vla_storage.objects import MemoryObjectStore
from vla_storage.payloads import PayloadStore, RedisPayloadStore

pytestmark = pytest.mark.services
QUOTA = 100_000


def tenant(name: str) -> Tenant:
    digest = hashlib.sha256(f"secret-{name}".encode()).hexdigest()
    return Tenant(tenant_id=name, password_sha256=digest, payload_quota_bytes=QUOTA)


@pytest.fixture
def admin(payload_redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(payload_redis_url) as client:
        yield client
        for name in ("a", "ab"):
            client.execute_command("ACL", "DELUSER", name)


@pytest.fixture
def platform(payload_redis_url: str) -> Iterator[PayloadStore]:
    with contextlib.closing(RedisPayloadStore([payload_redis_url])) as store:
        yield store


@pytest.fixture
def stores(
    admin: redis.Redis, platform: PayloadStore, payload_redis_url: str
) -> Iterator[dict[str, PayloadStore]]:
    platform.put("boot", "a", {"x": np.arange(1)}, ttl_s=60)  # loads the functions
    platform.clear("boot", "a")
    with contextlib.ExitStack() as stack:
        found = {}
        for name in ("a", "ab"):
            apply_payload_access(admin, tenant(name))
            url = as_user(payload_redis_url, name, f"secret-{name}")
            # A tenant may claim any quota: the server knows better.
            found[name] = RedisPayloadStore([url], quota_bytes=1 << 50)
            stack.callback(found[name].close)
        yield found


def test_a_tenant_does_everything_with_its_own(
    stores: dict[str, PayloadStore], platform: PayloadStore
) -> None:
    for name, store in stores.items():
        store.put("p1", name, {"x": np.full((3, 9000), ord(name[-1]), np.uint8)}, ttl_s=60)
        store.put("p1", name, {"late": np.arange(2)}, [0, 2], ttl_s=60)
        assert store.ready_rows("p1", name, ["x", "late"], consumer="c") == [0, 2]
        assert store.mark_consumed("p1", name, "c", [2]) == [2]
        assert store.ready_rows("p1", name, ["x", "late"], consumer="c") == [0]
    for name, store in stores.items():
        found = store.arrays("p1", name, ["x"], [1])["x"]
        assert (found == ord(name[-1])).all()
        assert (platform.arrays("p1", name, ["x"], [1])["x"] == found).all()
        assert store.clear("p1", name)


def test_b05_a_tenant_reaches_nothing_of_another(
    stores: dict[str, PayloadStore], payload_redis_url: str
) -> None:
    stores["ab"].put("p1", "ab", {"x": np.arange(3)}, ttl_s=60)
    for store, other in ((stores["a"], "ab"), (stores["ab"], "a")):
        for call in (
            lambda: store.get("p1", other),  # noqa: B023
            lambda: store.metadata("p1", other),  # noqa: B023
            lambda: store.put("p1", other, {"y": np.arange(3)}, ttl_s=60),  # noqa: B023
            lambda: store.clear("p1", other),  # noqa: B023
            lambda: store.mark_consumed("p1", other, "c", [1]),  # noqa: B023
            lambda: store.partitions(),  # noqa: B023
        ):
            with pytest.raises(StorageAccessError):
                call()
    with redis.Redis.from_url(as_user(payload_redis_url, "a", "secret-a")) as client:
        for command in (
            ("SET", "a:quota:payload", "1"),
            ("FCALL", "vla_payload_clear", "1", "ab:payload:p1"),
            ("EVAL", "return 1", "0"), ("FUNCTION", "FLUSH"), ("FUNCTION", "LOAD", "x"),
            ("KEYS", "*"), ("SCAN", "0"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("ACL", "LIST"),
("CLIENT", "LIST"), ("PSUBSCRIBE", "*"),
        ):  # fmt: skip
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)
    assert (stores["ab"].arrays("p1", "ab")["x"] == np.arange(3)).all()


def test_the_quota_is_the_platforms_word(stores: dict[str, PayloadStore]) -> None:
    stores["a"].put("p1", "a", {"x": np.zeros((2, QUOTA // 4), np.uint8)}, ttl_s=60)
    with pytest.raises(PayloadFullError) as caught:
        stores["a"].put("p2", "a", {"x": np.zeros((3, QUOTA // 4), np.uint8)}, ttl_s=60)
    assert caught.value.details["reason"] == "quota"
    stores["ab"].put("p1", "ab", {"x": np.zeros((3, QUOTA // 4), np.uint8)}, ttl_s=60)


def test_a_restarted_server_gets_its_users_back(
    stores: dict[str, PayloadStore], admin: redis.Redis, platform: PayloadStore
) -> None:
    objects = MemoryObjectStore()
    for name in ("a", "ab"):
        objects.put(record_key(name), json.dumps(asdict(tenant(name))).encode())
    assert restore_payload_access([admin], objects, expected={"a", "ab"}) == []
    admin.flushall()
    admin.function_flush()
    for name in ("a", "ab"):
        admin.execute_command("ACL", "DELUSER", name)
    with pytest.raises((StorageAccessError, StorageUnavailableError)):
        stores["a"].put("p1", "a", {"x": np.arange(3)}, ttl_s=60)

    assert restore_payload_access([admin], objects, expected={"a", "ab"}) == ["a", "ab"]
    stores["a"].put("p1", "a", {"x": np.arange(3)}, ttl_s=60)
    assert (platform.arrays("p1", "a")["x"] == np.arange(3)).all()
    remove_payload_access(admin, "a")
    with pytest.raises(StorageAccessError):
        stores["a"].get("p1", "a")
