"""Training rows from demonstrations."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.waiting import nothing_is_read_ahead, wait_until
from vla_platform.datasets import Batch, Demonstrations, LeRobotDataset, open_dataset
from vla_platform.datasets.prompts import decode_prompts
from vla_platform.errors import DataError, DatasetError

Make = Callable[..., LeRobotDataset]
CAMERAS = ("observation.images.side", "observation.images.front")
LENGTHS = (6, 5, 9, 1)


def demonstrations(dataset: LeRobotDataset, **options: Any) -> Demonstrations:
    arguments: dict[str, Any] = {
        "cameras": CAMERAS,
        "state_key": "observation.state",
        "action_key": "action",
        "chunk": 4,
        "image_size": 32,
        "episodes": range(len(dataset.episodes)),
        "seed": 0,
    }
    return Demonstrations(dataset, **{**arguments, **options})


def assert_equal(one: Batch, two: Batch) -> None:
    assert one.columns.keys() == two.columns.keys()
    for name, column in one.columns.items():
        np.testing.assert_array_equal(column, two.columns[name])
        assert column.dtype == two.columns[name].dtype


def fingerprint(batch: Batch) -> str:
    total = hashlib.sha256()
    for name in sorted(batch.columns):
        total.update(name.encode() + batch.columns[name].tobytes())
    return total.hexdigest()


def poison(dataset: LeRobotDataset, rewrite: Any, episode: int, frame: int, column: str) -> None:
    table = dataset.frame_table(episode)
    values = table[column].copy()
    values[frame, -1] = np.inf if column == "action" else np.nan
    rewrite(dataset.episodes[episode].data, **{column: list(values)})
    dataset.close()


def test_columns_shapes_and_types(make: Make) -> None:
    with demonstrations(make(LENGTHS)) as rows:
        batch = rows.batch(0, 5)
    described = {name: (str(c.dtype), c.shape) for name, c in batch.columns.items()}
    assert described == {
        "images": ("uint8", (5, 2, 32, 32, 3)),
        "state": ("float32", (5, 3)),
        "actions": ("float32", (5, 4, 2)),
        "actions_is_pad": ("bool", (5, 4)),
        "frame_digest": ("uint8", (5, 2, 16)),
        "episode": ("int64", (5,)),
        "frame": ("int64", (5,)),
        "prompt": ("uint8", (5, 12)),
    }
    assert len(batch) == 5


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(episodes=st.permutations(range(4)), size=st.integers(1, 4), chunk=st.integers(1, 12))
def test_pf42_b51_subsets_and_windows_equal_brute_force(
    make: Make, code_of: Any, code: Any, version: str, episodes: list[int], size: int, chunk: int
) -> None:
    dataset = make(LENGTHS, version=version)
    chosen = episodes[:size]
    with demonstrations(dataset, episodes=chosen, chunk=chunk) as rows:
        expected = {(e, f) for e in chosen for f in range(LENGTHS[e])}
        assert len(expected) == rows.num_samples
        batch = rows.batch(0, rows.num_samples)
    columns = batch.columns
    places = list(zip(columns["episode"].tolist(), columns["frame"].tolist(), strict=True))
    assert expected == set(places)
    for row, (episode, frame) in enumerate(places):
        for step in range(chunk):
            real = min(frame + step, LENGTHS[episode] - 1)
            assert [100 * episode + real, -real] == columns["actions"][row, step].tolist()
            assert (frame + step >= LENGTHS[episode]) == columns["actions_is_pad"][row, step]
        assert [episode, frame, 0.5] == columns["state"][row].tolist()
        assert code(episode, frame, 1) == code_of(columns["images"][row, 0])
        assert code(episode, frame, 0) == code_of(columns["images"][row, 1])
    tasks = ("lift the cup", "open the box")
    assert [tasks[episode % 2] for episode, _ in places] == decode_prompts(columns["prompt"])


def test_b49_episode_shorter_than_the_chunk_is_padded(make: Make) -> None:
    with demonstrations(make([1]), chunk=8) as rows:
        batch = rows.batch(0, 3)
    assert batch.columns["actions_is_pad"].tolist() == [[False] + [True] * 7] * 3
    np.testing.assert_array_equal(batch.columns["actions"], np.zeros((3, 8, 2), np.float32))


def test_pf22_resumed_batches_equal_undisturbed_ones_byte_for_byte(make: Make) -> None:
    dataset = make([6, 5, 7])
    with demonstrations(dataset) as whole, demonstrations(dataset) as resumed:
        batches = [whole.batch(start, 4) for start in range(0, 40, 4)]
        for number in (5, 6, 9):  # crosses into the second and third epoch
            assert_equal(batches[number], resumed.batch(4 * number, 4))


def test_batches_are_equal_in_another_process(make: Make) -> None:
    dataset = make([6, 5])
    script = f"""
import hashlib
from pathlib import Path
from vla_platform.datasets import Demonstrations, open_dataset
rows = Demonstrations(open_dataset(Path({str(dataset.path)!r})), cameras={CAMERAS!r},
    state_key="observation.state", action_key="action", chunk=4, image_size=32,
    episodes=[0, 1], seed=0)
batch = rows.batch(7, 6)
total = hashlib.sha256()
for name in sorted(batch.columns):
    total.update(name.encode() + batch.columns[name].tobytes())
print(total.hexdigest())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    with demonstrations(dataset) as rows:
        assert run.stdout.strip() == fingerprint(rows.batch(7, 6))


@pytest.mark.parametrize("frames_kept", [0, 3, 1000])
def test_rows_do_not_depend_on_the_cache(make: Make, frames_kept: int) -> None:
    dataset = make(LENGTHS)
    frame_bytes = 3 * 32 * 32 + 16
    with (
        demonstrations(dataset) as plain,
        demonstrations(dataset, cache_bytes=frames_kept * frame_bytes) as bounded,
    ):
        for start in range(0, 42, 6):
            assert_equal(plain.batch(start, 6), bounded.batch(start, 6))
        assert bounded.frames.size_bytes <= frames_kept * frame_bytes


def test_frames_are_decoded_once_and_read_ahead(make: Make) -> None:
    with demonstrations(make(LENGTHS)) as rows:
        rows.batch(0, 1)
        wait_until(nothing_is_read_ahead)
        decoded = rows.frames.num_decoded
        for start in range(0, 63, 7):
            rows.batch(start, 7)
        assert decoded == rows.frames.num_decoded
        assert 42 <= decoded <= 44  # 21 frames of 2 cameras; the first batch may race


def test_equal_pixels_have_equal_digests_and_others_differ(make: Make) -> None:
    with demonstrations(make(LENGTHS)) as rows:
        batch = rows.batch(0, 21)
    images, digests = batch.columns["images"], batch.columns["frame_digest"]
    flat = images.reshape(42, -1)
    for row, digest in zip(flat, digests.reshape(42, 16), strict=True):
        assert hashlib.blake2b(row.tobytes(), digest_size=16).digest() == digest.tobytes()
    assert len({row.tobytes() for row in flat}) == len(
        {d.tobytes() for d in digests.reshape(42, 16)}
    )


def test_evenly_spaced_rows_are_distinct_spread_and_repeatable(make: Make) -> None:
    with demonstrations(make([10, 10])) as rows:
        batch = rows.evenly_spaced(4)
        assert_equal(batch, rows.evenly_spaced(4))
        places = list(zip(batch.columns["episode"], batch.columns["frame"], strict=True))
        assert places == [(0, 2), (0, 7), (1, 2), (1, 7)]
        assert len(rows.evenly_spaced(500)) == 20


def test_without_a_state_key_there_is_no_state_column(make: Make) -> None:
    with demonstrations(make(), state_key=None) as rows:
        assert "state" not in rows.batch(0, 2).columns
        assert list(rows.statistics()) == ["action"]


@pytest.mark.parametrize("column", ["action", "observation.state"])
def test_b35_number_that_is_not_finite_fails_with_its_place(
    make: Make, rewrite: Any, column: str
) -> None:
    dataset = make(version="v2.1")
    poison(dataset, rewrite, 1, 3, column)
    with pytest.raises(DataError) as caught:
        demonstrations(open_dataset(dataset.path))
    assert caught.value.details == {"episode": 1, "frame": 3, "column": column}


def test_b35_bad_rows_are_left_out_and_counted_on_request(make: Make, rewrite: Any) -> None:
    dataset = make([6, 5], version="v2.1")
    poison(dataset, rewrite, 1, 3, "action")
    again = open_dataset(dataset.path)
    with demonstrations(again, on_bad_row="skip", chunk=2) as rows:
        batch = rows.batch(0, rows.num_samples)
        assert (rows.skipped.num_rows, rows.skipped.num_samples) == (1, 2)
        assert rows.num_samples == 9
        assert np.isfinite(batch.columns["actions"]).all()
        places = set(zip(batch.columns["episode"], batch.columns["frame"], strict=True))
        assert {(1, 0), (1, 1), (1, 4)} == {place for place in places if place[0] == 1}
        assert rows.statistics()["action"].count == 10


def test_all_rows_bad_is_an_error_even_when_skipping(make: Make, rewrite: Any) -> None:
    dataset = make([2], version="v2.1")
    rewrite(dataset.episodes[0].data, action=[[np.nan, 0.0]] * 2)
    with pytest.raises(DatasetError, match="no usable sample"):
        demonstrations(dataset, on_bad_row="skip")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"cameras": ["action"]}, "no camera"),
        ({"cameras": ["observation.images.top"]}, "no feature"),
        ({"action_key": "observation.images.side"}, "row of numbers"),
        ({"state_key": "observation.pose"}, "no feature"),
        ({"episodes": [0, 9]}, "no episode 9"),
        ({"episodes": [0, 0]}, "twice"),
    ],
)
def test_names_that_do_not_fit_are_refused(make: Make, options: Any, problem: str) -> None:
    with pytest.raises(DatasetError, match=problem):
        demonstrations(make(), **options)


def test_statistics_equal_the_datasets_own(make: Make) -> None:
    dataset = make(LENGTHS)
    with demonstrations(dataset, episodes=[0, 2]) as rows:
        found = rows.statistics()
    assert dataset.statistics("action", [0, 2]).to_dict() == found["action"].to_dict()
    assert dataset.statistics("observation.state", [0, 2]).to_dict() == found["state"].to_dict()


def test_the_real_g1_recording_is_fast_once_frames_are_kept(g1: LeRobotDataset) -> None:
    with demonstrations(g1, cameras=g1.cameras, chunk=8, image_size=128, episodes=[1]) as rows:
        rows.batch(0, 8)
        wait_until(nothing_is_read_ahead)
        started = time.process_time()
        for start in range(0, 800, 8):
            rows.batch(start, 8)
        assert 800 / (time.process_time() - started) > 100
        held_out = rows.evenly_spaced(16)
    assert held_out.columns["images"].shape == (16, 1, 128, 128, 3)
    assert set(decode_prompts(held_out.columns["prompt"])) == {
        "Pick up the yellow bottle on the table."
    }
