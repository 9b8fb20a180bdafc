"""Tenants and their data for the benchmarks of the model side."""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_platform.datasets.statistics import Statistics
from vla_platform.gpu_workers.backbone import Backbone
from vla_platform.gpu_workers.slot_state import SlotConfig
from vla_platform.schema import Schema
from vla_platform.specs import AdamWSpec, OFTModule

CHUNK, STATE_DIM, ACTION_DIM = 8, 4, 3
COLORS = ("red", "green", "blue", "yellow", "purple", "orange")

Columns = dict[str, np.ndarray[Any, Any]]


def oft_config(backbone: Backbone, name: str, *, seed: int = 0) -> SlotConfig:
    """One camera, OFT with a state encoder, constant learning rate of the defaults."""

    def statistics(dim: int) -> Statistics:
        return Statistics.compute(np.stack([-np.ones(dim), np.ones(dim)]), key="benchmark")

    return SlotConfig(
        policy_key=f"{name}/reach",
        schema=Schema(
            base_model=backbone.name,
            base_digest=backbone.digest,
            cameras=("top",),
            image_size=backbone.image_size,
            state_dim=STATE_DIM,
            action_dim=ACTION_DIM,
            chunk=CHUNK,
            action_module="oft",
            state_input="encoder",
        ),
        action_module=OFTModule(chunk=CHUNK),
        optimizer=AdamWSpec(),
        total_steps=1000,
        seed=seed,
        statistics={"state": statistics(STATE_DIM), "action": statistics(ACTION_DIM)},
    )


def oft_columns(backbone: Backbone, num: int, *, seed: int) -> Columns:
    rng = np.random.default_rng(seed)
    size = backbone.image_size
    texts = [f"reach the {color} block".encode() for color in rng.choice(COLORS, num)]
    width = max(map(len, texts))
    return {
        "images": rng.integers(0, 256, (num, 1, size, size, 3), dtype=np.uint8),
        "state": rng.uniform(-1, 1, (num, STATE_DIM)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (num, CHUNK, ACTION_DIM)).astype(np.float32),
        "actions_is_pad": np.zeros((num, CHUNK), np.bool_),
        "prompt": np.stack([np.frombuffer(t.ljust(width, b"\0"), np.uint8) for t in texts]),
    }
