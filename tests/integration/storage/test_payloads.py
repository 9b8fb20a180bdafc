"""One contract for every payload store, on memory and on a real Valkey."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import redis

from vla_storage.errors import (
    InvalidKeyError,
    PayloadCorruptError,
    PayloadError,
    PayloadExistsError,
    PayloadNotFoundError,
    StorageUnavailableError,
)
from vla_storage.payloads import MemoryPayloadStore, PayloadStore, RedisPayloadStore

pytestmark = pytest.mark.services

COLUMNS = {
    "images": np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4),
    "actions": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "actions_is_pad": np.array([[True], [False]]),
    "episode": np.array([2**40, -1]),
    "empty": np.empty((0, 5), np.float16),
}


@pytest.fixture(params=["memory", "redis"])
def payloads(request: pytest.FixtureRequest) -> Iterator[PayloadStore]:
    store: PayloadStore
    if request.param == "memory":
        store = MemoryPayloadStore()
    else:
        store = RedisPayloadStore.from_url(request.getfixturevalue("payload_redis_url"))
    with contextlib.closing(store):
        yield store


@pytest.fixture
def on_redis(payload_redis_url: str) -> Iterator[RedisPayloadStore]:
    with contextlib.closing(RedisPayloadStore.from_url(payload_redis_url)) as store:
        yield store


@pytest.fixture
def raw(payload_redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(payload_redis_url) as client:
        yield client


def test_get_returns_what_put_wrote(payloads: PayloadStore) -> None:
    infos = payloads.put("p1", "a", COLUMNS, ttl_s=60)
    columns = payloads.get("p1", "a")

    assert COLUMNS.keys() == columns.keys()
    for name, expected in COLUMNS.items():
        assert (expected.dtype, expected.shape) == (columns[name].dtype, columns[name].shape)
        assert expected.tobytes() == columns[name].tobytes()
        assert columns[name].flags.writeable
        assert expected.nbytes == infos[name].size_bytes
    assert infos == payloads.metadata("p1", "a")


def test_only_the_named_columns_are_read(payloads: PayloadStore) -> None:
    payloads.put("p1", "a", COLUMNS, ttl_s=60)

    assert list(payloads.get("p1", "a", ["episode"])) == ["episode"]
    with pytest.raises(PayloadNotFoundError) as caught:
        payloads.get("p1", "a", ["episode", "advantages"])
    assert caught.value.details["columns"] == ["advantages"]


def test_columns_can_be_added_beside_the_first_ones(payloads: PayloadStore) -> None:
    payloads.put("p1", "a", {"x": COLUMNS["episode"]}, ttl_s=60)
    payloads.put("p1", "a", {"advantages": COLUMNS["actions"]}, ttl_s=60)

    assert {"x", "advantages"} == set(payloads.get("p1", "a"))


def test_a_column_is_written_once(payloads: PayloadStore) -> None:
    payloads.put("p1", "a", {"x": np.arange(3)}, ttl_s=60)
    payloads.put("p1", "a", {"x": np.arange(3)}, ttl_s=60)
    with pytest.raises(PayloadExistsError):
        payloads.put("p1", "a", {"x": np.arange(3) + 1}, ttl_s=60)

    np.testing.assert_array_equal(np.arange(3), payloads.get("p1", "a")["x"])


def test_b05_another_tenants_partition_is_not_there(payloads: PayloadStore) -> None:
    payloads.put("p1", "a", COLUMNS, ttl_s=60)

    with pytest.raises(PayloadNotFoundError):
        payloads.get("p1", "ab")
    assert not payloads.clear("p1", "ab")
    assert payloads.metadata("p1", "ab") == {}
    assert payloads.metadata("p1", "a") != {}


def test_pf26_clear_is_idempotent_and_needs_no_columns(payloads: PayloadStore) -> None:
    payloads.put("p1", "a", COLUMNS, ttl_s=60)

    assert [payloads.clear("p1", "a") for _ in range(2)] == [True, False]
    assert not payloads.clear("never-written", "a")
    with pytest.raises(PayloadNotFoundError):
        payloads.get("p1", "a")


def test_f36_an_orphan_expires(payloads: PayloadStore) -> None:
    payloads.put("p1", "a", COLUMNS, ttl_s=0.05)
    deadline = time.monotonic() + 5
    while payloads.metadata("p1", "a") and time.monotonic() < deadline:
        time.sleep(0.01)

    assert payloads.metadata("p1", "a") == {}
    payloads.put("p1", "a", {"x": np.arange(2)}, ttl_s=60)


@pytest.mark.parametrize("partition", ["", "a/b", "../x", "a b", "a*", "a\n"])
def test_b06_partition_ids_are_checked(payloads: PayloadStore, partition: str) -> None:
    with pytest.raises(InvalidKeyError):
        payloads.put(partition, "a", {}, ttl_s=60)


@pytest.mark.parametrize("array", [np.array([None]), np.array(["x"]), np.array([1j])])
def test_only_plain_numbers_are_stored(payloads: PayloadStore, array: np.ndarray) -> None:
    with pytest.raises(PayloadError):
        payloads.put("p1", "a", {"x": array}, ttl_s=60)


@pytest.mark.parametrize("damage", ["flip", "truncate", "header", "garbage"])
def test_f38_damaged_bytes_are_never_training_data(
    damage: str, on_redis: RedisPayloadStore, raw: redis.Redis
) -> None:
    on_redis.put("p1", "a", COLUMNS, ttl_s=60)
    value = bytearray(raw.hget("a:payload:p1", "c:actions") or b"")
    if damage == "flip":
        value[-1] ^= 1
    elif damage == "truncate":
        del value[-1]
    elif damage == "header":
        value[5] ^= 0xFF
    else:
        value[:] = b"\xff" * 3
    raw.hset("a:payload:p1", "c:actions", bytes(value))

    with pytest.raises(PayloadCorruptError):
        on_redis.get("p1", "a")
    assert list(on_redis.get("p1", "a", ["episode"])) == ["episode"]


def test_pf27_bytes_of_another_owner_are_refused(
    on_redis: RedisPayloadStore, raw: redis.Redis
) -> None:
    on_redis.put("p1", "a", {"x": np.arange(3)}, ttl_s=60)
    on_redis.put("p1", "b", {"x": np.arange(3)}, ttl_s=60)
    raw.hset("a:payload:p1", "c:x", raw.hget("b:payload:p1", "c:x") or b"")

    with pytest.raises(PayloadCorruptError, match="another request"):
        on_redis.get("p1", "a")


def test_pf27_a_connection_one_reply_behind_is_dropped(
    on_redis: RedisPayloadStore,
) -> None:
    for tenant in "ab":
        on_redis.put("p1", tenant, {"x": np.full(4, ord(tenant))}, ttl_s=60)
    pool = on_redis._redis.connection_pool
    connection = pool.get_connection()
    connection.send_command("HMGET", "b:payload:p1", "c:x")  # its reply is never read
    pool.release(connection)

    np.testing.assert_array_equal(np.full(4, ord("a")), on_redis.get("p1", "a", ["x"])["x"])


def test_f40_readers_of_four_tenants_share_a_pool(on_redis: RedisPayloadStore) -> None:
    for value, tenant in enumerate("abcd"):
        on_redis.put("p1", tenant, {"x": np.full(1000, value)}, ttl_s=60)

    def read(round_: int) -> bool:
        tenant = "abcd"[round_ % 4]
        return bool((on_redis.get("p1", tenant)["x"] == round_ % 4).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(200)))


def test_f39_a_full_store_is_told_apart_and_recovers(
    on_redis: RedisPayloadStore, raw: redis.Redis
) -> None:
    on_redis.put("p1", "a", {"x": np.arange(3)}, ttl_s=60)
    limit = raw.config_get("maxmemory")["maxmemory"]
    raw.config_set("maxmemory", 1)
    try:
        with pytest.raises(StorageUnavailableError) as caught:
            on_redis.put("p2", "a", {"x": np.arange(3)}, ttl_s=60)
        assert caught.value.retryable
        assert on_redis.clear("p1", "a")  # consumers go on draining
    finally:
        raw.config_set("maxmemory", limit)
    on_redis.put("p2", "a", {"x": np.arange(3)}, ttl_s=60)


def test_an_absent_server_is_unavailable() -> None:
    store = RedisPayloadStore.from_url("redis://127.0.0.1:9/0")
    with contextlib.closing(store), pytest.raises(StorageUnavailableError):
        store.get("p1", "a")
