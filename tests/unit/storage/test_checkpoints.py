"""The checkpoint store's rules, on the object store in memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import numpy as np
import pytest

from vla_storage import tensors
from vla_storage.checkpoints import Checkpoint, CheckpointRef, CheckpointStore
from vla_storage.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    InvalidKeyError,
    ManifestInvalidError,
    ObjectExistsError,
)
from vla_storage.leftovers import collect_leftovers
from vla_storage.manifests import Manifest
from vla_storage.objects import MemoryObjectStore
from vla_storage.retention import apply_retention

KEY = b"platform key of the tests"
Make = Callable[..., Checkpoint]


@pytest.fixture
def objects() -> MemoryObjectStore:
    return MemoryObjectStore()


@pytest.fixture
def store(objects: MemoryObjectStore) -> CheckpointStore:
    return CheckpointStore(objects=objects, tenant_id="a", signing_key=KEY)


def key_of(store: CheckpointStore, manifest: Manifest, name: str = "module.safetensors") -> str:
    folder = store.folder(CheckpointRef.parse(manifest.checkpoint_id))
    return folder + manifest.object(name).relative_key


def steps(store: CheckpointStore, workload: str | None = None) -> list[int]:
    return [ref.step for ref in store.list("reach", workload)]


def test_load_returns_what_was_saved_bit_for_bit(
    store: CheckpointStore, make_checkpoint: Make
) -> None:
    saved = make_checkpoint(7)
    manifest = store.save(saved)
    loaded = store.load(manifest.checkpoint_id)

    assert (manifest, saved.state) == (loaded.manifest, loaded.state)
    for expected, actual in ((saved.module, loaded.module), (saved.optimizer, loaded.optimizer)):
        assert expected.keys() == actual.keys()
        for name, array in expected.items():
            assert array.tobytes() == actual[name].tobytes()
            assert (array.dtype, array.shape) == (actual[name].dtype, actual[name].shape)


def test_the_module_alone_is_read_without_the_rest(
    store: CheckpointStore, objects: MemoryObjectStore, make_checkpoint: Make
) -> None:
    saved = make_checkpoint(7)
    manifest = store.save(saved)
    objects.delete(key_of(store, manifest, "optimizer.safetensors"))

    found, module = store.load_module(manifest.checkpoint_id)

    assert (manifest, set(saved.module)) == (found, set(module))
    encoded = tensors.encode(module)
    assert hashlib.sha256(encoded).hexdigest() == manifest.object("module.safetensors").sha256


def test_the_manifest_is_written_last_and_names_every_object(
    objects: MemoryObjectStore, make_checkpoint: Make
) -> None:
    seen: list[tuple[str, list[str]]] = []

    def record(name: str) -> None:
        seen.append((name, [item.key for item in objects.list("a/")]))

    store = CheckpointStore(objects=objects, tenant_id="a", signing_key=KEY, failpoint=record)
    manifest = store.save(make_checkpoint(1))

    assert [name for name, _ in seen] == ["checkpoint.object"] * 3 + ["checkpoint.manifest"]
    assert not any(key.endswith("manifest.json") for _, keys in seen[:3] for key in keys)
    assert {key_of(store, manifest, entry.name) for entry in manifest.objects} == set(seen[2][1])


def test_list_and_latest_compare_steps_as_numbers(
    store: CheckpointStore, make_checkpoint: Make
) -> None:
    for step in (10000, 9900, 10100, 999):
        store.save(make_checkpoint(step))

    latest = store.latest("reach", "w1")
    assert steps(store) == [999, 9900, 10000, 10100]
    assert latest is not None
    assert latest.step == 10100
    assert store.latest("reach", "w2") is None


def test_saving_the_same_content_again_changes_nothing(
    store: CheckpointStore, objects: MemoryObjectStore, make_checkpoint: Make
) -> None:
    first = store.save(make_checkpoint(5))
    again = store.save(make_checkpoint(5))

    assert first == again
    assert len(list(objects.list("a/"))) == 5  # three objects, the manifest, its seal


def test_f57_a_step_published_with_other_content_stops_the_loser(
    store: CheckpointStore, make_checkpoint: Make
) -> None:
    winner = store.save(make_checkpoint(5))
    with pytest.raises(ObjectExistsError):
        store.save(make_checkpoint(5, value=-1.0))

    assert winner == store.verify("reach/w1/5")


def test_f57_two_writers_at_once_leave_one_valid_checkpoint(
    objects: MemoryObjectStore, make_checkpoint: Make
) -> None:
    barrier = threading.Barrier(2)
    outcomes: list[float | None] = []

    def meet(name: str) -> None:
        if name == "checkpoint.object":
            barrier.wait(10)

    def write(value: float) -> None:
        store = CheckpointStore(objects=objects, tenant_id="a", signing_key=KEY, failpoint=meet)
        try:
            store.save(make_checkpoint(5, value=value))
        except ObjectExistsError:
            outcomes.append(None)
        else:
            outcomes.append(value)

    threads = [threading.Thread(target=write, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    (won,) = [value for value in outcomes if value is not None]
    reader = CheckpointStore(objects=objects, tenant_id="a", signing_key=KEY)
    assert (len(outcomes), won) == (2, float(reader.load("reach/w1/5").module["w"][0, 0]))


def test_a_guard_that_raises_leaves_nothing_visible(
    store: CheckpointStore, make_checkpoint: Make
) -> None:
    def cancelled() -> None:
        raise CheckpointError("cancelled")

    saved = make_checkpoint(1)
    with pytest.raises(CheckpointError, match="cancelled"):
        store.publish(saved.header, saved.bodies(), guard=cancelled)
    assert store.list("reach") == []


@pytest.mark.parametrize("damage", ["missing", "flipped", "longer", "replaced"])
def test_pf20_b65_a_damaged_newest_checkpoint_is_refused_and_skipped(
    damage: str, store: CheckpointStore, objects: MemoryObjectStore, make_checkpoint: Make
) -> None:
    store.save(make_checkpoint(200))
    key = key_of(store, store.save(make_checkpoint(300)))
    content = bytearray(objects.get(key))
    if damage == "missing":
        objects.delete(key)
    else:
        content[-1] ^= 1
        objects.put(key, bytes(content) + (b"x" if damage == "longer" else b""))

    with pytest.raises(CheckpointCorruptError) as caught:
        store.load("reach/w1/300")
    latest, restored = store.latest("reach", "w1"), store.restore("reach", "w1")
    assert caught.value.details["object"] == "module.safetensors"
    assert latest is not None
    assert restored is not None
    assert (latest.step, restored.manifest.step) == (200, 200)


def test_b61_nan_weights_are_refused_unless_asked_for(
    store: CheckpointStore, make_checkpoint: Make
) -> None:
    store.save(make_checkpoint(1, value=float("nan")))

    for load in (store.load, store.load_module):
        with pytest.raises(CheckpointCorruptError):
            load("reach/w1/1")
    assert np.isnan(store.load("reach/w1/1", allow_not_finite=True).module["w"]).all()


def test_b64_an_older_manifest_in_a_newer_place_is_refused(
    store: CheckpointStore, objects: MemoryObjectStore, make_checkpoint: Make
) -> None:
    store.save(make_checkpoint(1))
    old = store.folder(CheckpointRef.parse("reach/w1/1"))
    new = store.folder(CheckpointRef.parse("reach/w1/2"))
    for item in list(objects.list(old)):
        objects.put(item.key.replace(old, new), objects.get(item.key))

    with pytest.raises(ManifestInvalidError) as caught:
        store.load("reach/w1/2")
    latest = store.latest("reach", "w1")
    assert caught.value.details["reason"] == "wrong_place"
    assert latest is not None
    assert latest.step == 1


def test_b20_another_tenants_checkpoint_is_not_found(
    store: CheckpointStore, objects: MemoryObjectStore, make_checkpoint: Make
) -> None:
    store.save(make_checkpoint(1))
    other = CheckpointStore(objects=objects, tenant_id="ab", signing_key=KEY)

    for checkpoint_id in ("reach/w1/1", "absent/w1/1"):
        with pytest.raises(CheckpointNotFoundError):
            other.load(checkpoint_id)
    assert other.list("reach") == []


@pytest.mark.parametrize(
    "checkpoint_id",
    [
        "",
        "reach/w1",
        "reach/w1/-1",
        "reach/w1/1.5",
        "../a/1",
        "reach/../1",
        "reach/w1/1/x",
        "r/w/\u0661",
    ],
)
def test_b06_checkpoint_ids_that_are_not_ids(store: CheckpointStore, checkpoint_id: str) -> None:
    with pytest.raises(InvalidKeyError):
        store.load(checkpoint_id)


def test_publishing_needs_the_key_and_json_needs_numbers(
    objects: MemoryObjectStore, make_checkpoint: Make
) -> None:
    keyless = CheckpointStore(objects=objects, tenant_id="a")
    with pytest.raises(CheckpointError, match="signing key"):
        keyless.save(make_checkpoint(1))
    assert list(objects.list("")) == []


class TestRetention:
    """PF-21."""

    def test_steps_are_compared_as_numbers(
        self, store: CheckpointStore, make_checkpoint: Make
    ) -> None:
        for step in (9900, 10000, 10100):
            store.save(make_checkpoint(step))

        assert apply_retention(store, "reach", keep_last=2) == ["reach/w1/9900"]
        assert steps(store) == [10000, 10100]

    def test_a_run_that_starts_again_at_zero_keeps_its_newest(
        self, store: CheckpointStore, make_checkpoint: Make
    ) -> None:
        for step in (9900, 10000):
            store.save(make_checkpoint(step))
        for step in (0, 50):
            store.save(make_checkpoint(step, workload="w2"))
        apply_retention(store, "reach", keep_last=1)

        assert (steps(store, "w1"), steps(store, "w2")) == ([10000], [50])

    def test_the_newest_valid_one_stays_behind_damaged_ones(
        self, store: CheckpointStore, objects: MemoryObjectStore, make_checkpoint: Make
    ) -> None:
        for step in (1, 2):
            store.save(make_checkpoint(step))
        for step in (3, 4):
            objects.delete(key_of(store, store.save(make_checkpoint(step))))
        apply_retention(store, "reach", keep_last=1)

        assert steps(store) == [2, 3, 4]
        assert store.verify("reach/w1/2").step == 2

    def test_milestones_and_checkpoints_in_use_stay(
        self, store: CheckpointStore, make_checkpoint: Make
    ) -> None:
        for step in (50, 100, 150, 200, 250):
            store.save(make_checkpoint(step))
        gone = apply_retention(
            store, "reach", keep_last=1, milestone_every=100, protect={"reach/w1/50"}
        )

        assert gone == ["reach/w1/150"]
        assert steps(store) == [50, 100, 200, 250]

    def test_keeping_none_is_refused(self, store: CheckpointStore) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            apply_retention(store, "reach", keep_last=0)


def test_f55_leftovers_go_and_visible_checkpoints_stay(
    store: CheckpointStore, objects: MemoryObjectStore, make_checkpoint: Make
) -> None:
    store.save(make_checkpoint(1))
    visible = [item.key for item in objects.list("a/")]
    leftover = store.folder(CheckpointRef.parse("reach/w1/2")) + "module-0.safetensors"
    objects.put(leftover, b"x")

    assert collect_leftovers(store, "reach") == []
    assert [leftover] == collect_leftovers(store, "reach", older_than_s=0.0)
    assert visible == [item.key for item in objects.list("a/")]
