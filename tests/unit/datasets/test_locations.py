"""A spec names datasets below the allowed folders or in the tenant's own storage, and no others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from vla_platform.datasets.locations import locate
from vla_platform.errors import DatasetError
from vla_storage.errors import InvalidKeyError
from vla_storage.objects import MemoryObjectStore, ObjectInfo


class AnyKeys(MemoryObjectStore):
    """Lists `names` besides what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        yield from super().list(prefix, after=after)
        for name in self.names:
            yield ObjectInfo(key=name, size=1, etag="x", modified=0.0)


def find(path: str, root: Path, objects: MemoryObjectStore | None = None) -> Path:
    return locate(
        path,
        tenant="a",
        roots=(root / "data",),
        objects=objects or MemoryObjectStore(),
        cache=root / "cache",
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data" / "demos").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "secret")
    return tmp_path


def test_a_folder_below_a_root_is_found_by_name_and_by_its_full_path(root: Path) -> None:
    expected = root / "data" / "demos"
    assert find("demos", root) == expected
    assert find(str(expected), root) == expected


@pytest.mark.parametrize(
    "path",
    ["../secret", "link", "/etc", "file:///etc", "http:///#/../etc", "s3://bucket/../../x",
     "s3://datasets/../b", "demos/../../secret", "%2e%2e/secret", "a\\b", "nowhere", "?a=../.."],
)  # fmt: skip
def test_everything_else_is_refused_b06(root: Path, path: str) -> None:
    with pytest.raises(DatasetError):
        find(path, root)


def test_a_stored_dataset_is_fetched_once_and_again_where_it_changed(root: Path) -> None:
    objects = MemoryObjectStore()
    objects.put("a/datasets/reach/meta/info.json", b"1")
    objects.put("b/datasets/other/meta/info.json", b"2")
    folder = find("s3://datasets/reach", root, objects)
    assert (folder / "meta" / "info.json").read_bytes() == b"1"
    objects.put("a/datasets/reach/meta/info.json", b"3")
    assert (find("s3://datasets/reach", root, objects) / "meta/info.json").read_bytes() == b"3"
    with pytest.raises(DatasetError):
        find("s3://datasets/other", root, objects)


def test_a_removed_object_is_removed_here_too(root: Path) -> None:
    objects = MemoryObjectStore()
    for name in ("meta/info.json", "data/old.parquet"):
        objects.put(f"a/datasets/reach/{name}", b"1")
    find("s3://datasets/reach", root, objects)
    objects.delete("a/datasets/reach/data/old.parquet")
    folder = find("s3://datasets/reach", root, objects)
    left = {one.name for one in folder.rglob("*") if one.is_file()}
    assert left == {"info.json", "info.json.etag"}


@pytest.mark.parametrize(
    "name", ["/etc/cron.d/mine", "../../b/reach/meta/info.json", "a//b", "./x"]
)
def test_no_object_is_fetched_to_another_place_b06(root: Path, name: str) -> None:
    """A tenant writes its own storage with its own keys: S3 takes any name."""
    objects = AnyKeys()
    objects.put("a/datasets/reach/meta/info.json", b"1")
    objects.names.append(f"a/datasets/reach/{name}")
    with pytest.raises(InvalidKeyError):
        find("s3://datasets/reach", root, objects)
    assert not [one for one in (root / "cache").rglob("*") if one.is_file()]


def test_an_object_named_as_a_folder_is_told(root: Path) -> None:
    objects = MemoryObjectStore()
    for name in ("meta", "meta/info.json"):
        objects.put(f"a/datasets/reach/{name}", b"1")
    with pytest.raises(DatasetError, match="name of a folder"):
        find("s3://datasets/reach", root, objects)


def test_a_dataset_larger_than_the_disk_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = MemoryObjectStore()
    objects.put("a/datasets/reach/meta/info.json", b"12345")
    usage = shutil.disk_usage(root)._replace(free=4)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DatasetError, match="are free"):
        find("s3://datasets/reach", root, objects)
