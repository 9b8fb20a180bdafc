"""Offline positions: pure functions of seed and number, every source by its share."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.unit.datasets.test_experience import LENGTHS, experience, record
from vla_platform.control.offline import OfflineData, joined
from vla_platform.rl.advantages import Rows
from vla_platform.specs import DatasetSpec, OfflineSpec, SourceSpec

REWARDS = [[1.0] * length for length in LENGTHS]


def data(tmp_path: Path, *shares: float, episodes: int, seed: int = 0) -> OfflineData:
    sources = []
    for number in range(len(shares)):
        path = tmp_path / f"d{number}"
        sources.append(experience(path if path.exists() else record(path, REWARDS)))
    spec = OfflineSpec(
        sources=tuple(
            SourceSpec(dataset=DatasetSpec(path="d"), success="s", share=one) for one in shares
        ),
        episodes_per_update=episodes,
    )
    return OfflineData(spec, seed, sources)


def test_positions_are_the_same_in_any_process_and_differ_by_seed(tmp_path: Path) -> None:
    one, again = data(tmp_path, 1, 1, episodes=4), data(tmp_path, 1, 1, episodes=4)
    other = data(tmp_path, 1, 1, episodes=4, seed=1)
    first = [one.chosen(position) for position in range(9)]
    assert first == [again.chosen(position) for position in range(9)]
    assert first[5] == again.chosen(5)
    assert first != [other.chosen(position) for position in range(9)]
    told, rows = one.batch(3)
    same_told, same = again.batch(3)
    assert told == same_told
    for name, column in rows.items():
        np.testing.assert_array_equal(column, same[name])


def test_every_episode_comes_once_before_any_comes_twice(tmp_path: Path) -> None:
    one = data(tmp_path, 1, episodes=2)
    seen = Counter(episode for position in range(3) for episode in one.chosen(position)[0])
    assert seen == {0: 2, 1: 2, 2: 2}


def test_sources_give_their_shares_and_their_rows_stay_apart(tmp_path: Path) -> None:
    one = data(tmp_path, 3, 1, episodes=4)
    assert [len(part) for part in one.chosen(0)] == [3, 1]
    told, rows = one.batch(0)
    assert sorted(set(rows["episode"].tolist())) == [0, 1, 2, 3]
    Rows.of(rows)  # every decision has a next row
    for row in np.flatnonzero(rows["is_transition"]):
        assert rows["episode"][rows["next_row"][row]] == rows["episode"][row]
    lengths = [LENGTHS[episode] for part in one.chosen(0) for episode in part]
    assert rows["rewards"].sum() == sum(lengths)
    assert told["sample_count"] == rows["is_transition"].sum()
    assert told["success_rate"] == pytest.approx(
        np.mean([(True, False, True)[ep] for part in one.chosen(0) for ep in part])
    )


def test_texts_are_padded_to_the_longest() -> None:
    parts = [
        {"prompt": np.ones((2, width), np.uint8), "next_row": np.array([1, -1])} for width in (3, 5)
    ]
    found = joined(parts)
    assert found["prompt"].shape == (4, 5)
    assert found["prompt"][0].tolist() == [1, 1, 1, 0, 0]
    assert found["next_row"].tolist() == [1, -1, 3, -1]
