"""Readers of one recording share its decoded frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.waiting import nothing_is_read_ahead, wait_until
from vla_platform.datasets import Demonstrations, open_dataset
from vla_platform.datasets.frames import FrameSource
from vla_platform.datasets.recording import make_demonstrations
from vla_platform.envs.tabletop import Tabletop


def test_a_shared_frame_source_decodes_each_frame_once(tmp_path: Path) -> None:
    folder = tmp_path / "demos"
    make_demonstrations(folder, env=Tabletop(cameras=("top",)), episodes=3, seed=0)
    dataset = open_dataset(folder)
    frames = FrameSource(dataset, image_size=64, cache_bytes=64 << 20)

    def reader(seed: int, shared: FrameSource | None) -> Demonstrations:
        return Demonstrations(
            dataset,
            cameras=("observation.images.top",),
            state_key="observation.state",
            action_key="action",
            chunk=4,
            image_size=64,
            episodes=(0, 1, 2),
            seed=seed,
            frames=shared,
        )

    with reader(0, frames) as first, reader(1, frames) as second, reader(1, None) as alone:
        everything = first.num_samples
        first.batch(0, everything)
        wait_until(nothing_is_read_ahead)
        decoded = frames.num_decoded
        together = second.batch(0, everything).columns
        assert decoded == frames.num_decoded
        separate = alone.batch(0, everything).columns
    assert together.keys() == separate.keys()
    assert all(np.array_equal(together[name], separate[name]) for name in together)
