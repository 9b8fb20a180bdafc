"""The script that makes the tiny base model, run for a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_platform.assets.pretrain_tiny import main
from vla_platform.assets.tabletop_scenes import COLORS, GRID, chunk_of_moves, make_scenes
from vla_platform.gpu_workers.backbone import TINY, Backbone

SHORT = ["--steps=4", "--vision-steps=1", "--lookup-steps=1", "--batch=2"]


@pytest.fixture
def keep_generator() -> object:
    with torch.random.fork_rng():
        yield None


@pytest.mark.usefixtures("keep_generator")
def test_an_interrupted_run_ends_with_the_same_model(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(["--out", str(whole), *SHORT]) == 0
    assert main(["--out", str(cut), "--stop-after", "2", *SHORT]) == 0
    assert not (cut / "model.safetensors").exists()
    assert main(["--out", str(cut), *SHORT]) == 0
    assert (whole / "model.safetensors").read_bytes() == (cut / "model.safetensors").read_bytes()
    recipe = json.loads((cut / "RECIPE.json").read_text())
    assert recipe["samples"] == 10
    assert Backbone.load(str(cut), image_size=128).hidden_dim == 128
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json"):
        assert (TINY / name).read_text() == (cut / name).read_text(), name


def test_scenes_are_a_function_of_the_generator() -> None:
    first, second = (
        make_scenes(np.random.default_rng(5), 3, chunk=4, size=64, views=2) for _ in range(2)
    )
    np.testing.assert_array_equal(first.images, second.images)
    assert first.prompts == second.prompts
    assert first.images.shape == (3, 2, 64, 64, 3)
    assert first.mark_present.shape == (3, 2 * GRID**2, len(COLORS) + 1)


def test_moves_reach_the_target_and_stop() -> None:
    moves = chunk_of_moves(
        np.array([[0.5, 0.5]], np.float32), np.array([[0.53, 0.62]], np.float32), 4
    )
    steps = np.linalg.norm(moves[0], axis=1)
    assert steps[:2] == pytest.approx([1.0, 1.0])
    assert steps[3] == pytest.approx(0.0, abs=1e-5)
    assert 0.06 * moves[0].sum(axis=0) == pytest.approx([0.03, 0.12], abs=1e-5)
