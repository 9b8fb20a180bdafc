"""What a rollout's actions were worth, from its columns."""

from __future__ import annotations

import numpy as np

from vla_platform.control.advantages import episodes_of, judge_rollout
from vla_platform.specs import RLSpec, parse_spec


def test_awr_with_a_value_head_counts_on_what_was_cut_off() -> None:
    """Two episodes of one step and reward 1: one ended, the other was cut off where 10 more were
    expected."""
    spec = parse_spec({
        "kind": "rl", "policy": "p", "init_from": "p/x/1", "updates": 1,
        "environment": {"id": "tabletop/reach"}, "rollout": {"num_envs": 2},
        "algorithm": {"kind": "awr", "baseline": "value", "gamma": 0.5,
                      "normalize_advantages": False},
    })  # fmt: skip
    assert isinstance(spec, RLSpec)
    columns = {
        "rewards": np.array([[1.0], [0.0], [1.0], [0.0]]),
        "actions_is_pad": np.array([[False], [True], [False], [True]]),
        "executed_actions": np.zeros((4, 1, 1), np.float32),
        "is_transition": np.array([True, False, True, False]),
        "next_row": np.array([1, -1, 3, -1]),
        "terminated": np.array([True, False, False, False]),
        "episode": np.array([0, 0, 1, 1]),
        "actor_value": np.array([2.0, 10.0, 2.0, 10.0], np.float32),
    }
    judged = judge_rollout(spec, columns, episodes_of({"episodes": "[]"}, columns))
    np.testing.assert_allclose(judged.columns["returns"], [1.0, 0.0, 6.0, 0.0])
    np.testing.assert_allclose(judged.columns["advantages"][[0, 2], 0], [-1.0, 4.0])
