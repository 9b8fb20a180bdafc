"""Saving off the training path."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_storage.checkpoints import Checkpoint, CheckpointStore
from vla_storage.errors import ObjectExistsError, StorageUnavailableError
from vla_storage.manifests import Manifest
from vla_storage.objects import Body, MemoryObjectStore
from vla_storage.staging import CheckpointWriter

KEY = b"platform key of the tests"
Make = Callable[..., Checkpoint]


class SlowObjects(MemoryObjectStore):
    """Refuses until `open` is set; counts the tries."""

    def __init__(self, *, wait: bool) -> None:
        super().__init__()
        self.open = threading.Event()
        self.tries = 0
        self._wait = wait

    def put(self, key: str, data: Body, **options: Any) -> str:
        self.tries += 1
        if self._wait:
            self.open.wait(10)
        elif not self.open.is_set():
            raise StorageUnavailableError("503")
        return super().put(key, data, **options)


def store(objects: MemoryObjectStore, tenant: str = "a") -> CheckpointStore:
    return CheckpointStore(objects=objects, tenant_id=tenant, signing_key=KEY)


def test_saves_are_published_in_order_and_reported(tmp_path: Path, make_checkpoint: Make) -> None:
    published: list[tuple[str, int]] = []

    def note(store: CheckpointStore, manifest: Manifest) -> None:
        published.append((store.tenant_id, manifest.step))

    objects = MemoryObjectStore()
    writer = CheckpointWriter(tmp_path, on_published=note)
    futures = [writer.save(store(objects, t), make_checkpoint(s)) for s in (1, 2) for t in "ab"]

    assert writer.close(10)
    assert published == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert [future.result(0).step for future in futures] == [1, 1, 2, 2]
    assert list(tmp_path.glob("staging-*")) == []


def test_the_arrays_may_change_as_soon_as_save_returns(
    tmp_path: Path, make_checkpoint: Make
) -> None:
    objects = SlowObjects(wait=True)
    checkpoint = make_checkpoint(3)
    writer = CheckpointWriter(tmp_path)
    future = writer.save(store(objects), checkpoint)
    checkpoint.module["w"][:] = -1.0
    objects.open.set()

    assert future.result(10).step == 3
    assert writer.close(10)
    assert (store(objects).load("reach/w1/3").module["w"] == 3.0).all()


def test_save_never_waits_on_the_store_until_staging_is_full(
    tmp_path: Path, make_checkpoint: Make
) -> None:
    objects = SlowObjects(wait=True)
    writer = CheckpointWriter(tmp_path, max_staged=2)
    futures = [writer.save(store(objects), make_checkpoint(step)) for step in (1, 2)]

    with pytest.raises(StorageUnavailableError, match="full"):
        writer.save(store(objects), make_checkpoint(3), timeout_s=0.01)
    objects.open.set()
    futures.append(writer.save(store(objects), make_checkpoint(3), timeout_s=10))

    assert [future.result(10).step for future in futures] == [1, 2, 3]
    assert writer.close(10)


def test_f59_an_outage_is_retried_until_it_ends(tmp_path: Path, make_checkpoint: Make) -> None:
    objects = SlowObjects(wait=False)
    writer = CheckpointWriter(tmp_path, max_backoff_s=0.01)
    future = writer.save(store(objects), make_checkpoint(1))
    threading.Timer(0.4, objects.open.set).start()

    assert future.result(10).step == 1
    assert objects.tries > 4
    assert writer.close(10)


def test_f59_an_outage_that_outlasts_the_limit_ends_that_save_only(
    tmp_path: Path, make_checkpoint: Make
) -> None:
    objects = SlowObjects(wait=False)
    writer = CheckpointWriter(tmp_path, retry_s=0.0)
    failed = writer.save(store(objects), make_checkpoint(1))

    with pytest.raises(StorageUnavailableError):
        failed.result(10)
    objects.open.set()
    assert writer.save(store(objects), make_checkpoint(2)).result(10).step == 2
    assert writer.close(10)


def test_f57_the_loser_of_a_step_learns_it_from_its_future(
    tmp_path: Path, make_checkpoint: Make
) -> None:
    objects = MemoryObjectStore()
    store(objects).save(make_checkpoint(1, value=9.0))
    writer = CheckpointWriter(tmp_path)

    with pytest.raises(ObjectExistsError):
        writer.save(store(objects), make_checkpoint(1)).result(10)
    assert writer.close(10)


def test_f64_a_full_disk_leaves_nothing_and_the_next_save_works(
    tmp_path: Path, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(tmp_path, max_staged=1)

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(StorageUnavailableError, match="No space left"):
            writer.save(store(MemoryObjectStore()), make_checkpoint(1))
    (folder,) = tmp_path.glob("staging-*")
    assert [folder / "lock"] == list(folder.iterdir())

    future = writer.save(store(MemoryObjectStore()), make_checkpoint(2), timeout_s=1.0)
    assert future.result(10).step == 2
    assert writer.close(10)


def test_a_checkpoint_that_cannot_be_written_frees_its_room(
    tmp_path: Path, make_checkpoint: Make
) -> None:
    writer = CheckpointWriter(tmp_path, max_staged=1)
    bad = make_checkpoint(1)
    bad.module["w"] = np.array(["text"])  # type: ignore[index]

    with pytest.raises(Exception, match="not stored"):
        writer.save(store(MemoryObjectStore()), bad)
    assert writer.save(store(MemoryObjectStore()), make_checkpoint(2), timeout_s=1.0).result(10)
    assert writer.close(10)


def test_close_in_an_outage_gives_up_in_time_and_says_so(
    tmp_path: Path, make_checkpoint: Make
) -> None:
    writer = CheckpointWriter(tmp_path, max_backoff_s=0.05)
    futures = [writer.save(store(SlowObjects(wait=False)), make_checkpoint(s)) for s in (1, 2)]

    assert not writer.close(0.2)
    for future in futures:
        with pytest.raises(StorageUnavailableError):
            future.result(10)
    with pytest.raises(RuntimeError, match="closed"):
        writer.save(store(MemoryObjectStore()), make_checkpoint(3), timeout_s=1.0)
    assert list(tmp_path.glob("staging-*")) == []


def test_leftovers_of_dead_processes_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    dead = tmp_path / "staging-dead"
    dead.mkdir()
    (dead / "module.safetensors").write_bytes(b"half")
    first, second = CheckpointWriter(tmp_path), CheckpointWriter(tmp_path)

    assert not dead.exists()
    assert len(list(tmp_path.glob("staging-*"))) == 2
    assert first.close(10)
    assert second.close(10)
