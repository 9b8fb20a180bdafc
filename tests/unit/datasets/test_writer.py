"""Writing v3.0 and recording the built-in task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from vla_platform.datasets import open_dataset
from vla_platform.datasets.metadata import Feature
from vla_platform.datasets.recording import expert_episodes, make_demonstrations
from vla_platform.datasets.writer import EpisodeData, write_dataset
from vla_platform.envs.tabletop import Tabletop
from vla_platform.errors import DatasetError

NUMBERS = {"action": Feature("float32", (2,))}


def write(path: Path, episodes: Any, features: Any = NUMBERS) -> None:
    write_dataset(path, episodes, fps=10, features=features, robot_type="test")


def numbers(length: int, task: str = "wait") -> EpisodeData:
    return EpisodeData({"action": np.ones((length, 2), np.float32)}, {}, task)


def test_pf45_interrupted_writing_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> Iterator[EpisodeData]:
        yield numbers(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "d", interrupted())
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with pytest.raises(DatasetError, match="exists"):
        write(tmp_path / "d", [numbers(3)])
    assert list((tmp_path / "d").iterdir()) == []


@pytest.mark.parametrize(
    "episodes",
    [
        [],
        [numbers(0)],
        [numbers(2, " ")],
        [EpisodeData({}, {}, "wait")],
        [EpisodeData({"action": np.ones((2, 3), np.float32)}, {}, "wait")],
    ],
)
def test_episodes_that_do_not_fit_are_refused(tmp_path: Path, episodes: Any) -> None:
    with pytest.raises(DatasetError):
        write(tmp_path / "d", episodes)
    assert list(tmp_path.iterdir()) == []


def test_odd_picture_sizes_are_refused(tmp_path: Path) -> None:
    features = {**NUMBERS, "cam": Feature("video", (5, 6, 3))}
    images = {"cam": np.zeros((2, 5, 6, 3), np.uint8)}
    episode = EpisodeData({"action": np.ones((2, 2), np.float32)}, images, "wait")
    with pytest.raises(DatasetError, match="even sizes"):
        write(tmp_path / "d", [episode], features)


def test_layout_is_what_lerobot_reads(tmp_path: Path) -> None:
    write(tmp_path / "d", [numbers(3), numbers(4, "go"), numbers(2)])
    meta = tmp_path / "d" / "meta"
    info = json.loads((meta / "info.json").read_text())
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 9, 2)
    assert info["codebase_version"] == "v3.0"
    tasks = pq.read_table(meta / "tasks.parquet")
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]
    assert tasks.to_pydict() == {"task_index": [0, 1], "task": ["wait", "go"]}
    rows = pq.read_table(meta / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    assert [(r["dataset_from_index"], r["dataset_to_index"]) for r in rows] == [
        (0, 3),
        (3, 7),
        (7, 9),
    ]
    stats = json.loads((meta / "stats.json").read_text())
    assert set(stats["action"]) == {
        *("min", "max", "mean", "std", "count"),
        *("q01", "q10", "q50", "q90", "q99"),
    }
    assert stats["action"]["count"] == [9]


@pytest.mark.parametrize(
    ("env", "cameras", "width"),
    [
        (Tabletop(), ("observation.images.top", "observation.images.wrist"), 3),
        (
            Tabletop(cameras=("top",), gripper=False, sentences=("go to the {color} block",)),
            ("observation.images.top",),
            2,
        ),
    ],
)
def test_demonstrations_show_the_expert_and_are_equal_for_equal_seeds(
    tmp_path: Path, env: Tabletop, cameras: tuple[str, ...], width: int
) -> None:
    for name in ("one", "two"):
        make_demonstrations(tmp_path / name, env=env, episodes=3, seed=5, noise=0.2)
    dataset = open_dataset(tmp_path / "one")
    assert dataset.digest == open_dataset(tmp_path / "two").digest
    assert cameras == dataset.cameras
    for index, episode in enumerate(expert_episodes(env, episodes=3, seed=5, noise=0.2)):
        table = dataset.frame_table(index)
        np.testing.assert_array_equal(episode.columns["action"], table["action"])
        assert (len(episode.columns["action"]), width) == table["action"].shape
        assert dataset.task(index, int(table["task_index"][0])) == episode.task
        for camera in cameras:
            seen = np.stack(list(dataset.images(index, range(len(table["index"])), camera)))
            error = np.abs(seen.astype(float) - episode.images[camera]).mean()
            assert error < 4, "video is lossy, but not this much"
