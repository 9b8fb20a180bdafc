"""Broken datasets are refused, naming file, episode and frame."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vla_platform.datasets import Demonstrations, LeRobotDataset, open_dataset
from vla_platform.datasets.metadata import expand
from vla_platform.errors import DatasetError

Make = Callable[..., LeRobotDataset]
FRONT = "observation.images.front"


def edit_info(dataset: LeRobotDataset, **changes: Any) -> None:
    path = dataset.path / "meta" / "info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refuse(action: Callable[[], Any], path: Path, **details: Any) -> DatasetError:
    with pytest.raises(DatasetError) as caught:
        action()
    assert str(path) == caught.value.details["path"]
    assert details == {key: caught.value.details.get(key) for key in details}
    return caught.value


def demonstrations(dataset: LeRobotDataset, **options: Any) -> Demonstrations:
    arguments: dict[str, Any] = {
        "cameras": [FRONT],
        "state_key": "observation.state",
        "action_key": "action",
        "chunk": 2,
        "image_size": 32,
        "episodes": [episode.index for episode in dataset.episodes],
        "seed": 0,
    }
    return Demonstrations(dataset, **{**arguments, **options})


def test_missing_and_malformed_info(tmp_path: Path, make: Make) -> None:
    refuse(lambda: open_dataset(tmp_path / "no"), tmp_path / "no" / "meta" / "info.json")
    dataset = make()
    info = dataset.path / "meta" / "info.json"
    for change in (
        {"codebase_version": "v9"},
        {"fps": 0},
        {"fps": "fast"},
        {"features": {"action": {"dtype": "float32", "shape": [-1]}}},
        {"features": None},
    ):
        kept = info.read_text()
        edit_info(dataset, **change)
        refuse(lambda: open_dataset(dataset.path), info)
        info.write_text(kept)
    for text in (b"{", b"[]", b'{"fps": "\xff"}'):
        info.write_bytes(text)
        refuse(lambda: open_dataset(dataset.path), info)


@pytest.mark.parametrize(
    "template",
    ["../{episode_index}", "/etc/passwd", "{a.__class__}", "{episode_index:99999999d}", "{nope}"],
)
def test_path_templates_stay_inside_the_dataset(tmp_path: Path, template: str) -> None:
    with pytest.raises(DatasetError):
        expand(template, tmp_path, {"episode_index": 1, "a": 2})
    good = expand("data/e_{episode_index:06d}.parquet", tmp_path, {"episode_index": 12})
    assert tmp_path / "data" / "e_000012.parquet" == good


def test_b49_episode_of_length_0_is_refused(make: Make) -> None:
    dataset = make([2, 3], version="v2.1")
    path = dataset.path / "meta" / "episodes.jsonl"
    path.write_text(path.read_text().replace('"length": 2', '"length": 0'))
    refuse(lambda: open_dataset(dataset.path), path, episode=0)


def test_b52_parquet_without_footer_is_named(make: Make) -> None:
    dataset = make(version="v2.1")
    path = dataset.episodes[1].data
    path.write_bytes(path.read_bytes()[:-20])
    refuse(lambda: open_dataset(dataset.path).frame_table(1), path)
    assert len(open_dataset(dataset.path).frame_table(0)["index"]) == 6


def test_b52_other_columns_and_widths_are_refused(make: Make, rewrite: Any) -> None:
    dataset = make(version="v2.1")
    path = dataset.episodes[0].data
    rewrite(path, action=[[1.0, 2.0, 3.0]] * 6)
    error = refuse(lambda: open_dataset(dataset.path).frame_table(0), path, feature="action")
    assert "3 values a row, info.json says 2" in error.message
    rewrite(path, action=[[1.0, 2.0]] * 5 + [[1.0]])
    refuse(lambda: open_dataset(dataset.path).frame_table(0), path, feature="action")
    rewrite(path, action=["a"] * 6)
    refuse(lambda: open_dataset(dataset.path).frame_table(0), path, feature="action")
    rewrite(path, action=[[1.0, None]] * 6)
    refuse(lambda: open_dataset(dataset.path).frame_table(0), path, feature="action")
    rewrite(path, action=None)
    refuse(lambda: open_dataset(dataset.path).frame_table(0), path)


def test_b52_mixed_layouts_are_refused(make: Make) -> None:
    old, new = make(version="v2.1"), make(version="v3.0")
    stray = new.path / "meta" / "episodes.jsonl"
    stray.write_text("{}")
    refuse(lambda: open_dataset(new.path), stray)
    stray = old.path / "meta" / "episodes"
    stray.mkdir()
    refuse(lambda: open_dataset(old.path), stray)


def test_counts_that_disagree_are_refused(make: Make, rewrite: Any) -> None:
    dataset = make(version="v2.1")
    edit_info(dataset, total_frames=21)
    refuse(lambda: open_dataset(dataset.path), dataset.path / "meta" / "episodes.jsonl")
    edit_info(dataset, total_frames=20)
    rewrite(dataset.episodes[0].data, episode_index=[0, 0, 0, 0, 0, 1])
    path = dataset.episodes[0].data
    refuse(lambda: open_dataset(dataset.path).frame_table(0), path, episode=0)


def test_b53_missing_video_is_named(make: Make) -> None:
    dataset = make(version="v2.1")
    path = dataset.episodes[2].videos[FRONT].path
    path.unlink()
    refuse(lambda: dataset.image(2, 0, FRONT), path)
    refuse(lambda: demonstrations(dataset), path)
    partly = demonstrations(dataset, on_bad_row="skip")
    assert list(partly.skipped.episodes) == [2]
    assert partly.num_samples == 11


def test_b53_video_shorter_than_the_rows_is_refused(make: Make) -> None:
    short, long = make([3, 3], version="v2.1"), make([3, 9], version="v2.1")
    path = long.episodes[1].videos[FRONT].path
    path.write_bytes(short.episodes[1].videos[FRONT].path.read_bytes())
    error = refuse(lambda: long.image(1, 0, FRONT), path, episode=1, frame=8)
    assert error.details["worst_offset_s"] == pytest.approx(-6 / 30)


def test_b53_wrong_fps_is_refused_with_the_worst_offset(make: Make) -> None:
    dataset = make(version="v2.1")
    edit_info(dataset, fps=29)
    path = dataset.episodes[0].data
    error = refuse(lambda: open_dataset(dataset.path).frame_table(0), path, episode=0, frame=5)
    assert error.details["worst_offset_s"] == pytest.approx(5 / 30 - 5 / 29)


@pytest.mark.parametrize("codec", ["h264", "av1"])
def test_b53_undecodable_frame_is_refused_and_its_neighbours_survive(
    make: Make, codec: str, code_of: Any, code: Any
) -> None:
    dataset = make([12], version="v2.1", codec=codec)
    path = dataset.episodes[0].videos[FRONT].path
    with av.open(str(path)) as container:
        packets = [(p.pos, p.size) for p in container.demux(video=0) if p.pts is not None]
    position, size = packets[7]
    content = bytearray(path.read_bytes())
    content[position : position + size] = b"\xff" * size
    path.write_bytes(bytes(content))
    refuse(lambda: dataset.image(0, 7, FRONT), path, episode=0, frame=7)
    assert code(0, 5) == code_of(dataset.image(0, 5, FRONT))
    assert code(0, 10) == code_of(dataset.image(0, 10, FRONT))
    refuse(lambda: list(dataset.images(0, range(12), FRONT)), path, episode=0, frame=7)
    with demonstrations(dataset) as rows:
        refuse(lambda: rows.batch(0, 12), path, episode=0, frame=7)


def test_b53_not_a_video_at_all(make: Make) -> None:
    dataset = make(version="v2.1")
    path = dataset.episodes[0].videos[FRONT].path
    path.write_bytes(b"not a video" * 100)
    refuse(lambda: dataset.image(0, 0, FRONT), path)


def test_pictures_of_another_size_are_refused(make: Make) -> None:
    dataset = make(version="v2.1")
    info = dataset.path / "meta" / "info.json"
    info.write_text(info.read_text().replace("[64, 64, 3]", "[48, 64, 3]"))
    refuse(lambda: open_dataset(dataset.path).image(0, 0, FRONT), dataset.path, frame=0)


def shifted(times: np.ndarray, kind: str) -> np.ndarray:
    return {
        "tolerance": times + 1e-4,
        "drift": times * 1.01,
        "wall clock": times + 1.7e9,
        "not rising": times[[0, 2, 1, 3, 4, 5]],
        "negative": times - 0.5,
        "not finite": np.where(times > 0.1, np.nan, times),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "frame"),
    [("drift", 5), ("wall clock", None), ("not rising", None), ("negative", None)],
)
def test_b54_bad_timestamps_are_refused(
    make: Make, rewrite: Any, kind: str, frame: int | None
) -> None:
    dataset = make(version="v2.1")
    path = dataset.episodes[0].data
    rewrite(path, timestamp=shifted(np.arange(6) / 30, kind))
    error = refuse(lambda: open_dataset(dataset.path).frame_table(0), path, episode=0)
    assert abs(error.details["worst_offset_s"]) > 1e-3
    assert frame in (None, error.details["frame"])


def test_b54_timestamps_that_are_not_finite_are_refused(make: Make, rewrite: Any) -> None:
    dataset = make(version="v2.1")
    path = dataset.episodes[0].data
    rewrite(path, timestamp=shifted(np.arange(6) / 30, "not finite"))
    refuse(lambda: open_dataset(dataset.path).frame_table(0), path, episode=0, frame=4)


def test_pf44_offset_of_exactly_the_tolerance_is_accepted(
    make: Make, rewrite: Any, code_of: Any, code: Any
) -> None:
    dataset = make(version="v2.1")
    times = shifted(np.arange(6) / 30, "tolerance").astype(np.float32)
    rewrite(dataset.episodes[0].data, timestamp=times)
    again = open_dataset(dataset.path)
    assert [code(0, f) for f in range(6)] == [code_of(p) for p in again.images(0, range(6), FRONT)]


def test_b55_task_index_without_a_text_is_refused(make: Make, rewrite: Any) -> None:
    dataset = make(version="v2.1")
    path = dataset.episodes[0].data
    rewrite(path, task_index=[0, 0, 0, 0, 0, 9])
    refuse(lambda: open_dataset(dataset.path).frame_table(0), path, episode=0)


@pytest.mark.parametrize("text", [b'""', b'"  "', b"null", b'"a\\u0000b"', b'"\xff"'])
def test_b55_unusable_task_text_is_refused(make: Make, text: bytes) -> None:
    dataset = make([3], version="v2.1")
    path = dataset.path / "meta" / "tasks.jsonl"
    path.write_bytes(b'{"task_index": 0, "task": ' + text + b"}")
    refuse(lambda: open_dataset(dataset.path), path)


def test_b55_v30_task_text_that_is_not_utf8_is_refused(make: Make) -> None:
    dataset = make([3])
    path = dataset.path / "meta" / "tasks.parquet"
    texts = pa.array([b"\xff\xfe"]).view(pa.string())
    pq.write_table(pa.table({"task_index": [0], "task": texts}), path)
    refuse(lambda: open_dataset(dataset.path), path)


def test_b56_change_on_disk_is_noticed(make: Make) -> None:
    dataset = make(version="v2.1")
    digest = dataset.digest
    dataset.verify()
    path = dataset.episodes[1].data
    content = path.read_bytes()
    path.write_bytes(content)  # touched, but equal
    dataset.verify()
    path.write_bytes(content[:-1] + b"x")
    refuse(dataset.verify, path)
    path.write_bytes(content)
    extra = dataset.path / "data" / "extra.parquet"
    extra.touch()
    refuse(dataset.verify, extra)
    extra.unlink()
    dataset.verify()
    assert digest == open_dataset(dataset.path).digest
    path.unlink()
    refuse(dataset.verify, path)


def test_digest_depends_on_names_and_content_alone(make: Make) -> None:
    one, two, other = make([3, 4]), make([3, 4]), make([4, 3])
    assert one.digest == two.digest
    assert one.digest != other.digest


def test_pf45_one_truncated_file_and_explicit_consent(make: Make) -> None:
    dataset = make([4] * 20, version="v2.1")
    path = dataset.episodes[19].data
    path.write_bytes(path.read_bytes()[:30])
    refuse(lambda: demonstrations(dataset), path)
    named = demonstrations(dataset, episodes=range(19))
    skipped = demonstrations(dataset, on_bad_row="skip")
    assert (named.num_samples, skipped.num_samples) == (76, 76)
    assert str(path) in skipped.skipped.episodes[19]
