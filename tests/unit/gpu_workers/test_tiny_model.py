"""What the shipped tiny model is for: fresh heads on its frozen features learn from pixels."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch

from vla_platform.assets.tabletop_scenes import make_scenes
from vla_platform.datasets.statistics import Statistics
from vla_platform.gpu_workers.backbone import TINY, Backbone
from vla_platform.gpu_workers.feature_cache import FeatureCache
from vla_platform.gpu_workers.slot_state import SlotConfig
from vla_platform.gpu_workers.training import TrainingModelService
from vla_platform.schema import Schema
from vla_platform.specs import AdamWSpec, OFTModule

BATCH = 64
Columns = dict[str, np.ndarray]


def demonstrations(seed: int, num_batches: int, *, views: int, chunk: int) -> list[Columns]:
    """Scenes that the model never saw: the pretraining draws from other generators."""
    batches = []
    for at in range(num_batches):
        rng = np.random.default_rng([seed, at])
        scenes = make_scenes(rng, BATCH, chunk=chunk, size=128, views=views)
        texts = [prompt.encode().ljust(64, b"\0") for prompt in scenes.prompts]
        batches.append(
            {
                "images": scenes.images,
                "state": scenes.auxiliary[:, 2:4],
                "actions": scenes.actions,
                "actions_is_pad": np.zeros((BATCH, chunk), np.bool_),
                "prompt": np.stack([np.frombuffer(text, np.uint8) for text in texts]),
            }
        )
    return batches


def heldout_against_baseline(
    backbone: Backbone, module: OFTModule, *, views: int, num_batches: int, epochs: int
) -> tuple[float, float]:
    """Held-out L1 of a fresh head (normalised units) and that of the best constant chunk."""
    train = demonstrations(77, num_batches, views=views, chunk=module.chunk)
    heldout = demonstrations(78, 4, views=views, chunk=module.chunk)
    actions = np.concatenate([batch["actions"] for batch in train])
    unit = Statistics.compute(np.array([[-1.0, -1.0], [1.0, 1.0]]), key="action")
    schema = Schema(
        base_model=backbone.name,
        base_digest=backbone.digest,
        cameras=("top", "wrist")[:views],
        image_size=128,
        state_dim=2 if module.state == "encoder" else 0,
        action_dim=2,
        chunk=module.chunk,
        action_module="oft",
        state_input=module.state,
    )
    config = SlotConfig(
        policy_key="a/reach",
        schema=schema,
        action_module=module,
        optimizer=AdamWSpec(lr=1e-3, weight_decay=0.01),
        total_steps=num_batches * epochs,
        seed=0,
        statistics={"state": unit, "action": unit},
    )
    service = TrainingModelService(backbone, cache=FeatureCache())
    service.mount(config)
    for _ in range(epochs):
        for batch in train:
            service.train_batch(config.policy_key, batch)
    found = np.mean([service.heldout_loss(config.policy_key, batch) for batch in heldout])
    constant = np.median(actions, axis=0)
    baseline = np.mean([np.abs(batch["actions"] - constant).mean() for batch in heldout])
    return float(found), float(baseline)


@pytest.fixture(scope="module")
def tiny() -> Backbone:
    return Backbone.load("tiny")


def test_the_shipped_file_is_the_one_of_the_recipe() -> None:
    recipe = json.loads((TINY / "RECIPE.json").read_text())
    data = (TINY / "model.safetensors").read_bytes()
    assert recipe["model_safetensors_sha256"] == hashlib.sha256(data).hexdigest()
    assert len(data) < 8_000_000
    metrics = recipe["metrics"]
    assert metrics["heldout_l1_two_views"] < 0.6 * metrics["baseline_l1"]


def test_tiny_and_tiny_random_share_tokenizer_and_architecture(
    tiny: Backbone, backbone: Backbone
) -> None:
    assert tiny.preprocessing_digest == backbone.preprocessing_digest
    assert tiny.digest != backbone.digest
    assert tiny.dtype is torch.float32


def test_a_fresh_head_learns_from_pixels(tiny: Backbone) -> None:
    module = OFTModule(chunk=4, state="none")
    found, baseline = heldout_against_baseline(tiny, module, views=1, num_batches=8, epochs=25)
    assert found < 0.75 * baseline


@pytest.mark.slow
@pytest.mark.parametrize("views", [1, 2])
def test_random_features_support_no_learning_from_pixels(
    tiny: Backbone, backbone: Backbone, views: int
) -> None:
    module = OFTModule(chunk=8, state="none")
    setting = {"views": views, "num_batches": 24, "epochs": 20}
    learned, baseline = heldout_against_baseline(tiny, module, **setting)
    random, _ = heldout_against_baseline(backbone, module, **setting)
    assert learned < 0.6 * baseline
    assert random > 0.85 * baseline
