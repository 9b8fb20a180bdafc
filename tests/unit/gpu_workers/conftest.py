"""Tenants with different schemas and modules, on the tiny base model with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vla_platform.datasets.statistics import Statistics  # noqa: E402
from vla_platform.gpu_workers.backbone import Backbone  # noqa: E402
from vla_platform.gpu_workers.slot_state import SlotConfig  # noqa: E402
from vla_platform.schema import Schema  # noqa: E402
from vla_platform.specs import AdamWSpec, FlowMatchingModule, OFTModule, ScheduleSpec  # noqa: E402

Columns = dict[str, np.ndarray[Any, Any]]
MakeConfig = Callable[..., SlotConfig]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return Backbone.load("tiny-random")


def wide_statistics(dim: int, limit: float = 2.0) -> Statistics:
    return Statistics.compute(np.stack([np.full(dim, -limit), np.full(dim, limit)]), key="x")


@pytest.fixture
def make_config(backbone: Backbone) -> MakeConfig:
    return config_maker(backbone)


def config_maker(backbone: Backbone) -> MakeConfig:
    def make(
        name: str = "a",
        *,
        module: OFTModule | FlowMatchingModule | None = None,
        cameras: tuple[str, ...] = ("top",),
        state_dim: int = 2,
        action_dim: int = 3,
        seed: int = 0,
        **changes: Any,
    ) -> SlotConfig:
        module = module or OFTModule()
        schema = Schema(
            base_model="tiny-random",
            base_digest=backbone.digest,
            cameras=cameras,
            image_size=backbone.image_size,
            state_dim=state_dim,
            action_dim=action_dim,
            chunk=module.chunk,
            action_module=module.kind,
            state_input=module.state,
        )
        fields: dict[str, Any] = {
            "optimizer": AdamWSpec(schedule=ScheduleSpec(warmup_steps=2)),
            "total_steps": 20,
            "statistics": {
                "state": wide_statistics(state_dim),
                "action": wide_statistics(action_dim),
            },
        }
        return SlotConfig(
            policy_key=f"{name}/task",
            schema=schema,
            action_module=module,
            seed=seed,
            **(fields | changes),
        )

    return make


@pytest.fixture
def three_tenants(backbone: Backbone) -> list[SlotConfig]:
    return tenants_of(backbone)


@pytest.fixture
def make_tenants() -> Callable[[Backbone], list[SlotConfig]]:
    return tenants_of


def tenants_of(backbone: Backbone) -> list[SlotConfig]:
    """Two module kinds, one to three cameras, three chunk lengths, one module with dropout."""
    make_config = config_maker(backbone)
    return [
        make_config("a"),
        make_config(
            "b",
            module=FlowMatchingModule(chunk=6, hidden_dim=32, num_layers=2, dropout=0.2),
            cameras=("top", "wrist"),
            state_dim=5,
            action_dim=4,
            seed=1,
        ),
        make_config(
            "c",
            module=OFTModule(chunk=3, state="prompt"),
            cameras=("left", "right", "wrist"),
            action_dim=2,
            seed=2,
        ),
    ]


def make_columns(config: SlotConfig, seed: int, *, num: int = 3, prompt: str = "") -> Columns:
    """Random rows that fit the schema; prompts differ in length from row to row."""
    rng = np.random.default_rng(seed)
    schema = config.schema
    texts = [
        (prompt or "reach the red block" + " and then the blue one" * (at % 3)).encode()
        for at in range(num)
    ]
    width = max(map(len, texts))
    size = schema.image_size
    return {
        "images": rng.integers(0, 256, (num, len(schema.cameras), size, size, 3), dtype=np.uint8),
        "state": rng.uniform(-1, 1, (num, schema.state_dim)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (num, schema.chunk, schema.action_dim)).astype(np.float32),
        "actions_is_pad": np.arange(schema.chunk)[None]
        >= rng.integers(1, schema.chunk + 1, (num, 1)),
        "prompt": np.stack([np.frombuffer(t.ljust(width, b"\0"), np.uint8) for t in texts]),
        "episode": np.arange(num) + 7,
        "frame": np.arange(num) * 10,
    }
