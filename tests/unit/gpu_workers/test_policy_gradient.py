"""Modules as distributions, and RL updates of slots: likelihoods, learning, isolation, resume."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from vla_platform.errors import DataError, DivergedError
from vla_platform.gpu_workers.action_modules.base import ActionModule
from vla_platform.gpu_workers.action_modules.build import build_action_module
from vla_platform.gpu_workers.algorithms.policy_gradient import PolicySamples
from vla_platform.gpu_workers.algorithms.ppo import RolloutSamples
from vla_platform.gpu_workers.backbone import FeatureKind
from vla_platform.gpu_workers.features import VLAFeature
from vla_platform.gpu_workers.slot_state import SlotConfig, SlotState
from vla_platform.gpu_workers.slots import Slot
from vla_platform.schema import Schema
from vla_platform.specs import (
    AdamWSpec,
    FlowMatchingModule,
    GRPOSpec,
    OFTModule,
    PPOSpec,
    ReinforceSpec,
)

FEATURE_DIM, STATE_DIM, ACTION_DIM, CHUNK = 12, 3, 2, 4
MODULES = [
    OFTModule(chunk=CHUNK, hidden_dim=16),
    FlowMatchingModule(
        chunk=CHUNK, hidden_dim=16, num_layers=2, num_heads=2, num_future_tokens=2,
        num_inference_steps=3,
    ),
]  # fmt: skip


class Statistics:
    def __init__(self, dim: int, *, constant: int | None = None) -> None:
        self.min, self.max = np.full(dim, -2.0), np.full(dim, 2.0)
        if constant is not None:
            self.min[constant] = self.max[constant] = 0.3
        self.mean, self.std = np.zeros(dim), np.ones(dim)
        self.q01, self.q99 = self.min, self.max


def schema(kind: str) -> Schema:
    return Schema(
        base_model="tiny", base_digest="d", cameras=("top",), image_size=8, state_dim=STATE_DIM,
        action_dim=ACTION_DIM, chunk=CHUNK, action_module=kind, state_input="encoder",
    )  # fmt: skip


def build(spec, *, constant: int | None = None) -> ActionModule:
    return build_action_module(
        spec, schema(spec.kind), feature_dim=FEATURE_DIM, seed=1, normalization="min_max",
        state_statistics=Statistics(STATE_DIM),
        action_statistics=Statistics(ACTION_DIM, constant=constant), rl=True,
    )  # fmt: skip


def feature_of(module: ActionModule, rows: int, seed: int = 0) -> VLAFeature:
    length = CHUNK if module.feature_kind is FeatureKind.QUERIES else 5
    values = torch.randn(rows, length, FEATURE_DIM, generator=torch.Generator().manual_seed(seed))
    mask = None if module.feature_kind is FeatureKind.QUERIES else torch.ones(rows, length).bool()
    return VLAFeature(module.feature_kind, values, mask)


def noise_of(module: ActionModule, rows: int, seed: int = 5) -> torch.Tensor:
    shape = (rows, *module.sample_noise_shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", MODULES, ids=lambda spec: spec.kind)
def test_a_sample_is_judged_as_it_was_drawn(spec) -> None:
    module = build(spec).eval()
    feature, state = feature_of(module, 6), torch.randn(6, STATE_DIM)
    drawn = module.sample(feature, state, noise_of(module, 6))
    judged = module.evaluate(feature, state, drawn.latent)
    torch.testing.assert_close(judged.log_prob, drawn.log_prob)
    torch.testing.assert_close(judged.value, drawn.value)
    assert drawn.actions.shape == (6, CHUNK, ACTION_DIM)
    assert torch.isfinite(judged.entropy).all()


@pytest.mark.parametrize("spec", MODULES, ids=lambda spec: spec.kind)
def test_a_narrow_policy_acts_as_the_module_without_noise(spec) -> None:
    module = build(spec).eval()
    assert module.rl is not None
    with torch.no_grad():
        module.rl.log_std.fill_(-20.0)
    feature, state, noise = feature_of(module, 3), torch.randn(3, STATE_DIM), noise_of(module, 3)
    drawn = module.sample(feature, state, noise)
    start = noise[:, 0] if module.draws_noise else None
    torch.testing.assert_close(drawn.actions, module.act(feature, state, start), atol=1e-5, rtol=0)


@pytest.mark.parametrize("spec", MODULES, ids=lambda spec: spec.kind)
def test_a_constant_dimension_has_no_likelihood(spec) -> None:
    module = build(spec, constant=1).eval()
    feature, state = feature_of(module, 2), torch.randn(2, STATE_DIM)
    drawn = module.sample(feature, state, noise_of(module, 2))
    assert torch.all(drawn.actions[..., 1] == np.float32(0.3))
    other = drawn.latent.clone()
    other[:, -1, :, 1] += 9.0
    judged = module.evaluate(feature, state, other)
    torch.testing.assert_close(judged.log_prob, drawn.log_prob)


def test_the_chains_likelihood_is_that_of_its_steps() -> None:
    module = build(MODULES[1]).eval()
    assert module.rl is not None
    feature, state = feature_of(module, 2), torch.randn(2, STATE_DIM)
    drawn = module.sample(feature, state, noise_of(module, 2))
    total = torch.zeros(2, CHUNK)
    std = torch.exp(module.rl.log_std) / math.sqrt(3)
    for step in range(3):
        time = torch.full((2,), step / 3)
        mean = (
            drawn.latent[:, step]
            + module.velocity(  # type: ignore[operator]
                drawn.latent[:, step], time, feature, state
            )
            / 3
        )
        each = torch.distributions.Normal(mean, std).log_prob(drawn.latent[:, step + 1])
        total = total + each.sum(-1)
    torch.testing.assert_close(drawn.log_prob, total, atol=1e-4, rtol=1e-4)


def slot_of(spec, algorithm, *, seed: int = 3, lr: float = 3e-3) -> Slot:
    config = SlotConfig(
        policy_key="a/p", schema=schema(spec.kind), action_module=spec,
        optimizer=AdamWSpec(lr=lr), total_steps=50, seed=seed,
        statistics={"state": Statistics(STATE_DIM), "action": Statistics(ACTION_DIM)},
        algorithm=algorithm,
    )  # fmt: skip
    return Slot(config, feature_dim=FEATURE_DIM, device=torch.device("cpu"))


def rollout_of(slot: Slot, rows: int = 32, *, seed: int = 0) -> PolicySamples:
    """Actions near 1 are good, in every dimension."""
    module = slot.module.eval()
    feature = feature_of(module, rows, seed)
    state = torch.randn(rows, STATE_DIM, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        drawn = module.sample(feature, state, noise_of(module, rows, seed + 100))
    reward = -(drawn.actions - 1.0).abs().mean(dim=-1)
    advantages = (reward - reward.mean()) / (reward.std() + 1e-6)
    return PolicySamples(
        feature=feature, state=state, latent=drawn.latent,
        rollout=RolloutSamples(
            log_prob=drawn.log_prob, advantages=advantages, returns=reward.mean(dim=1),
            values=drawn.value, valid=torch.ones(rows, CHUNK, dtype=torch.bool),
        ),
    )  # fmt: skip


def distance(slot: Slot) -> float:
    module = slot.module.eval()
    feature, state = feature_of(module, 64, 9), torch.zeros(64, STATE_DIM)
    with torch.no_grad():
        start = noise_of(module, 64)[:, 0] if module.draws_noise else None
        return float((module.act(feature, state, start) - 1.0).abs().mean())


@pytest.mark.parametrize("spec", MODULES, ids=lambda spec: spec.kind)
@pytest.mark.parametrize(
    "algorithm",
    [PPOSpec(epochs=2, minibatches=2), GRPOSpec(epochs=2, minibatches=2), ReinforceSpec()],
    ids=lambda spec: spec.kind,
)
def test_updates_move_the_policy_to_what_is_rewarded(spec, algorithm) -> None:
    slot = slot_of(spec, algorithm)
    before = distance(slot)
    for number in range(40):
        slot.update_policy(rollout_of(slot, seed=number))
    assert distance(slot) < before - 0.1
    assert (slot.step, slot.policy_version) == (40, 40)


def test_the_value_head_learns_the_returns() -> None:
    slot = slot_of(MODULES[0], PPOSpec(epochs=4, minibatches=2, value_clip=None))
    losses = [slot.update_policy(rollout_of(slot)).value_loss for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]


def test_a_resumed_slot_goes_on_bit_by_bit() -> None:
    algorithm = PPOSpec(epochs=2, minibatches=4)
    straight, first = slot_of(MODULES[0], algorithm), slot_of(MODULES[0], algorithm)
    rollouts = [rollout_of(straight, seed=number) for number in range(4)]
    for one in rollouts:
        straight.update_policy(one)
    for one in rollouts[:2]:
        first.update_policy(one)
    state = first.state()
    resumed = slot_of(MODULES[0], algorithm, seed=3)
    resumed.restore(SlotState(state.module, state.optimizer, state.scalars))
    for one in rollouts[2:]:
        resumed.update_policy(one)
    for name, array in straight.export_params().items():
        np.testing.assert_array_equal(array, resumed.export_params()[name])


def test_a_fine_tuned_payload_gets_the_same_new_heads_everywhere() -> None:
    tuned = build_action_module(
        MODULES[0], schema("oft"), feature_dim=FEATURE_DIM, seed=77, normalization="min_max",
        state_statistics=Statistics(STATE_DIM), action_statistics=Statistics(ACTION_DIM),
    )  # fmt: skip
    payload = {name: tensor.numpy() for name, tensor in tuned.state_dict().items()}
    slots = [slot_of(MODULES[0], PPOSpec(), seed=seed) for seed in (1, 2)]
    for slot in slots:
        slot.load_params(payload)
    one, other = (slot.export_params() for slot in slots)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_an_update_stops_where_the_divergence_passes_its_target() -> None:
    slot = slot_of(MODULES[0], PPOSpec(epochs=50, minibatches=1, target_kl=0.01), lr=3e-2)
    found = slot.update_policy(rollout_of(slot))
    assert found.stopped_early
    assert found.optimizer_steps < 50


def test_a_rollout_in_which_nothing_is_valid_changes_nothing_pf31() -> None:
    slot = slot_of(MODULES[0], PPOSpec())
    before = slot.export_params()
    samples = rollout_of(slot)
    none = torch.zeros_like(samples.rollout.valid)
    update = slot.update_policy(replace(samples, rollout=replace(samples.rollout, valid=none)))
    assert (update.optimizer_steps, update.loss) == (0, 0.0)
    for name, array in slot.export_params().items():
        np.testing.assert_array_equal(array, before[name])


def test_advantages_that_are_not_finite_end_the_update() -> None:
    slot = slot_of(MODULES[0], PPOSpec())
    samples = rollout_of(slot)
    bad = samples.rollout.advantages.clone()
    bad[0, 0] = float("nan")
    with pytest.raises(DivergedError):
        slot.update_policy(replace(samples, rollout=replace(samples.rollout, advantages=bad)))


def test_columns_are_checked_before_an_update() -> None:
    from vla_platform.gpu_workers.rollout_samples import policy_samples

    with pytest.raises(DataError, match="latent"):
        policy_samples({}, build(MODULES[0]), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", MODULES, ids=lambda spec: spec.kind)
def test_exploration_begins_with_the_spread_of_the_spec(spec) -> None:
    wide = build(spec.model_copy(update={"initial_log_std": -1.0}))
    assert build(spec).rl.log_std.tolist() == [-2.0] * ACTION_DIM
    assert wide.rl.log_std.tolist() == [-1.0] * ACTION_DIM
