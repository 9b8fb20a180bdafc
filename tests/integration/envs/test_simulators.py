"""Real ManiSkill and real LIBERO, each in its own Python environment.

The environments are made where they are missing (about two minutes) and kept for later runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_platform.datasets import Demonstrations, open_dataset

pytestmark = pytest.mark.timeout(1800)  # the first one installs


@pytest.fixture(scope="module")
def maniskill(play_in: Callable[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = play_in("maniskill", "maniskill_script.py")
    return found


@pytest.fixture(scope="module")
def libero(play_in: Callable[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = play_in("libero", "libero_script.py")
    return found


def test_maniskill_experts_solve_their_tasks(maniskill: dict[str, Any]) -> None:
    assert maniskill["push"] == [True] * 20
    assert maniskill["pick"] == [True] * 20
    assert maniskill["state_dim"] == 35


def test_pf41_maniskill_episodes_repeat_and_differ(maniskill: dict[str, Any]) -> None:
    assert maniskill["deterministic"]
    assert maniskill["starts"] == 20


def test_maniskill_time_limit_rewards_and_refusals(maniskill: dict[str, Any]) -> None:
    assert maniskill["truncates"] == [[False, True, 50]]
    assert maniskill["sparse_rewards"] == [0.0, 0.0]
    assert maniskill["no_dense_reward"] in ("raised", "not_built")
    assert maniskill["other_simulator"] == "this process serves maniskill; gymnasium needs another"


def test_maniskill_pictures_come_with_the_robots_state_or_the_tasks(
    maniskill: dict[str, Any],
) -> None:
    assert maniskill["observations"] == {
        "state_names": True,
        "equal_states": True,
        "equal_pictures": True,
        "state_dims": [35, 35, 16],
        "cameras": [[], ["base_camera"], ["base_camera"]],
    }


def test_a_maniskill_rollout_with_pictures(maniskill: dict[str, Any]) -> None:
    found = maniskill["rollout"]
    assert (found["transitions"], found["success_rate"]) == (24, 1.0)
    assert found["images"][1:] == [1, 64, 64, 3]
    assert found["pictures"] > 20
    assert 20 < found["brightness"] < 235 and found["spread"] > 20


def test_pf39_libero_initial_states_are_read_safely(libero: dict[str, Any]) -> None:
    assert (libero["init_states"], libero["starts"]) == (50, 5)
    assert libero["task"] == "pick up the alphabet soup and place it in the basket"


def test_libero_pictures_are_upright_and_of_their_own_scene(libero: dict[str, Any]) -> None:
    assert abs(libero["upright"]) > 5
    assert libero["deterministic"]
    assert libero["beside_another_in_its_thread"]
    assert libero["in_another_thread"]


def test_pf34_a_libero_evaluation(libero: dict[str, Any]) -> None:
    assert libero["evaluation"] == {"success_rate": 1.0, "init_states": [0, 1]}


def run_vla(repository: Path, *arguments: str) -> str:
    done = subprocess.run(
        (sys.executable, "-m", "vla_platform.cli.main", *arguments),
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("env_id", ["maniskill/PushCube-v1", "tabletop/push"])
def test_demonstrations_train_as_they_are(
    env_id: str, repository: Path, tmp_path: Path, python_of: Callable[[str], Path]
) -> None:
    if env_id.startswith("maniskill"):
        python_of("maniskill")
    options = json.dumps({"image_size": 64})
    run_vla(repository, "demos", env_id, "--episodes", "2", "--out", str(tmp_path / "d"),
            "--options", options)  # fmt: skip
    dataset = open_dataset(tmp_path / "d")
    cameras = sorted(name for name, feature in dataset.features.items() if feature.is_image)
    with Demonstrations(
        dataset, cameras=cameras, state_key="observation.state", action_key="action", chunk=4,
        image_size=64, episodes=[0, 1], seed=0,
    ) as data:  # fmt: skip
        rows = data.batch(0, 4).columns
    assert np.isfinite(rows["actions"]).all()
    assert (4, len(cameras), 64, 64, 3) == rows["images"].shape


def test_the_motion_planner_makes_demonstrations(
    repository: Path, tmp_path: Path, python_of: Callable[[str], Path]
) -> None:
    python_of("maniskill")
    options = json.dumps({"observations": "state"})
    run_vla(repository, "demos", "maniskill/PickCube-v1", "--episodes", "2", "--planner",
            "--out", str(tmp_path / "d"), "--options", options)  # fmt: skip
    dataset = open_dataset(tmp_path / "d")
    assert len(dataset.episodes) == 2
    assert dataset.feature("action").shape == (8,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "options", "count", "starts"),
    [
        ("tabletop/reach", {}, 500, 500),
        ("maniskill/PushCube-v1", {"image_size": 64}, 500, 500),
        # Its scene and its renderer are made anew at every reset.
        ("maniskill/PushCube-v1", {"image_size": 64, "repeatable": True}, 500, 500),
        ("libero/libero_object/0", {"cameras": ["agentview"]}, 100, 50),  # 2 s each
    ],
)
def test_pf40_rendered_resets_do_not_leak(
    play_in: Callable[..., Any], env_id: str, options: dict[str, Any], count: int, starts: int
) -> None:
    """PF-40: every start has its own picture, and the host's memory stays where it was."""
    harness = env_id.partition("/")[0]
    found = play_in(
        harness, "resets_script.py", env_id, json.dumps(options), str(count), timeout_s=1700
    )
    assert found["pictures"] >= starts
    settled = found["sizes"][len(found["sizes"]) // 5 :]
    assert max(settled) - settled[0] < 64 << 20, found["sizes"]
