"""Published versions: what is put is served; what was touched is not."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.unit.gpu_workers.test_inference import weights_of  # noqa: E402
from vla_platform.errors import ModuleLoadError, NotFoundError  # noqa: E402
from vla_platform.gpu_workers.weights import WeightStore  # noqa: E402
from vla_platform.specs import FlowMatchingModule  # noqa: E402
from vla_storage.objects import MemoryObjectStore  # noqa: E402

KEY = b"k" * 32


@pytest.fixture
def objects() -> MemoryObjectStore:
    return MemoryObjectStore()


@pytest.fixture
def store(objects: MemoryObjectStore) -> WeightStore:
    return WeightStore(objects, signing_key=KEY)


def test_a_version_comes_back_as_it_was_put(store, backbone, make_config):
    config = make_config("a", module=FlowMatchingModule(chunk=4, hidden_dim=32, num_layers=2))
    one = weights_of(config, backbone)
    digest = store.put("a/task", 3, one.tensors, one.meta)
    assert digest == store.put("a/task", 3, one.tensors, one.meta)
    found = store.get("a/task", 3)
    assert (3, one.digest, one.meta) == (found.version, found.digest, found.meta)
    assert one.tensors.keys() == found.tensors.keys()
    assert all(np.array_equal(one.tensors[name], found.tensors[name]) for name in one.tensors)


@pytest.mark.parametrize("key", ["a/other", "b/task", "a/task", "../task", "a/../b"])
def test_what_was_never_put_is_not_found(store, key: str):
    with pytest.raises(NotFoundError):
        store.get(key, 1)


def test_versions_are_listed_in_order_and_pruned_from_the_old_end(store, backbone, make_config):
    one = weights_of(make_config("a"), backbone)
    for version in (9, 10, 100):
        store.put("a/task", version, one.tensors, one.meta)
    assert store.versions("a/task") == [9, 10, 100]
    assert store.prune("a/task", keep=1) == 2
    assert store.versions("a/task") == [100]


def test_a_tenants_own_writes_are_never_served(objects, store, backbone, make_config):
    """A tenant may write below its prefix: altered, moved, unsigned and foreign files are
    refused."""
    one = weights_of(make_config("a"), backbone)
    store.put("a/task", 1, one.tensors, one.meta)
    (record_key,) = [item.key for item in objects.list("a/") if item.key.endswith(".json")]
    (tensor_key,) = [item.key for item in objects.list("a/") if "module-" in item.key]
    record, data = objects.get(record_key), objects.get(tensor_key)
    altered = bytearray(data)
    altered[-1] ^= 1
    objects.put(tensor_key, bytes(altered))
    with pytest.raises(ModuleLoadError, match="digest"):
        store.get("a/task", 1)
    objects.put(tensor_key, data)
    edited = json.loads(record)
    edited["record"]["meta"]["normalization"] = "q99"
    objects.put(record_key, json.dumps(edited).encode())
    with pytest.raises(ModuleLoadError, match="signature"):
        store.get("a/task", 1)
    objects.put(record_key.replace("0001/", "0002/"), record)
    objects.put(tensor_key.replace("0001/", "0002/"), data)
    with pytest.raises(ModuleLoadError, match="another version"):
        store.get("a/task", 2)
    objects.put(record_key.replace("a/", "b/", 1), record)
    objects.put(tensor_key.replace("a/", "b/", 1), data)
    with pytest.raises(ModuleLoadError, match="signature"):
        store.get("b/task", 1)
    objects.put(record_key, b"not json")
    with pytest.raises(ModuleLoadError):
        store.get("a/task", 1)
