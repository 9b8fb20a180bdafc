from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_platform.errors import BackboneChangedError, ModuleLoadError
from vla_platform.gpu_workers.backbone import TINY, Backbone, FeatureKind, digest_of
from vla_platform.gpu_workers.canonical import CanonicalBatch, Row

ALL = frozenset(FeatureKind)


def make_batch(backbone: Backbone, prompts: list[str]) -> CanonicalBatch:
    rng = np.random.default_rng(0)
    rows = [
        Row(images=rng.integers(0, 256, (1, 128, 128, 3), dtype=np.uint8), prompt=prompt)
        for prompt in prompts
    ]
    layouts = [backbone.canonicalizer.layout(p, num_images=1, num_queries=0) for p in prompts]
    return backbone.canonicalizer.batch(rows, layouts, length=64)


def test_forward_equals_the_plain_model(backbone: Backbone) -> None:
    batch = make_batch(backbone, ["go", "reach the red block"])

    with torch.no_grad():
        expected = backbone._model.model(
            input_ids=torch.from_numpy(batch.input_ids),
            attention_mask=torch.from_numpy(batch.attention_mask),
            mm_token_type_ids=torch.from_numpy(batch.is_image.astype(np.int64)),
            pixel_values=torch.from_numpy(batch.patches),
            image_grid_thw=torch.from_numpy(batch.grid_thw),
            use_cache=False,
        ).last_hidden_state

    hidden = backbone.forward(batch)[FeatureKind.HIDDEN]
    own = torch.from_numpy(batch.attention_mask).bool()
    assert torch.equal(expected[own], hidden[own])


def test_every_kind_of_feature_has_its_shape(backbone: Backbone) -> None:
    found = backbone.forward(make_batch(backbone, ["go", "reach the red block"]), ALL)
    assert {kind: tuple(value.shape) for kind, value in found.items()} == {
        FeatureKind.HIDDEN: (2, 64, 128),
        FeatureKind.LAYERS: (2, 4, 64, 128),
        FeatureKind.KV: (2, 4, 2, 2, 64, 32),
    }


def test_pre_norm_is_what_the_final_norm_takes(backbone: Backbone) -> None:
    before = Backbone.load("tiny-random", feature="pre_norm")
    batch = make_batch(backbone, ["go"])
    hidden = before.forward(batch)[FeatureKind.HIDDEN]
    normed = before._model.model.language_model.norm(hidden)
    assert torch.equal(backbone.forward(batch)[FeatureKind.HIDDEN], normed)
    assert before.digest == backbone.digest
    assert before.preprocessing_digest != backbone.preprocessing_digest


def test_the_linear_patch_embedding_is_the_convolution(backbone: Backbone) -> None:
    embedding = backbone._model.model.visual.patch_embed
    patches = torch.from_numpy(make_batch(backbone, ["go"]).patches)
    with torch.no_grad():
        expected = embedding.proj(patches.view(-1, 3, 2, 16, 16)).view(-1, 128)
        torch.testing.assert_close(expected, embedding(patches), rtol=1e-5, atol=1e-5)


def test_the_digest_is_that_of_the_weights(backbone: Backbone) -> None:
    again = Backbone.load("tiny-random")
    assert again.digest == backbone.digest
    with torch.no_grad():
        again._model.lm_head.weight[0, 0] += 1
    with pytest.raises(BackboneChangedError, match="has changed"):
        again.verify()


def test_buffers_count_in_the_digest() -> None:
    module = torch.nn.BatchNorm1d(3)
    before = digest_of(module)
    module(torch.randn(4, 3))
    assert before != digest_of(module)


def test_features_carry_no_gradient_and_can_be_trained_on(backbone: Backbone) -> None:
    hidden = backbone.forward(make_batch(backbone, ["go"]))[FeatureKind.HIDDEN]
    layer = torch.nn.Linear(128, 1)
    layer(hidden).sum().backward()
    assert (hidden.requires_grad, hidden.is_inference()) == (False, False)
    assert all(parameter.grad is None for parameter in backbone._model.parameters())


def test_training_mode_does_not_last(backbone: Backbone) -> None:
    backbone._model.train()
    backbone.forward(make_batch(backbone, ["go"]))
    assert not any(module.training for module in backbone._model.modules())


def test_loading_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Backbone.load("tiny-random")
    assert torch.equal(expected, torch.rand(3))


def test_an_unknown_base_model_is_named() -> None:
    with pytest.raises(ModuleLoadError, match="'/nowhere/model'"):
        Backbone.load("/nowhere/model")


@pytest.mark.parametrize("model_type", ["own", "qwen3_vl"])
def test_code_that_comes_with_a_base_model_is_never_run_b58(
    tmp_path: Path, model_type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that names its own classes, as `trust_remote_code` would run them."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(TINY, folder)
    code = f"from pathlib import Path\nPath({str(ran)!r}).touch()\nclass Own: pass\n"
    (folder / "own.py").write_text(code)
    names = ("AutoConfig", "AutoModelForImageTextToText", "AutoTokenizer", "AutoImageProcessor")
    own = {"auto_map": {name: "own.Own" for name in names}, "model_type": model_type}
    for file in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        found = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**found, **own}))
    if model_type == "own":
        with pytest.raises(ModuleLoadError, match="custom code"):
            Backbone.load(str(folder))
    else:
        assert Backbone.load(str(folder)).digest == Backbone.load("tiny").digest
    assert not ran.exists()
    assert "[y/N]" not in capsys.readouterr().out  # nobody sits at a worker
