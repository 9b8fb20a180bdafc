"""Advantage-weighted regression: by hand, resumed, and against imitation of mixed episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.gpu_workers.test_policy_gradient import (
    ACTION_DIM,
    CHUNK,
    FEATURE_DIM,
    MODULES,
    STATE_DIM,
    feature_of,
    slot_of,
)
from vla_platform.envs.tabletop import Tabletop
from vla_platform.errors import DataError
from vla_platform.gpu_workers.algorithms.awr import WeightedSamples, awr_loss
from vla_platform.gpu_workers.algorithms.sft import Samples
from vla_platform.gpu_workers.backbone import FeatureKind
from vla_platform.gpu_workers.features import VLAFeature
from vla_platform.gpu_workers.rollout_samples import weighted_samples
from vla_platform.gpu_workers.slot_state import SlotState
from vla_platform.gpu_workers.slots import Slot
from vla_platform.rl.advantages import Rows, discounted_returns, normalized
from vla_platform.specs import AWRSpec

IMITATION = AWRSpec(baseline="mean", temperature=1e6, epochs=1, minibatches=1)
"""Every weight is 1."""


def samples_for(slot: Slot, rows: int = 12, *, seed: int = 0) -> WeightedSamples:
    draws = torch.Generator().manual_seed(seed)
    valid = torch.rand(rows, CHUNK, generator=draws) > 0.3
    return WeightedSamples(
        samples=Samples(
            feature=feature_of(slot.module, rows, seed),
            state=torch.randn(rows, STATE_DIM, generator=draws),
            actions=torch.rand(rows, CHUNK, ACTION_DIM, generator=draws),
            valid=valid,
        ),
        advantages=2 * torch.randn(rows, generator=draws),
        returns=torch.randn(rows, generator=draws),
    )


@torch.no_grad()
@pytest.mark.parametrize("max_weight", [1.5, 20.0])
def test_the_loss_equals_a_slow_reference(max_weight: float) -> None:
    algorithm = AWRSpec(temperature=0.7, max_weight=max_weight, value_weight=0.25)
    slot = slot_of(MODULES[0], algorithm)
    given, module = samples_for(slot), slot.module.eval()
    found = awr_loss(module, given, algorithm)
    mean = module.normalized_actions(given.samples.feature, given.samples.state)  # type: ignore[operator]
    target = module.action_normalizer.normalize(given.samples.actions)
    total, count, cut = 0.0, 0, 0
    for row in range(given.num_rows):
        weight = float(np.exp(float(given.advantages[row]) / 0.7))
        cut += weight > max_weight and bool(given.samples.valid[row].any())
        for step in range(CHUNK):
            if given.samples.valid[row, step]:
                error = (mean[row, step] - target[row, step]).abs().mean()
                total += min(weight, max_weight) * float(error)
                count += 1
    assert float(found.policy) == pytest.approx(total / count, rel=1e-5)
    seen = given.samples.valid.any(dim=1)
    assert float(found.clip_fraction) == pytest.approx(cut / int(seen.sum()))
    assert given.returns is not None
    said = module.value(given.samples.feature, given.samples.state)
    error = (said - given.returns)[seen]
    assert float(found.value) == pytest.approx(float(0.5 * (error**2).mean()), rel=1e-5)
    assert float(found.total) == pytest.approx(float(found.policy + 0.25 * found.value), rel=1e-6)


@pytest.mark.parametrize("spec", MODULES, ids=lambda spec: spec.kind)
def test_a_resumed_slot_goes_on_bit_by_bit(spec: Any) -> None:
    algorithm = AWRSpec(epochs=2, minibatches=3)
    straight, first = slot_of(spec, algorithm), slot_of(spec, algorithm)
    given = [samples_for(straight, seed=number) for number in range(4)]
    for one in given:
        straight.update_policy(one)
    for one in given[:2]:
        first.update_policy(one)
    state = first.state()
    resumed = slot_of(spec, algorithm)
    resumed.restore(SlotState(state.module, state.optimizer, state.scalars))
    for one in given[2:]:
        resumed.update_policy(one)
    assert resumed.step == 4
    for name, array in straight.export_params().items():
        np.testing.assert_array_equal(array, resumed.export_params()[name])


@torch.no_grad()
def test_equal_advantages_imitate() -> None:
    """With weights of 1 the loss is that of fine-tuning."""
    slot = slot_of(MODULES[0], IMITATION)
    given = replace(samples_for(slot), advantages=torch.zeros(12), returns=None)
    found = awr_loss(slot.module.eval(), given, IMITATION)
    samples = given.samples
    rows = slot.module.loss(samples.feature, samples.state, samples.actions, samples.valid)
    count = samples.valid.sum(dim=1)
    assert float(found.total) == pytest.approx(float((rows * count).sum() / count.sum()))


def test_nothing_valid_changes_nothing_pf31() -> None:
    slot = slot_of(MODULES[0], AWRSpec())
    before = slot.export_params()
    given = samples_for(slot)
    none = replace(given, samples=replace(given.samples, valid=torch.zeros(12, CHUNK).bool()))
    update = slot.update_policy(none)
    assert (update.optimizer_steps, update.loss) == (0, 0.0)
    for name, array in slot.export_params().items():
        np.testing.assert_array_equal(array, before[name])


def test_columns_are_checked_before_an_update() -> None:
    slot = slot_of(MODULES[0], AWRSpec())
    encoder: Any = type("Encoder", (), {"backbone": type("B", (), {"device": "cpu"})})
    columns = {
        "is_transition": np.array([True]), "trained": np.ones((1, CHUNK), bool),
        "actions": np.full((1, CHUNK, ACTION_DIM), np.nan), "state": np.zeros((1, STATE_DIM)),
        "feature": [np.zeros((CHUNK, FEATURE_DIM), np.float32)],
    }  # fmt: skip
    with pytest.raises(DataError, match="'advantages' is missing"):
        weighted_samples(columns, slot.module, encoder)
    columns["advantages"] = np.zeros((1, CHUNK))
    with pytest.raises(DataError, match="'actions' is not finite at row 0"):
        weighted_samples(columns, slot.module, encoder)


def scene_of(env: Tabletop) -> np.ndarray:
    """What the policy sees, as features of every query: the way to the target and the place."""
    target = np.array(env.scene.blocks[env.scene.target].center)
    feature = np.zeros((CHUNK, FEATURE_DIM), np.float32)
    feature[:, :4] = [*(10 * (target - env._position)), *env._position]
    return feature


def recorded_episodes(count: int) -> dict[str, np.ndarray]:
    """Half by the expert, half by somebody who goes astray; rewards tell which."""
    env = Tabletop(gripper=False, render=False, max_steps=16, dense=True, reach_radius=0.06)
    rows: list[dict[str, Any]] = []
    for episode in range(count):
        env.reset(1000 + episode)
        draws = np.random.default_rng(episode)
        astray = np.float32(draws.uniform(-1, 1, 2)) if episode % 2 else None
        over = False
        while not over:
            seen, actions, rewards = scene_of(env), [], []
            for _ in range(CHUNK):
                action = env.expert_action() if astray is None else astray
                step = env.step(action)
                actions.append(action)
                rewards.append(step.reward)
                over = step.done
                if over:
                    break
            short = CHUNK - len(actions)
            rows.append({
                "feature": seen, "actions": np.pad(np.stack(actions), ((0, short), (0, 0))),
                "rewards": np.pad(rewards, (0, short)),
                "valid": np.arange(CHUNK) < len(actions), "next_row": len(rows) + 1,
                "is_transition": True, "terminated": over,
            })  # fmt: skip
        rows.append({**rows[-1], "next_row": -1, "is_transition": False, "terminated": False,
                     "valid": np.zeros(CHUNK, bool)})  # fmt: skip
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def success_rate(slot: Slot, scenes: int = 40) -> float:
    env = Tabletop(gripper=False, render=False, max_steps=16, reach_radius=0.06)
    won = 0
    for seed in range(scenes):
        env.reset(seed)
        done = False
        while not done:
            values = torch.from_numpy(scene_of(env))[None]
            feature = VLAFeature(FeatureKind.QUERIES, values)
            with torch.no_grad():
                chunk = slot.module.act(feature, torch.zeros(1, STATE_DIM), None)[0].numpy()
            step = env.step(np.clip(chunk[0], -1, 1).astype(np.float32))
            done = step.done
            won += bool(step.info["success"])
    return won / scenes


def test_mixed_episodes_teach_more_than_imitation_does() -> None:
    """The same rows, steps and learning rate: only the weights differ."""
    rows = recorded_episodes(60)
    of = Rows(
        rewards=rows["rewards"], valid=rows["valid"], next_row=rows["next_row"],
        is_transition=rows["is_transition"], terminated=rows["terminated"],
    )  # fmt: skip
    returns = discounted_returns(of, gamma=0.99)
    each = np.where(of.valid, (returns - returns[of.is_transition].mean())[:, None], 0.0)
    advantages = normalized(each, of.valid)[of.is_transition, 0]
    chosen = rows["is_transition"]
    given = WeightedSamples(
        samples=Samples(
            feature=VLAFeature(FeatureKind.QUERIES, torch.from_numpy(rows["feature"][chosen])),
            state=torch.zeros(int(chosen.sum()), STATE_DIM),
            actions=torch.from_numpy(rows["actions"][chosen]).float(),
            valid=torch.from_numpy(rows["valid"][chosen]),
        ),
        advantages=torch.from_numpy(advantages).float(),
        returns=None,
    )
    rates = []
    for algorithm in (
        AWRSpec(baseline="mean", temperature=0.5, epochs=1, minibatches=4),
        IMITATION.model_copy(update={"minibatches": 4}),
    ):
        slot = slot_of(MODULES[0], algorithm)
        for _ in range(50):
            slot.update_policy(given)
        rates.append(success_rate(slot))
    assert rates[0] >= 0.8
    assert rates[0] >= rates[1] + 0.2, rates
