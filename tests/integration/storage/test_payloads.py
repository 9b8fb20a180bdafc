"""One contract for every payload store, on real servers and real shared memory."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from vla_storage.errors import (
    InvalidKeyError,
    PayloadError,
    PayloadExistsError,
    PayloadFullError,
    PayloadNotFoundError,
)
from vla_storage.payloads import AsyncPayloadStore, FrameColumn, Frames, Kind, PayloadStore

pytestmark = pytest.mark.services
MakeStore = Callable[..., PayloadStore]

COLUMNS = {
    "images": np.arange(2 * 90_000, dtype=np.uint8).reshape(2, 300, 300),
    "actions": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "actions_is_pad": np.array([[True], [False]]),
    "episode": np.array([2**40, -1]),
    "nothing": np.empty((2, 0), np.float16),
}


def assert_same(expected: np.ndarray, found: Any) -> None:
    assert (expected.dtype, expected.shape) == (found.dtype, found.shape)
    assert expected.tobytes() == found.tobytes()


def test_get_returns_what_put_wrote(payloads: PayloadStore) -> None:
    infos = payloads.put("p1", "a", COLUMNS, ttl_s=60)
    columns = payloads.arrays("p1", "a")

    assert COLUMNS.keys() == columns.keys()
    for name, expected in COLUMNS.items():
        assert_same(expected, columns[name])
        assert not columns[name].flags.writeable
        assert (expected.nbytes, expected.shape) == (infos[name].size_bytes, infos[name].shape)
    assert infos == payloads.metadata("p1", "a")


def test_copies_are_the_callers_own(payloads: PayloadStore) -> None:
    payloads.put("p1", "a", COLUMNS, ttl_s=60)
    mine = payloads.arrays("p1", "a", copy=True)
    for array in mine.values():
        array[...] = 0

    assert_same(COLUMNS["images"], payloads.get("p1", "a")["images"])
    assert_same(COLUMNS["actions"], payloads.get("p1", "a", ["actions"])["actions"])


def test_only_the_named_columns_are_read(payloads: PayloadStore) -> None:
    payloads.put("p1", "a", COLUMNS, ttl_s=60)

    assert list(payloads.get("p1", "a", ["episode"])) == ["episode"]
    with pytest.raises(PayloadNotFoundError) as caught:
        payloads.get("p1", "a", ["episode", "advantages"])
    assert caught.value.details["columns"] == ["advantages"]


def test_rows_come_in_the_order_they_are_asked_for(payloads: PayloadStore) -> None:
    big = np.random.default_rng(0).integers(0, 255, (6, 50_000), dtype=np.uint8)
    payloads.put("p1", "a", {"x": big, "y": np.arange(6)}, rows=[10, 11, 12, 13, 20, 21], ttl_s=60)

    for rows, at in (([12, 13], [2, 3]), ([21, 10, 20], [5, 0, 4]), ([13], [3])):
        found = payloads.get("p1", "a", ["x", "y"], rows)
        assert_same(big[at], found["x"])
        assert_same(np.arange(6)[at], found["y"])
    with pytest.raises(PayloadNotFoundError):
        payloads.get("p1", "a", ["x"], [10, 14])
    for rows in ([1, 1], [-1]):
        with pytest.raises(PayloadError):
            payloads.get("p1", "a", ["x"], rows)


def test_late_columns_and_rows_of_others_join_the_partition(
    make_store: MakeStore, payloads: PayloadStore
) -> None:
    payloads.put("p1", "a", {"x": np.arange(4.0)}, rows=[0, 1, 2, 3], ttl_s=60)
    payloads.put("p1", "a", {"x": np.arange(4.0, 6.0)}, rows=[4, 5], ttl_s=60)
    payloads.put("p1", "a", {"advantages": np.ones((3, 2))}, rows=[1, 2, 5], ttl_s=60)

    assert_same(np.arange(6.0), payloads.get("p1", "a", ["x"])["x"])
    assert payloads.ready_rows("p1", "a", ["x", "advantages"]) == [1, 2, 5]
    found = payloads.get("p1", "a", ["x", "advantages"], [5, 1])
    assert_same(np.array([5.0, 1.0]), found["x"])
    assert_same(np.ones((2, 2)), found["advantages"])
    with pytest.raises(PayloadNotFoundError) as caught:
        payloads.get("p1", "a")  # not all rows have all columns
    assert caught.value.details["columns"] == ["advantages"]


def test_a_cell_is_written_once(payloads: PayloadStore) -> None:
    payloads.put("p1", "a", {"x": np.arange(3)}, ttl_s=60)
    again = payloads.put("p1", "a", {"x": np.arange(3)}, ttl_s=60)
    with pytest.raises(PayloadExistsError):
        payloads.put("p1", "a", {"x": np.arange(3) + 1}, ttl_s=60)
    with pytest.raises(PayloadExistsError):
        payloads.put("p1", "a", {"x": np.arange(3.0)}, rows=[7, 8, 9], ttl_s=60)
    with pytest.raises(PayloadExistsError):
        payloads.put("p1", "a", {"y": np.arange(2), "x": np.array([9, 3])}, [2, 3], ttl_s=60)
    payloads.put("p1", "a", {"x": np.array([2, 3])}, rows=[2, 3], ttl_s=60)  # one new row

    assert_same(np.arange(4), payloads.get("p1", "a")["x"])
    assert again["x"].rows == (0, 1, 2)
    assert list(payloads.metadata("p1", "a")) == ["x"]


def test_of_two_writers_of_a_cell_one_wins(payloads: PayloadStore) -> None:
    def write(value: int) -> bool:
        try:
            payloads.put("p1", "a", {"x": np.full(50_000, value), f"y{value}": np.zeros(50_000)},
                         ttl_s=60)  # fmt: skip
        except PayloadExistsError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(write, range(6)))
    assert sum(won) == 1
    assert_same(np.full(50_000, won.index(True)), payloads.get("p1", "a", ["x"])["x"])
    assert ["x", f"y{won.index(True)}"] == sorted(payloads.metadata("p1", "a"))


def test_ragged_rows_stay_unpadded(payloads: PayloadStore) -> None:
    rows = [np.arange(n * 3, dtype=np.int32).reshape(n, 3) for n in (2, 0, 50_000)]
    info = payloads.put("p1", "a", {"tokens": rows}, ttl_s=60)["tokens"]
    found = payloads.get("p1", "a")["tokens"]

    assert isinstance(found, list)
    for expected, array in zip(rows, found, strict=True):
        assert_same(expected, array)
    assert (info.kind, info.shapes) == (Kind.RAGGED, ((2, 3), (0, 3), (50_000, 3)))
    assert sum(row.nbytes for row in rows) == info.size_bytes
    few = payloads.get("p1", "a", ["tokens"], [2, 0])["tokens"]
    assert_same(rows[2], few[0])  # type: ignore[index]
    with pytest.raises(PayloadError, match="not dense"):
        payloads.arrays("p1", "a")


def test_a_frame_is_stored_once_however_many_rows_show_it(payloads: PayloadStore) -> None:
    video = np.random.default_rng(0).integers(0, 255, (6, 40, 40, 3), dtype=np.uint8)
    windows = [video[max(0, t - 3) : t + 1] for t in range(6)]  # what a policy with history sees
    payloads.put("p1", "a", {"images": Frames(windows[:4])}, ttl_s=60)
    payloads.put("p1", "a", {"images": Frames(windows[4:])}, rows=[4, 5], ttl_s=60)
    info = payloads.metadata("p1", "a")["images"]
    found = payloads.get("p1", "a", ["images"])["images"]

    assert (6, video.nbytes) == (info.num_frames, info.frame_bytes)
    assert info.shapes == ((1,), (2,), (3,), (4,), (4,), (4,))
    assert isinstance(found, FrameColumn)
    assert len(found.frames) == 6
    for t, window in enumerate(windows):
        assert_same(window, np.stack(found.row(t)))
    few = payloads.get("p1", "a", ["images"], [5])["images"]
    assert isinstance(few, FrameColumn)
    assert len(few.frames) == 4
    assert_same(windows[5][None], few.stack())


def test_one_of_several_consumers_gets_a_row(payloads: PayloadStore) -> None:
    payloads.put("p1", "a", {"x": np.arange(40)}, ttl_s=60)

    with ThreadPoolExecutor(4) as pool:
        marks = pool.map(lambda _: payloads.mark_consumed("p1", "a", "grader", range(40)), range(4))
        got = [row for rows in marks for row in rows]
    assert list(range(40)) == sorted(got)
    assert payloads.ready_rows("p1", "a", ["x"], consumer="grader") == []
    assert list(range(40)) == payloads.ready_rows("p1", "a", ["x"], consumer="trainer")
    payloads.clear("p1", "a")
    assert payloads.consumed("p1", "a", "grader") == []
    with pytest.raises(PayloadNotFoundError):
        payloads.mark_consumed("p1", "a", "grader", [1])


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
    assert payloads.partitions() == []


def test_f36_an_orphan_expires(payloads: PayloadStore) -> None:
    payloads.put("p1", "a", COLUMNS, ttl_s=0.2)
    deadline = time.monotonic() + 5
    while payloads.metadata("p1", "a") and time.monotonic() < deadline:
        time.sleep(0.01)

    assert payloads.metadata("p1", "a") == {}
    payloads.put("p1", "a", {"x": np.arange(2)}, ttl_s=60)
    assert list(payloads.get("p1", "a")) == ["x"]


def test_late_columns_keep_the_early_ones(payloads: PayloadStore) -> None:
    payloads.put("p1", "a", COLUMNS, ttl_s=0.3)
    payloads.put("p1", "a", {"late": np.arange(2)}, ttl_s=60)
    gone = time.monotonic() + 0.5
    while time.monotonic() < gone:  # the first time to live has to be over
        time.sleep(0.05)

    assert_same(COLUMNS["images"], payloads.get("p1", "a")["images"])


def test_f36_f53_the_collector_removes_what_no_job_owns(payloads: PayloadStore) -> None:
    for partition in ("live", "orphan"):
        payloads.put(partition, "a", COLUMNS, ttl_s=60)
    payloads.put("own", "a", COLUMNS, ttl_s=60, owner="tenant")

    assert payloads.collect([("live", "a")], grace_s=60) == 0  # it may be on its way to the ledger
    assert payloads.collect([("live", "a")], grace_s=0) == 1
    left = {use.key.partition_id: use for use in payloads.partitions()}
    assert {"live", "own"} == left.keys()
    assert left["live"].size_bytes >= COLUMNS["images"].nbytes
    assert_same(COLUMNS["images"], payloads.get("own", "a")["images"])


def test_f39_a_full_quota_makes_producers_wait_and_consumers_drain(make_store: MakeStore) -> None:
    for kind in ("memory", "redis", "arena"):
        store = make_store(kind, quota_bytes=250_000)
        batch = {"x": np.zeros((2, 100_000), np.uint8)}
        store.put("p1", "a", batch, ttl_s=60)
        store.put("p1", "a", batch, ttl_s=60)  # a retry needs no room
        store.put("p1", "b", batch, ttl_s=60)  # nor does another tenant wait
        with pytest.raises(PayloadFullError) as caught:
            store.put("p2", "a", batch, ttl_s=60)
        assert (caught.value.retryable, caught.value.details["reason"]) == (True, "quota")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.put, "p2", "a", batch, ttl_s=60, wait_s=20)
            assert_same(batch["x"], store.get("p1", "a")["x"])
            assert store.clear("p1", "a")
            assert list(waiting.result()) == ["x"]
        store.clear("p2", "a")
        store.clear("p1", "b")
        assert store.partitions() == []


@pytest.mark.parametrize("partition", ["", "a/b", "../x", "a b", "a*", "a\n", "~x"])
def test_b06_partition_ids_are_checked(payloads: PayloadStore, partition: str) -> None:
    with pytest.raises(InvalidKeyError):
        payloads.put(partition, "a", {"x": np.arange(2)}, ttl_s=60)


@pytest.mark.parametrize(
    "column",
    [
        np.array([None]), np.array(["x"]), np.array([1j]), np.array(1), np.empty(0), [],
        [np.zeros(1), np.zeros(1, np.int8)], "text", [b"x"], Frames([[np.array([None])]]),
    ],
)  # fmt: skip
def test_only_plain_numbers_in_rows_are_stored(payloads: PayloadStore, column: Any) -> None:
    with pytest.raises(PayloadError):
        payloads.put("p1", "a", {"x": column}, ttl_s=60)
    assert payloads.metadata("p1", "a") == {}


def test_columns_of_different_length_are_refused(payloads: PayloadStore) -> None:
    for columns in ({"x": np.zeros(2), "y": np.zeros(3)}, {}):
        with pytest.raises(PayloadError):
            payloads.put("p1", "a", columns, ttl_s=60)


def test_pf27_f40_cancelled_calls_leave_no_foreign_reply_behind(payloads: PayloadStore) -> None:
    """Asyncio readers of four tenants with random cancellation: no cross-tenant delivery."""
    for value, tenant in enumerate("abcd"):
        payloads.put("p1", tenant, {"x": np.full(30_000, value)}, ttl_s=60)
    chance = random.Random(0)
    store = AsyncPayloadStore(payloads)
    read = 0

    async def reader(number: int) -> None:
        nonlocal read
        tenant = "abcd"[number % 4]
        task = asyncio.create_task(store.get("p1", tenant))
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() * 0.003)
            task.cancel()
        try:
            found = (await task)["x"]
        except asyncio.CancelledError:
            return
        assert (found == number % 4).all()
        read += 1

    async def main() -> None:
        for first in range(0, 200, 20):
            await asyncio.gather(*(reader(number) for number in range(first, first + 20)))
        await store.put("p2", "a", {"y": np.arange(2)}, ttl_s=60)
        assert await store.ready_rows("p2", "a", ["y"]) == [0, 1]
        assert await store.mark_consumed("p2", "a", "c", [1]) == [1]
        assert list(await store.metadata("p2", "a")) == ["y"]
        assert await store.clear("p2", "a")

    try:
        asyncio.run(main())
    finally:
        store.close()
    assert read >= 50
