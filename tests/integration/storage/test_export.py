"""Checkpoints taken home: whole and verified, or not at all; links for others."""

from __future__ import annotations

import hashlib
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vla_platform.stack.servers import S3Address
from vla_storage import tensors
from vla_storage.checkpoints import Checkpoint, CheckpointRef, CheckpointStore
from vla_storage.errors import CheckpointCorruptError
from vla_storage.export import export_folder, export_tar
from vla_storage.objects import S3ObjectStore

pytestmark = pytest.mark.services


@pytest.fixture
def store(s3: S3Address, make_checkpoint: Callable[..., Checkpoint]) -> Iterator[CheckpointStore]:
    with s3.objects() as objects:
        found = CheckpointStore(objects=objects, tenant_id="a", signing_key=b"key")
        found.save(make_checkpoint(5))
        yield found


def test_a_folder_and_a_tar_hold_the_same(store: CheckpointStore, tmp_path: Path) -> None:
    folder = export_folder(store, "reach/w1/5", tmp_path / "out")
    assert export_folder(store, "reach/w1/5", tmp_path / "out") == folder
    names = {"manifest.json", "module.safetensors", "optimizer.safetensors", "state.json"}
    assert {path.name for path in folder.iterdir()} == names
    module = tensors.decode((folder / "module.safetensors").read_bytes())
    assert module["w"].tolist() == [[5.0] * 3] * 4
    file = export_tar(store, "reach/w1/5", tmp_path / "one.tar")
    with tarfile.open(file) as tar:
        assert {Path(name).name for name in tar.getnames()} == names
        body = tar.extractfile("reach-w1-5/state.json")
        assert body is not None
        assert body.read() == (folder / "state.json").read_bytes()
    first = file.read_bytes()
    assert export_tar(store, "reach/w1/5", file).read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.tar", "out"]


def test_a_damaged_checkpoint_leaves_nothing(store: CheckpointStore, tmp_path: Path) -> None:
    entry = store.manifest("reach/w1/5").object("module.safetensors")
    key = store.folder(CheckpointRef.parse("reach/w1/5")) + entry.relative_key
    store.objects.put(key, store.objects.get(key)[::-1])
    with pytest.raises(CheckpointCorruptError):
        export_folder(store, "reach/w1/5", tmp_path / "out")
    with pytest.raises(CheckpointCorruptError):
        export_tar(store, "reach/w1/5", tmp_path / "one.tar")
    assert list(tmp_path.iterdir()) == []


def test_a_link_reads_one_object_and_no_other(store: CheckpointStore) -> None:
    entry = store.manifest("reach/w1/5").object("state.json")
    key = store.folder(CheckpointRef.parse("reach/w1/5")) + entry.relative_key
    assert isinstance(store.objects, S3ObjectStore)
    link = store.objects.presigned_url(key, expires_s=60)
    with urllib.request.urlopen(link, timeout=10) as answer:
        assert hashlib.sha256(answer.read()).hexdigest() == entry.sha256
    for other in (link.replace("state-", "stat-"), link.partition("?")[0]):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(other, timeout=10)
        assert refused.value.code == 403
        refused.value.close()
