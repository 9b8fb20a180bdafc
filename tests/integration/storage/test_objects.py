"""One contract for every object store, on memory and on a real S3."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from vla_platform.stack.servers import S3Address
from vla_storage.errors import (
    InvalidKeyError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StorageAccessError,
    StorageUnavailableError,
)
from vla_storage.objects import MemoryObjectStore, ObjectStore, S3ObjectStore

pytestmark = pytest.mark.services


def s3_store(address: S3Address, **changes: str) -> S3ObjectStore:
    return S3ObjectStore(
        address.bucket,
        endpoint=changes.get("endpoint", address.endpoint),
        access_key=address.access_key,
        secret_key=changes.get("secret_key", address.secret_key),
        attempts=1,
    )


@pytest.fixture(params=["memory", "s3"])
def objects(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    if request.param == "memory":
        yield MemoryObjectStore()
        return
    with s3_store(request.getfixturevalue("s3")) as store:
        yield store


def test_get_returns_what_put_wrote(objects: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 8192)

    etag = objects.put("a/from-file", source)
    objects.put("a/empty", b"")

    assert (source.read_bytes(), etag) == objects.get_with_etag("a/from-file")
    assert objects.get("a/empty") == b""
    assert (2 << 20, etag) == (objects.head("a/from-file").size, objects.head("a/from-file").etag)


def test_a_part_of_an_object_is_read_alone(objects: ObjectStore) -> None:
    objects.put("a/x", b"0123456789")

    found = [objects.get_range("a/x", *part) for part in ((0, 3), (4, 1), (8, 5), (10, 1))]
    assert found == [b"012", b"4", b"89", b""]
    with pytest.raises(ObjectNotFoundError):
        objects.get_range("a/y", 0, 1)


def test_f60_content_that_does_not_match_its_digest_is_not_stored(
    objects: ObjectStore, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"right" * 1000)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    objects.put("a/right", source, sha256=digest)

    with pytest.raises(StorageUnavailableError):
        objects.put("a/wrong", b"wrong", sha256=digest)
    assert [item.key for item in objects.list("a/")] == ["a/right"]


def test_list_is_in_key_order_and_stays_below_the_prefix(objects: ObjectStore) -> None:
    for key in ("ab/1", "a/2", "a/10", "a/1"):
        objects.put(key, b"x")

    assert [item.key for item in objects.list("a/")] == ["a/1", "a/10", "a/2"]


def test_delete_is_idempotent(objects: ObjectStore) -> None:
    objects.put("a/x", b"x")
    objects.delete("a/x")
    objects.delete("a/x")

    with pytest.raises(ObjectNotFoundError):
        objects.get("a/x")
    with pytest.raises(ObjectNotFoundError):
        objects.head("a/x")


def test_if_absent_lets_exactly_one_of_many_writers_through(objects: ObjectStore) -> None:
    winners: list[bytes] = []

    def write(content: bytes) -> None:
        try:
            objects.put("a/manifest.json", content, if_absent=True)
        except ObjectExistsError:
            return
        winners.append(content)

    threads = [threading.Thread(target=write, args=(b"%d" % i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [objects.get("a/manifest.json")] == winners


def test_if_match_replaces_only_the_version_that_was_read(objects: ObjectStore) -> None:
    first = objects.put("a/x", b"1")
    objects.put("a/x", b"2", if_match=first)

    with pytest.raises(ObjectChangedError):
        objects.put("a/x", b"3", if_match=first)
    with pytest.raises(ObjectChangedError):
        objects.put("a/absent", b"3", if_match=first)
    assert objects.get("a/x") == b"2"


def test_max_bytes_refuses_before_reading(objects: ObjectStore) -> None:
    objects.put("a/x", b"12345")

    assert objects.get("a/x", max_bytes=5) == b"12345"
    with pytest.raises(ObjectTooLargeError):
        objects.get("a/x", max_bytes=4)


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", "a\n", "ä", "a?b"]
)
def test_b06_keys_that_escape_are_refused(objects: ObjectStore, key: str) -> None:
    with pytest.raises(InvalidKeyError):
        objects.put(key, b"x")


def test_errors_of_the_service_are_told_apart(s3: S3Address) -> None:
    with s3_store(s3, secret_key="wrong") as store, pytest.raises(StorageAccessError):
        store.get("a/x")
    with (
        s3_store(s3, endpoint="http://127.0.0.1:9") as store,
        pytest.raises(StorageUnavailableError) as caught,
    ):
        store.get("a/x")
    assert caught.value.retryable
