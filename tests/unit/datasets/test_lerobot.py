"""Reading both layouts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vla_platform.datasets import LeRobotDataset, Statistics, open_dataset
from vla_platform.datasets.metadata import Feature
from vla_platform.datasets.writer import EpisodeData, write_dataset
from vla_platform.errors import DatasetError

Make = Callable[..., LeRobotDataset]
LENGTHS = (6, 5, 9, 1)


@pytest.mark.parametrize("codec", ["h264", "av1"])
@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_b51_every_frame_is_the_right_one_in_any_order(
    make: Make, code_of: Any, code: Any, version: str, codec: str
) -> None:
    dataset = make(LENGTHS, version=version, codec=codec)
    places = [
        (episode, frame, camera)
        for episode, length in enumerate(LENGTHS)
        for frame in range(length)
        for camera in range(2)
    ]
    for place in np.random.default_rng(0).permutation(len(places)):
        episode, frame, camera = places[place]
        pixels = dataset.image(episode, frame, dataset.cameras[camera])
        assert code(episode, frame, camera) == code_of(pixels)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_metadata_and_rows(make: Make, version: str) -> None:
    dataset = make(LENGTHS, version=version)
    assert (dataset.version, dataset.fps, dataset.cameras) == (
        version,
        30,
        ("observation.images.front", "observation.images.side"),
    )
    assert [(e.index, e.length, e.start) for e in dataset.episodes] == [
        (0, 6, 0),
        (1, 5, 6),
        (2, 9, 11),
        (3, 1, 20),
    ]
    assert dataset.episodes[1].tasks == ("open the box",)
    table = dataset.frame_table(2)
    np.testing.assert_array_equal(np.arange(11, 20), table["index"])
    np.testing.assert_array_equal(200 + np.arange(9), table["action"][:, 0])
    assert (table["action"].shape, table["action"].dtype) == ((9, 2), np.float32)
    assert dataset.task(2, int(table["task_index"][0])) == "lift the cup"


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_statistics_cover_the_named_episodes_only(make: Make, version: str) -> None:
    dataset = make(LENGTHS, version=version)
    found = dataset.statistics("action", [0, 2])
    rows = np.concatenate([dataset.frame_table(e)["action"] for e in (0, 2)])
    assert Statistics.compute(rows, key="action").to_dict() == found.to_dict()
    assert (found.count, found.max.tolist()) == (15, [208.0, 0.0])


def test_readers_on_many_threads_get_their_own_frames(make: Make, code_of: Any, code: Any) -> None:
    dataset = make(LENGTHS)
    places = [(e, f) for e, length in enumerate(LENGTHS) for f in range(length)] * 4
    camera = dataset.cameras[0]
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda p: code_of(dataset.image(*p, camera)), places))
    assert [code(*place) for place in places] == seen


def test_v30_files_roll_over_and_stay_readable(
    tmp_path: Path, make_episodes: Any, code_of: Any, code: Any
) -> None:
    episodes = make_episodes([4, 5, 6])
    features = {camera: Feature("video", (64, 64, 3)) for camera in episodes[0].images} | {
        "observation.state": Feature("float32", (3,)),
        "action": Feature("float32", (2,)),
    }
    write_dataset(
        tmp_path / "d",
        episodes,
        fps=30,
        features=features,
        robot_type="test",
        data_file_mb=0,
        video_file_mb=0,
    )
    dataset = open_dataset(tmp_path / "d")
    assert len({e.data for e in dataset.episodes}) == 3
    assert len({e.videos[dataset.cameras[0]].path for e in dataset.episodes}) == 3
    assert code(2, 5) == code_of(dataset.image(2, 5, dataset.cameras[0]))


def test_pictures_inside_the_parquet_file(make: Make, code_of: Any, code: Any) -> None:
    dataset = make([3, 4], version="v2.1")
    camera = dataset.cameras[0]
    for episode in dataset.episodes:
        pixels = [dataset.image(episode.index, f, camera) for f in range(episode.length)]
        cells = []
        for picture in pixels:
            buffer = BytesIO()
            Image.fromarray(picture).save(buffer, "PNG")
            cells.append({"bytes": buffer.getvalue(), "path": None})
        table = pq.read_table(episode.data).append_column(camera, pa.array(cells))
        pq.write_table(table, episode.data)
    info = dataset.path / "meta" / "info.json"
    info.write_text(info.read_text().replace('"video"', '"image"'))
    stored = open_dataset(dataset.path)
    assert code(1, 2) == code_of(stored.image(1, 2, camera))


def test_unknown_names_are_refused_with_what_there_is(make: Make) -> None:
    dataset = make()
    with pytest.raises(DatasetError, match="no episode 7"):
        dataset.frame_table(7)
    with pytest.raises(DatasetError, match=r"no feature .*top; it has action"):
        dataset.image(0, 0, "observation.images.top")
    with pytest.raises(DatasetError, match="no 6"):
        dataset.image(0, 6, dataset.cameras[0])
    with pytest.raises(DatasetError, match="pictures"):
        dataset.statistics(dataset.cameras[0], [0])


def test_the_real_g1_recording(g1: LeRobotDataset) -> None:
    assert (len(g1.episodes), sum(e.length for e in g1.episodes)) == (6, 1568)
    (camera,) = g1.cameras
    table = g1.frame_table(3)
    assert table["action"].shape == (267, 26)
    assert g1.task(3, int(table["task_index"][0])) == "Pick up the yellow bottle on the table."
    # Random access and decoding in one go must meet in the same picture.
    run = list(g1.images(3, range(40, 60), camera))
    np.testing.assert_array_equal(run[13], g1.image(3, 53, camera))
    assert run[13].shape == (480, 640, 3)
    assert g1.statistics("action", range(6)).count == 1568


def test_an_episode_without_video_features_needs_no_video(tmp_path: Path) -> None:
    write_dataset(
        tmp_path / "d",
        [EpisodeData({"action": np.zeros((3, 1), np.float32)}, {}, "wait")],
        fps=10,
        features={"action": Feature("float32", (1,))},
        robot_type="test",
    )
    dataset = open_dataset(tmp_path / "d")
    assert dataset.cameras == ()
    assert dataset.statistics("action", [0]).std.tolist() == [0.0]
