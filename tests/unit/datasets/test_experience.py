"""Recorded episodes as rows of a rollout: each reward once, nothing from the next episode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.datasets.conftest import CAMERAS, FEATURES, FPS, code, code_of, make_episodes
from vla_platform.datasets.demonstrations import Demonstrations
from vla_platform.datasets.experience import Experience
from vla_platform.datasets.lerobot import open_dataset
from vla_platform.datasets.metadata import Feature
from vla_platform.datasets.writer import EpisodeData, write_dataset
from vla_platform.errors import DataError, DatasetError
from vla_platform.rl.advantages import Rows, discounted_returns

CHUNK = 4
LENGTHS = (7, 3, 4)


def record(
    path: Path, rewards: Sequence[Sequence[float]], successes: Sequence[bool] = (True, False, True)
) -> Path:
    episodes = []
    for made, earned, success in zip(make_episodes(LENGTHS), rewards, successes, strict=True):
        columns = dict(made.columns)
        columns["next.reward"] = np.array(earned, np.float32)[:, None]
        columns["next.success"] = np.zeros((len(earned), 1), np.bool_)
        columns["next.success"][-1] = success
        episodes.append(EpisodeData(columns, made.images, made.task))
    features = {
        **FEATURES, "next.reward": Feature("float32", (1,)), "next.success": Feature("bool", (1,)),
    }  # fmt: skip
    write_dataset(path, episodes, fps=FPS, features=features, robot_type="test")
    return path


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return record(tmp_path / "d", [np.arange(7) + 1.0, [10, 20, 30], [0, 0, 0, 5]])


def experience(path: Path, *, stride: int = CHUNK, **changes: Any) -> Experience:
    dataset = open_dataset(path)
    keys = {"reward_key": "next.reward", "success_key": "next.success", **changes}
    rows = Demonstrations(
        dataset, cameras=CAMERAS[:1], state_key="observation.state", action_key="action",
        chunk=CHUNK, image_size=64, episodes=(0, 1, 2), seed=0,
        on_bad_row=keys.get("on_bad_row", "fail"),
    )  # fmt: skip
    return Experience(dataset, rows, stride=stride, **keys)


def test_rows_are_those_of_a_rollout(recorded: Path) -> None:
    found = experience(recorded).columns([2, 0], first=5)
    # Episode 2: one decision and its end; episode 0: decisions at frames 0 and 4, and its end.
    assert list(found["is_transition"]) == [True, False, True, True, False]
    assert list(found["next_row"]) == [1, -1, 3, 4, -1]
    assert list(found["episode"]) == [5, 5, 6, 6, 6]
    assert list(found["frame"]) == [0, 3, 0, 4, 6]
    assert [code_of(row[0]) for row in found["images"]] == [
        code(2, 0), code(2, 3), code(0, 0), code(0, 4), code(0, 6),
    ]  # fmt: skip
    np.testing.assert_array_equal(
        found["rewards"],
        [[0, 0, 0, 5], [0] * 4, [1, 2, 3, 4], [5, 6, 7, 0], [0] * 4],
    )
    np.testing.assert_array_equal(found["actions_is_pad"][3], [False, False, False, True])
    assert found["actions_is_pad"][[1, 4]].all()
    assert list(found["terminated"]) == [True, False, False, True, False]
    assert not found["truncated"].any()


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_every_reward_counts_once_whatever_the_stride(recorded: Path, stride: int) -> None:
    found = experience(recorded, stride=stride).columns([0, 1, 2])
    rows = Rows.of(found)
    returns = discounted_returns(rows, gamma=1.0)
    first = [int(np.flatnonzero(found["episode"] == at)[0]) for at in range(3)]
    assert list(returns[first]) == [28, 60, 5]
    assert not rows.valid[~found["is_transition"]].any()


def test_without_rewards_the_last_action_of_a_success_earns_one(recorded: Path) -> None:
    one = experience(recorded, reward_key=None)
    found = one.columns([0, 1])
    assert found["rewards"].sum() == 1.0
    assert found["rewards"][1, 2] == 1.0
    assert list(found["truncated"]) == [False, False, False, True, False]
    assert [one.outcome(at).success for at in range(3)] == [True, False, True]


def test_without_flags_what_earned_something_succeeded(tmp_path: Path) -> None:
    path = record(tmp_path / "d", [[0.0] * 7, [1, 0, 0], [-1, 0, 0, 0]])
    one = experience(path, success_key=None)
    assert [one.outcome(at).success for at in range(3)] == [False, True, False]


def test_an_episode_with_a_bad_number_fails_or_is_left_out_whole_b35_b39(tmp_path: Path) -> None:
    path = record(tmp_path / "d", [[0, 1, np.nan, 3, 4, 5, 6], [1, 2, 3], [0, 0, 0, np.nan]])
    with pytest.raises(DataError, match="episode 0, frame 2"):
        experience(path)
    one = experience(path, on_bad_row="skip")
    assert (one.episodes, sorted(one.skipped)) == ((1,), [0, 2])


def test_columns_that_are_no_reward_are_refused(recorded: Path) -> None:
    with pytest.raises(DatasetError, match="one number per frame"):
        experience(recorded, reward_key="action")
    with pytest.raises(DatasetError, match="no feature"):
        experience(recorded, success_key="next.done")
