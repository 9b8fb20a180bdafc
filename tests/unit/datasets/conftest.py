"""Small datasets in both layouts whose pictures tell which frame they are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vla_platform.datasets.lerobot import LeRobotDataset, open_dataset
from vla_platform.datasets.metadata import Feature
from vla_platform.datasets.video_writer import Codec, VideoWriter
from vla_platform.datasets.writer import EpisodeData, write_dataset

FPS = 30
CAMERAS = ("observation.images.front", "observation.images.side")
FEATURES = {
    **{camera: Feature("video", (64, 64, 3)) for camera in CAMERAS},
    "observation.state": Feature("float32", (3,), ("a", "b", "c")),
    "action": Feature("float32", (2,), ("x", "y")),
}

Make = Callable[..., LeRobotDataset]


def picture(code: int) -> np.ndarray:
    """16 cells, black or white, that spell `code` in binary: safe from lossy encoding."""
    bits = np.array([(code >> bit) & 1 for bit in range(16)], np.uint8).reshape(4, 4)
    return np.repeat(bits.repeat(16, 0).repeat(16, 1)[..., None] * 200 + 20, 3, axis=2)


def code_of(pixels: np.ndarray) -> int:
    size = len(pixels) // 4
    cells = pixels.reshape(4, size, 4, size, 3).mean(axis=(1, 3, 4)).reshape(-1) > 120
    return int(sum(1 << bit for bit, lit in enumerate(cells) if lit))


def code(episode: int, frame: int, camera: int = 0) -> int:
    return 1 + 256 * episode + 2 * frame + 32768 * camera


def make_episodes(lengths: Sequence[int]) -> list[EpisodeData]:
    """state = (episode, frame, 0.5), action = (100 * episode + frame, -frame)."""
    episodes = []
    for index, length in enumerate(lengths):
        frames = np.arange(length, dtype=np.float32)
        columns = {
            "observation.state": np.stack(
                [np.full(length, index), frames, np.full(length, 0.5)], 1
            ).astype(np.float32),
            "action": np.stack([100 * index + frames, -frames], 1),
        }
        images = {
            name: np.stack([picture(code(index, frame, number)) for frame in range(length)])
            for number, name in enumerate(CAMERAS)
        }
        episodes.append(EpisodeData(columns, images, ("lift the cup", "open the box")[index % 2]))
    return episodes


def write_v21(
    path: Path, episodes: Sequence[EpisodeData], codec: Codec = "h264", fps: float = FPS
) -> None:
    """The older layout: one parquet and one mp4 file per episode, JSON lines as metadata."""
    features: dict[str, Any] = {
        key: {"dtype": feature.dtype, "shape": list(feature.shape), "names": None}
        for key, feature in FEATURES.items()
    }
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    tasks = sorted({episode.task for episode in episodes})
    info = {
        "codebase_version": "v2.1",
        "fps": fps,
        "features": features,
        "chunks_size": 1000,
        "total_episodes": len(episodes),
        "total_frames": sum(len(episode.columns["action"]) for episode in episodes),
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/"
        "episode_{episode_index:06d}.mp4",
    }
    (path / "meta").mkdir(parents=True)
    (path / "data" / "chunk-000").mkdir(parents=True)
    (path / "meta" / "info.json").write_text(json.dumps(info))
    lines = [json.dumps({"task_index": i, "task": task}) for i, task in enumerate(tasks)]
    (path / "meta" / "tasks.jsonl").write_text("\n".join(lines))
    start, rows = 0, []
    for index, episode in enumerate(episodes):
        length = len(episode.columns["action"])
        rows.append({"episode_index": index, "tasks": [episode.task], "length": length})
        columns: dict[str, Any] = {key: list(v) for key, v in episode.columns.items()}
        columns["timestamp"] = (np.arange(length) / fps).astype(np.float32)
        columns["frame_index"] = np.arange(length)
        columns["episode_index"] = np.full(length, index)
        columns["index"] = start + np.arange(length)
        columns["task_index"] = np.full(length, tasks.index(episode.task))
        pq.write_table(pa.table(columns), path / f"data/chunk-000/episode_{index:06d}.parquet")
        for camera, pictures in episode.images.items():
            file = path / f"videos/chunk-000/{camera}/episode_{index:06d}.mp4"
            writer = VideoWriter(file, fps=fps, height=64, width=64, codec=codec)
            writer.write(pictures)
            writer.close()
        start += length
    (path / "meta" / "episodes.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


def write_v30(path: Path, episodes: Sequence[EpisodeData], codec: Codec = "h264") -> None:
    write_dataset(path, episodes, fps=FPS, features=FEATURES, robot_type="test", codec=codec)


WRITERS = {"v2.1": write_v21, "v3.0": write_v30}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(lengths, version=..., codec=...)`: a dataset of that many frames per episode."""
    counter = iter(range(100))

    def build(
        lengths: Sequence[int] = (6, 5, 9), *, version: str = "v3.0", codec: Codec = "h264"
    ) -> LeRobotDataset:
        path = tmp_path / f"dataset-{next(counter)}"
        WRITERS[version](path, make_episodes(lengths), codec)
        return open_dataset(path)

    return build


@pytest.fixture
def g1() -> LeRobotDataset:
    """The real Unitree G1 recording, where this machine has it."""
    beside = Path(__file__).parents[4] / "shared" / "data" / "g1_pick_bottle"
    path = Path(os.environ.get("VLA_G1_DATASET", beside))
    if not path.is_dir():
        pytest.skip("the G1 dataset is not on this machine")
    return open_dataset(path)


def rewrite(path: Path, **columns: Any) -> None:
    """Replace columns of a parquet file; None drops one."""
    table = pq.read_table(path)
    for name, values in columns.items():
        place = table.column_names.index(name)
        table = table.remove_column(place)
        if values is not None:
            table = table.add_column(place, name, pa.array(values))
    pq.write_table(table, path)


@pytest.fixture(name="code_of")
def _code_of() -> Callable[[np.ndarray], int]:
    return code_of


@pytest.fixture(name="code")
def _code() -> Callable[..., int]:
    return code


@pytest.fixture(name="rewrite")
def _rewrite() -> Callable[..., None]:
    return rewrite


@pytest.fixture(name="make_episodes")
def _make_episodes() -> Callable[[Sequence[int]], list[EpisodeData]]:
    return make_episodes
