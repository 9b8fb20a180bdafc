"""Published versions: what a checkpoint holds is served; what was touched is not."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.integration.conftest import Process  # noqa: E402
from tests.published import publish  # noqa: E402
from tests.unit.gpu_workers.conftest import MakeConfig, config_maker  # noqa: E402
from tests.unit.gpu_workers.test_inference import weights_of  # noqa: E402
from vla_platform.errors import NotFoundError  # noqa: E402
from vla_platform.gpu_workers.backbone import Backbone  # noqa: E402
from vla_platform.gpu_workers.published_modules import PublishedModuleSource  # noqa: E402
from vla_platform.specs import FlowMatchingModule  # noqa: E402
from vla_storage.errors import CheckpointCorruptError, ManifestInvalidError  # noqa: E402

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone.load("tiny-random")


@pytest.fixture
def make_config(backbone: Backbone) -> MakeConfig:
    return config_maker(backbone)


def test_a_version_comes_back_as_it_was_published(
    some: Process, backbone: Backbone, make_config: MakeConfig
) -> None:
    config = make_config("a", module=FlowMatchingModule(chunk=4, hidden_dim=32, num_layers=2))
    one = weights_of(config, backbone, version=3)
    checkpoint = publish(some.store, some.ledger, config, one)
    source = PublishedModuleSource(some)
    assert source.current("a/task") == 3
    for wanted in (3, checkpoint):
        found = source.load("a/task", wanted)
        assert (3, one.digest, one.meta) == (found.version, found.digest, found.meta)
        assert one.tensors.keys() == found.tensors.keys()
        assert all(np.array_equal(one.tensors[name], found.tensors[name]) for name in one.tensors)


def test_the_newest_checkpoint_is_current_where_the_ledger_knows_none(
    some: Process, backbone: Backbone, make_config: MakeConfig
) -> None:
    config = make_config("a")
    for version in (9, 10):
        weights = weights_of(config, backbone, version=version)
        newest = publish(some.store, some.ledger, config, weights)
    some.ledger.client.delete("vla:policy:a/task")
    assert PublishedModuleSource(some).current("a/task") == newest


@pytest.mark.parametrize("key", ["a/other", "b/task", "a/task", "../task", "a/../b"])
@pytest.mark.parametrize("wanted", [1, "task/sft-published/1", "../x", "task/../1"])
def test_what_was_never_published_is_not_found(some: Process, key: str, wanted: int | str) -> None:
    source = PublishedModuleSource(some)
    with pytest.raises(NotFoundError):
        source.load(key, wanted)
    with pytest.raises(NotFoundError):
        source.current(key)


def test_a_policy_serves_no_checkpoint_of_another(
    some: Process, backbone: Backbone, make_config: MakeConfig
) -> None:
    config = make_config("a")
    checkpoint = publish(some.store, some.ledger, config, weights_of(config, backbone))
    with pytest.raises(NotFoundError):
        PublishedModuleSource(some).load("a/other", checkpoint)


def test_what_was_touched_is_never_served(
    some: Process, backbone: Backbone, make_config: MakeConfig
) -> None:
    """Altered, edited, moved, foreign and broken files are refused, by version and by name."""
    config, objects = make_config("a"), some.objects
    checkpoint = publish(some.store, some.ledger, config, weights_of(config, backbone))
    source = PublishedModuleSource(some)
    folder = "a/policies/task/checkpoints/sft-published/0000000001/"
    manifest_key = f"{folder}manifest.json"
    (tensor_key,) = [item.key for item in objects.list(folder) if "module-" in item.key]
    manifest, data = objects.get(manifest_key), objects.get(tensor_key)

    altered = bytearray(data)
    altered[-1] ^= 1
    objects.put(tensor_key, bytes(altered))
    for wanted in (1, checkpoint):
        with pytest.raises(CheckpointCorruptError, match="SHA-256"):
            source.load("a/task", wanted)
    objects.put(tensor_key, data)

    edited = json.loads(manifest)
    edited["manifest"]["policy_version"] = 2
    for broken in (json.dumps(edited).encode(), b"not json"):
        objects.put(manifest_key, broken)
        with pytest.raises(ManifestInvalidError):
            source.load("a/task", checkpoint)
        for version in (1, 2):
            with pytest.raises(NotFoundError):
                source.load("a/task", version)
    objects.delete(manifest_key)

    for place in (folder.replace("0001/", "0002/"), folder.replace("a/", "b/", 1)):
        objects.put(f"{place}manifest.json", manifest)
        objects.put(tensor_key.replace(folder, place), data)
        tenant, step = place[0], int(place.split("/")[-2])
        with pytest.raises(ManifestInvalidError):
            source.load(f"{tenant}/task", f"task/sft-published/{step}")
        with pytest.raises(NotFoundError):
            source.load(f"{tenant}/task", 1)
