"""The built-in push task."""

from __future__ import annotations

import numpy as np
import pytest

from vla_platform.envs.tabletop import COLORS
from vla_platform.envs.tabletop_push import TabletopPush
from vla_platform.errors import ConfigurationError


def test_the_expert_solves_every_scene() -> None:
    env = TabletopPush(render=False)
    lengths = []
    for seed in range(300):
        env.reset(seed)
        step = env.step(env.expert_action())
        count = 1
        while not step.done:
            step = env.step(env.expert_action())
            count += 1
        assert step.terminated, seed
        lengths.append(count)
    assert 8 < np.mean(lengths) < 25


def test_going_straight_for_the_ring_is_no_solution() -> None:
    env = TabletopPush(render=False)
    solved = 0
    for seed in range(50):
        env.reset(seed)
        step = env.step(np.zeros(2, np.float32))
        while not step.done:
            way = env._goal - env._gripper
            step = env.step(np.clip(way / 0.06, -1, 1).astype(np.float32))
        solved += step.terminated
    assert solved < 10


def test_rewards_add_up_to_the_way_the_block_came() -> None:
    env = TabletopPush(render=False)
    env.reset(1)
    before = env._distance()
    total = 0.0
    step = env.step(env.expert_action())
    total += step.reward
    while not step.done:
        step = env.step(env.expert_action())
        total += step.reward
    np.testing.assert_allclose(total, before - env._distance() + 1.0)


def test_pictures_show_block_and_ring() -> None:
    env = TabletopPush()
    for seed in range(10):
        seen = env.reset(seed)
        color = next(name for name in COLORS if name in seen.task)
        rows, columns = np.nonzero((seen.images["top"] == COLORS[color]).all(axis=2))
        place = np.array([columns.mean() + 0.5, rows.mean() + 0.5]) / 128
        np.testing.assert_allclose(place, env._block, atol=0.03)
        rows, columns = np.nonzero((seen.images["top"] == 250).all(axis=2))
        place = np.array([columns.mean() + 0.5, rows.mean() + 0.5]) / 128
        np.testing.assert_allclose(place, env._goal, atol=0.03)


def test_truncation_and_refusals() -> None:
    env = TabletopPush(max_steps=2, render=False)
    env.reset(0)
    steps = [env.step(np.zeros(2, np.float32)) for _ in range(2)]
    assert [step.truncated for step in steps] == [False, True]
    with pytest.raises(ConfigurationError, match="cameras"):
        TabletopPush(cameras=())
    with pytest.raises(ConfigurationError, match="init_state"):
        env.reset(0, {"init_state": 3})
    with pytest.raises(ConfigurationError, match="unknown"):
        env.reset(0, {"speed": 3})
