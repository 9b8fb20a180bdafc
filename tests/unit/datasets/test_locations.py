"""A spec names datasets below the allowed folders or in the tenant's own storage, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_platform.datasets.locations import locate
from vla_platform.errors import DatasetError
from vla_storage.objects import MemoryObjectStore


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
