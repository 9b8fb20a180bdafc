"""Payload Redis under faults: damage, foreign replies, full servers, dead writers, lost replies."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import redis

from vla_platform.stack.servers import S3Address
from vla_storage.errors import (
    PayloadCorruptError,
    PayloadFullError,
    PayloadNotFoundError,
    StorageUnavailableError,
)
from vla_storage.payloads import ObjectTier, PayloadStore, RedisPayloadStore
from vla_storage.payloads.base import Append
from vla_storage.payloads.redis_connections import Shards
from vla_storage.payloads.redis_index import RedisIndex
from vla_storage.payloads.segments import Key

pytestmark = pytest.mark.services
MakeStore = Callable[..., PayloadStore]

COLUMNS = {"images": np.arange(200_000, dtype=np.uint32).reshape(4, -1), "episode": np.arange(4)}
META = "a:payload:p1"


@pytest.fixture
def on_redis(make_store: MakeStore) -> PayloadStore:
    return make_store("redis")


def body_keys(raw: redis.Redis, tenant: str = "a") -> list[bytes]:
    """Longest first."""
    found = [key for key in raw.keys(f"{tenant}:payload:*:*:*")]  # type: ignore[union-attr]
    return sorted(found, key=lambda key: -raw.strlen(key))  # type: ignore[operator,arg-type]


@pytest.mark.parametrize("damage", ["flip", "truncate", "grow", "gone", "header", "garbage"])
def test_f38_damaged_bytes_are_never_training_data(
    damage: str, on_redis: PayloadStore, raw: redis.Redis
) -> None:
    on_redis.put("p1", "a", COLUMNS, ttl_s=60)
    key = body_keys(raw)[0]
    size: Any = raw.strlen(key)
    if damage == "flip":
        raw.setrange(key, size - 1, b"\xff")
    elif damage == "truncate":
        raw.set(key, raw.getrange(key, 0, size - 2))
    elif damage == "grow":
        raw.append(key, b"x")
    elif damage == "gone":
        raw.delete(key)
    else:
        header: Any = raw.hget(META, "s:0")
        raw.hset(META, "s:0", b"\xff" * 3 if damage == "garbage" else header.replace(b"4", b"5"))

    with pytest.raises((PayloadCorruptError, PayloadNotFoundError)) as caught:
        on_redis.get("p1", "a")
    assert caught.value.retryable
    if damage not in ("header", "garbage"):
        assert list(on_redis.get("p1", "a", ["episode"])) == ["episode"]
    assert on_redis.clear("p1", "a")
    on_redis.put("p1", "a", COLUMNS, ttl_s=60)
    assert (on_redis.arrays("p1", "a")["images"] == COLUMNS["images"]).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw["blocks"][0].update(offset=-1),
        lambda raw: raw["blocks"][0].update(shapes=[[1 << 60]]),
        lambda raw: raw["blocks"][0].update(shapes=[]),
        lambda raw: raw["blocks"][0].update(dtype="O"),
        lambda raw: raw["blocks"][0].update(name="../x"),
        lambda raw: raw["blocks"][0].update(ids={"from": 0, "to": 1 << 60}),
        lambda raw: raw["place"].update(cuts=[0, 1 << 60]),
        lambda raw: raw["place"].update(cuts="x"),
        lambda raw: raw.update(tenant="ab"),
        lambda raw: raw.update(version=1),
        lambda raw: raw.update(segment="../../x"),
        lambda raw: raw.update(blocks=5),
        lambda raw: raw.pop("size"),
    ],
)
def test_headers_that_a_tenant_forged_are_refused(
    change: Callable[[dict[str, Any]], Any], on_redis: PayloadStore, raw: redis.Redis
) -> None:
    """A tenant can write its own keys: digest and all."""
    on_redis.put("p1", "a", COLUMNS, ttl_s=60)
    header: Any = raw.hget(META, "s:0")
    forged = json.loads(header[16:])
    change(forged)
    text = json.dumps(forged).encode()
    raw.hset(META, "s:0", Key("a", "p1").text_digest(text) + text)

    with pytest.raises(PayloadCorruptError):
        on_redis.get("p1", "a")
    on_redis.clear("p1", "a")


def test_what_a_tenant_writes_into_its_own_index_stops_no_collector(
    on_redis: PayloadStore, raw: redis.Redis
) -> None:
    on_redis.put("p1", "a", COLUMNS, ttl_s=60)
    on_redis.put("p1", "b", COLUMNS, ttl_s=60)
    for field, value in {
        "s:x": "1", "s:1": "no header", "d:../../x": "{}", f"d:{'0' * 32}": '{"tier": []}',
        f"d:{'1' * 32}": '{"tier": "redis", "cuts": 5}', f"d:{'2' * 32}": "[", "zzz": "1",
    }.items():  # fmt: skip
        raw.hset(META, field, value)
    for partition, line in (("../x", "1 2 3 job"), ("p9", "x"), ("p8", "1 99e99 0 job")):
        raw.hset("a:payload:~partitions", partition, line)
    raw.set("c:payload:~partitions", "of another type")

    with pytest.raises(PayloadCorruptError):
        on_redis.metadata("p1", "a")
    on_redis.collect([], grace_s=0)
    assert on_redis.metadata("p1", "b") == {}
    assert not raw.exists(META)


def test_pf27_bytes_of_another_owner_are_refused(on_redis: PayloadStore, raw: redis.Redis) -> None:
    """Even those that are the same numbers: digests are bound to tenant and partition."""
    for tenant in "ab":
        on_redis.put("p1", tenant, {"x": np.arange(3)}, ttl_s=60)
    raw.hset(META, "s:0", raw.hget("b:payload:p1", "s:0") or b"")
    with pytest.raises(PayloadCorruptError):
        on_redis.get("p1", "a")


def test_pf27_a_connection_one_reply_behind_is_dropped(on_redis: PayloadStore) -> None:
    for tenant in "ab":
        on_redis.put("p1", tenant, {"x": np.full(30_000, ord(tenant))}, ttl_s=60)
    tier: Any = on_redis._tiers["redis"]
    for _ in range(3):
        pool = tier._shards.all[0].pool
        connection = pool.get_connection()
        connection.send_command("HGETALL", "b:payload:p1")  # its reply is never read
        pool.release(connection)
        found = on_redis.arrays("p1", "a", ["x"])["x"]
        assert (found == ord("a")).all()


def test_f40_killed_connections_are_made_anew(on_redis: PayloadStore, raw: redis.Redis) -> None:
    for value, tenant in enumerate("abcd"):
        on_redis.put("p1", tenant, {"x": np.full(40_000, value)}, ttl_s=60)
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.03):
            raw.client_kill_filter(_type="normal", skipme=True)

    def patiently(call: Callable[[], Any]) -> Any:
        for _ in range(20):
            try:
                return call()
            except StorageUnavailableError as error:
                assert error.retryable
        return call()

    def read(round_: int) -> bool:
        found = patiently(lambda: on_redis.arrays("p1", "abcd"[round_ % 4]))["x"]
        return bool((found == round_ % 4).all())

    def put(number: int) -> None:
        column = {"x": np.full(40_000, number)}
        patiently(lambda: on_redis.put(f"q{number}", "a", column, ttl_s=60))

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(60)))
            list(pool.map(put, range(12)))
    finally:
        stop.set()
        killer.join()
    for number in range(12):
        assert (on_redis.arrays(f"q{number}", "a")["x"] == number).all()


@contextlib.contextmanager
def memory_limit(raw: redis.Redis, limit: int) -> Any:
    before: Any = raw.config_get("maxmemory")
    raw.config_set("maxmemory", limit)
    try:
        yield
    finally:
        raw.config_set("maxmemory", before["maxmemory"])


def test_f39_a_full_server_is_told_apart_and_drains(
    on_redis: PayloadStore, raw: redis.Redis
) -> None:
    on_redis.put("p1", "a", COLUMNS, ttl_s=60)
    on_redis.mark_consumed("p1", "a", "c", [1])
    with memory_limit(raw, 1):
        with pytest.raises(PayloadFullError) as caught:
            on_redis.put("p2", "a", COLUMNS, ttl_s=60)
        assert (caught.value.retryable, caught.value.details["reason"]) == (True, "tier")
        assert (on_redis.arrays("p1", "a")["images"] == COLUMNS["images"]).all()
        assert on_redis.clear("p1", "a")  # consumers go on draining
    on_redis.put("p2", "a", COLUMNS, ttl_s=60, wait_s=5)
    on_redis.clear("p2", "a")
    assert raw.dbsize() == 0


def test_over_the_watermark_bodies_spill_to_s3(
    payload_redis_url: str, raw: redis.Redis, s3: S3Address
) -> None:
    objects = s3.objects()
    store = RedisPayloadStore([payload_redis_url], spill=[ObjectTier(objects)], watermark=0.5)
    with contextlib.closing(objects), contextlib.closing(store):
        used: Any = raw.info("memory")
        with memory_limit(raw, int(used["used_memory"] * 1.6)):
            infos = store.put("p1", "a", COLUMNS, ttl_s=60)
            assert infos["images"].tiers == ("objects",)
            store.put("p1", "a", {"late": np.arange(4)}, ttl_s=60)
            found = store.arrays("p1", "a", rows=[2, 0])
            assert (found["images"] == COLUMNS["images"][[2, 0]]).all()
            assert (found["late"] == [2, 0]).all()
            listed = [info.key for info in objects.list("platform/payloads/a/p1/")]
            assert len(listed) >= 3
            assert store.clear("p1", "a")
        assert list(objects.list("platform/payloads/")) == []
        # What a writer left that died between object and header.
        objects.put("platform/payloads/a/p9/x.0", b"body")
        assert store.collect([], grace_s=60) == 0
        assert store.collect([], grace_s=0) == 1
        assert list(objects.list("platform/payloads/")) == []


WRITER = """
import sys, time
import numpy as np
from vla_storage.payloads import RedisPayloadStore
from vla_storage.payloads import writing
real = writing.pieces
def slow(*args):
    for number, piece in enumerate(real(*args)):
        yield piece
        if number == 3:
            print("there", flush=True)
            time.sleep(600)
writing.pieces = slow
store = RedisPayloadStore([sys.argv[1]])
column = np.zeros((64, 200_000), np.uint8)
store.put("p1", "a", {"x": column, "y": column}, ttl_s=float(sys.argv[2]))
"""


def test_kill_9_of_a_writer_in_the_middle_of_a_put(
    on_redis: PayloadStore, payload_redis_url: str, raw: redis.Redis
) -> None:
    """F36: nothing of it is ever read, its quota and bytes come back, by time or by a clear."""
    for ttl_s in (600.0, 1.0):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, payload_redis_url, str(ttl_s)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert writer.stdout is not None
        assert writer.stdout.readline() == "there\n"
        assert on_redis.metadata("p1", "a") == {}
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        assert on_redis.metadata("p1", "a") == {}
        assert sum(use.size_bytes for use in on_redis.partitions()) in (0, 25_600_000)
        if ttl_s == 600:
            assert on_redis.collect([], grace_s=0) == 1
        deadline = time.monotonic() + 10
        while raw.dbsize() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert raw.dbsize() == 0
    on_redis.put("p1", "a", COLUMNS, ttl_s=60)


def test_a_put_that_a_clear_overtakes_does_not_bring_the_partition_back(
    on_redis: PayloadStore, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F53: cancelled in mid-write; what it wrote is gone too."""
    tier: Any = on_redis._tiers["redis"]
    write = type(tier).write

    def overtaken(self: Any, key: Key, *args: Any) -> None:
        write(self, key, *args)
        on_redis.clear(key.partition_id, key.tenant_id)

    monkeypatch.setattr(type(tier), "write", overtaken)
    with pytest.raises(PayloadNotFoundError):
        on_redis.put("p1", "a", COLUMNS, ttl_s=60)
    assert raw.dbsize() == 0


def test_an_append_whose_reply_got_lost_can_be_repeated(payload_redis_url: str) -> None:
    index, key, segment = RedisIndex(Shards([payload_redis_url])), Key("a", "p1"), "0" * 32
    with contextlib.closing(index):
        for _ in range(2):
            assert (
                index.begin(
                    key,
                    segment,
                    {"tier": "redis"},
                    size_bytes=7,
                    ttl_s=60,
                    quota_bytes=9,
                    owner="job",
                )
                == []
            )
        for _ in range(2):
            assert index.append(key, segment, b"header", seq=0) is Append.DONE
        assert index.append(key, "1" * 32, b"other", seq=0) is Append.GONE
        index.begin(
            key, "1" * 32, {"tier": "redis"}, size_bytes=1, ttl_s=60, quota_bytes=9, owner="job"
        )
        assert index.append(key, "1" * 32, b"other", seq=0) is Append.BEHIND
        assert index.append(key, "1" * 32, b"other", seq=1) is Append.DONE
        assert index.read(key) == [b"header", b"other"]


def test_f37_a_server_that_lost_everything_gives_an_explicit_miss(
    on_redis: PayloadStore, raw: redis.Redis
) -> None:
    on_redis.put("p1", "a", COLUMNS, ttl_s=60)
    raw.flushall()
    raw.function_flush()
    assert on_redis.metadata("p1", "a") == {}
    with pytest.raises(PayloadNotFoundError):
        on_redis.get("p1", "a")
    assert not on_redis.clear("p1", "a")
    on_redis.put("p1", "a", COLUMNS, ttl_s=60)


def test_an_absent_server_is_unavailable() -> None:
    store = RedisPayloadStore(["redis://127.0.0.1:9/0"])
    with contextlib.closing(store):
        for call in (
            lambda: store.get("p1", "a"),
            lambda: store.put("p1", "a", COLUMNS, ttl_s=60),
            lambda: store.clear("p1", "a"),
        ):
            with pytest.raises(StorageUnavailableError):
                call()


def test_partitions_spread_over_shards(make_store: MakeStore, raw: redis.Redis) -> None:
    store = make_store("shards")
    for number in range(30):
        store.put(f"p{number}", "a", {"x": np.arange(3)}, ttl_s=60)
    keyspace: Any = raw.info("keyspace")
    assert {"db0", "db1", "db2"} == keyspace.keys()
    assert len(store.partitions()) == 30
    assert store.collect([], grace_s=0) == 30
    assert raw.info("keyspace") == {}
