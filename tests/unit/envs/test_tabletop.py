"""The built-in tabletop task."""

from __future__ import annotations

import time

import numpy as np
import pytest

from vla_platform.envs.tabletop import COLORS, REACH, Tabletop
from vla_platform.errors import ConfigurationError, DataError


def run_expert(env: Tabletop, seed: int) -> tuple[bool, int]:
    env.reset(seed)
    for count in range(1, env.info.max_steps + 1):
        step = env.step(env.expert_action())
        if step.done:
            return step.terminated, count
    raise AssertionError("an episode ends at max_steps")


@pytest.mark.parametrize("gripper", [True, False])
def test_expert_solves_every_scene(gripper: bool) -> None:
    env = Tabletop(gripper=gripper, render=False)
    outcomes = [run_expert(env, seed) for seed in range(200)]
    assert [success for success, _ in outcomes] == [True] * 200
    assert 5 <= np.mean([count for _, count in outcomes]) <= 25


def test_equal_seeds_give_equal_episodes_in_pixels() -> None:
    one, two = Tabletop(), Tabletop()
    first, second = one.reset(7), two.reset(7)
    for _ in range(5):
        assert first.task == second.task
        np.testing.assert_array_equal(first.state, second.state)
        for camera in ("top", "wrist"):
            np.testing.assert_array_equal(first.images[camera], second.images[camera])
        first, second = (env.step(env.expert_action()).observation for env in (one, two))
    assert one.reset(8).images["top"].tobytes() != one.reset(9).images["top"].tobytes()


def test_the_named_block_is_where_the_top_view_shows_its_color() -> None:
    env = Tabletop(gripper=False, cameras=("top",))
    for seed in range(20):
        observation = env.reset(seed)
        color = next(name for name in COLORS if name in observation.task)
        target = env.scene.blocks[env.scene.target]
        assert color == target.color
        rows, columns = np.nonzero((observation.images["top"] == COLORS[color]).all(axis=2))
        seen = np.array([columns.mean() + 0.5, rows.mean() + 0.5]) / 128
        np.testing.assert_allclose(seen, target.center, atol=0.03)


def test_the_wrist_view_follows_the_gripper() -> None:
    env = Tabletop()
    env.reset(3)
    step = env.step(env.expert_action())
    while not step.done:
        step = env.step(env.expert_action())
    # At success the target lies under the gripper, in the middle of the wrist view.
    patch = step.observation.images["wrist"][60:68, 63:65]
    target = env.scene.blocks[env.scene.target].color
    np.testing.assert_array_equal(patch, np.broadcast_to(COLORS[target], patch.shape))


def test_time_limit_truncates_and_does_not_terminate() -> None:
    env = Tabletop(max_steps=3, render=False)
    env.reset(0)
    still = np.array([0, 0, -1], np.float32)
    steps = [env.step(still) for _ in range(3)]
    assert [(step.terminated, step.truncated) for step in steps] == [
        (False, False),
        (False, False),
        (False, True),
    ]
    with pytest.raises(ConfigurationError, match="reset"):
        env.step(still)


def test_reaching_alone_is_no_success_with_a_gripper() -> None:
    env = Tabletop(render=False)
    env.reset(1)
    open_hand = np.array([1, 1, 0], np.float32)
    for _ in range(40):
        step = env.step(np.append(env.expert_action()[:2], np.float32(-1)))
    target = env.scene.blocks[env.scene.target].center
    assert np.linalg.norm(step.observation.state[:2] - target) <= REACH
    assert not step.terminated
    assert not (env.step(open_hand * 0).terminated)


def test_b36_non_finite_action_is_refused_and_not_executed() -> None:
    env = Tabletop(render=False)
    before = env.reset(0).state
    with pytest.raises(DataError, match="not finite") as caught:
        env.step(np.array([np.nan, 0, 0], np.float32))
    assert caught.value.details == {"frame": 0, "column": "action"}
    still = env.step(np.zeros(3, np.float32))
    np.testing.assert_array_equal(before, still.observation.state)


def test_b37_action_outside_the_bounds_is_clipped_and_the_executed_one_returned() -> None:
    env = Tabletop(render=False)
    env.reset(0)
    step = env.step(np.array([1e6, 0.5, -1.0001], np.float32))
    assert step.info["clipped"] is True
    np.testing.assert_array_equal(np.array([1, 0.5, -1], np.float32), step.action)


@pytest.mark.parametrize(
    "action",
    [np.zeros(3), np.zeros(3, np.float16), np.zeros((3, 1), np.float32), np.zeros(4, np.float32)],
)
def test_b38_other_shapes_and_dtypes_are_refused(action: np.ndarray) -> None:
    env = Tabletop(render=False)
    env.reset(0)
    with pytest.raises(DataError):
        env.step(action)


@pytest.mark.parametrize("cameras", [(), ("front",), ("top", "top")])
def test_unknown_cameras_are_refused(cameras: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="cameras"):
        Tabletop(cameras=cameras)


def test_other_variant_has_one_camera_and_two_dimensions() -> None:
    env = Tabletop(cameras=("top",), gripper=False, sentences=("go to the {color} block",))
    observation = env.reset(5)
    assert list(observation.images) == ["top"]
    assert observation.state.shape == (2,)
    assert observation.task.startswith("go to the ")
    assert env.info.action_names == ("dx", "dy")


def test_steps_without_rendering_are_cheap() -> None:
    env = Tabletop(render=False)
    started = time.process_time()
    num_steps = sum(run_expert(env, seed)[1] for seed in range(60))
    assert num_steps / (time.process_time() - started) > 1000


def test_a_larger_reach_radius_ends_an_episode_earlier() -> None:
    steps = {
        radius: run_expert(Tabletop(gripper=False, render=False, reach_radius=radius), 3)[1]
        for radius in (REACH, 0.06, 0.2)
    }
    assert sorted(steps.values(), reverse=True) == list(steps.values())
    assert steps[REACH] > steps[0.2]
    env = Tabletop(gripper=False, render=False, reach_radius=0.06)
    env.reset(3)
    while not (step := env.step(env.expert_action())).done:
        target = np.array(env.scene.blocks[env.scene.target].center)
        assert np.linalg.norm(step.observation.state - target) > 0.06
    assert step.terminated
