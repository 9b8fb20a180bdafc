"""Packed equals unpacked: however a batch is cut, and over however many ranks, it is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.gpu_workers.test_awr import samples_for
from tests.unit.gpu_workers.test_policy_gradient import (
    CHUNK,
    FEATURE_DIM,
    MODULES,
    STATE_DIM,
    noise_of,
    slot_of,
)
from vla_platform.gpu_workers.algorithms.minibatches import rows_of
from vla_platform.gpu_workers.algorithms.policy_gradient import PolicySamples, loss_config
from vla_platform.gpu_workers.algorithms.ppo import RolloutSamples, Totals, policy_loss
from vla_platform.gpu_workers.backbone import FeatureKind
from vla_platform.gpu_workers.features import VLAFeature, stack_features
from vla_platform.gpu_workers.ranks.share import BatchShare
from vla_platform.gpu_workers.slots import Slot
from vla_platform.rl.packing import RowMeta, assign
from vla_platform.specs import AdamWSpec, AWRSpec, GRPOSpec, PPOSpec, ReinforceSpec

ROWS = 24
ALGORITHMS = [
    PPOSpec(epochs=2, minibatches=3, entropy_weight=0.01),
    PPOSpec(epochs=1, minibatches=1, ratio="chunk"),
    GRPOSpec(epochs=2, minibatches=2),
    ReinforceSpec(),
    AWRSpec(epochs=2, minibatches=2),
]


def damped(spec: Any, algorithm: Any) -> Slot:
    """With Adam's usual epsilon, rounding of a gradient that is 0 would be a step of full size."""
    config = replace(slot_of(spec, algorithm).config, optimizer=AdamWSpec(lr=3e-3, eps=1e-2))
    return Slot(config, feature_dim=FEATURE_DIM, device=torch.device("cpu"))


def ragged_feature(slot: Slot, seed: int = 0) -> VLAFeature:
    """Rows of 3 to 40 tokens where the module reads the hidden states."""
    draws = torch.Generator().manual_seed(seed)
    kind = slot.module.feature_kind
    lengths = torch.randint(3, 41, (ROWS,), generator=draws).tolist()
    if kind is FeatureKind.QUERIES:
        lengths = [CHUNK] * ROWS
    rows = [torch.randn(length, FEATURE_DIM, generator=draws) for length in lengths]
    return stack_features(rows, kind)


def policy_rows(slot: Slot, *, seed: int = 0) -> PolicySamples:
    module, draws = slot.module.eval(), torch.Generator().manual_seed(seed)
    feature = ragged_feature(slot, seed)
    state = torch.randn(ROWS, STATE_DIM, generator=draws)
    with torch.no_grad():
        drawn = module.sample(feature, state, noise_of(module, ROWS))
    return PolicySamples(
        feature=feature, state=state, latent=drawn.latent,
        rollout=RolloutSamples(
            log_prob=drawn.log_prob, advantages=torch.randn(ROWS, CHUNK, generator=draws),
            returns=torch.randn(ROWS, generator=draws), values=drawn.value,
            valid=torch.rand(ROWS, CHUNK, generator=draws) > 0.4,
        ),
    )  # fmt: skip


def given(slot: Slot, seed: int) -> Any:
    if not isinstance(slot.config.algorithm, AWRSpec):
        return policy_rows(slot, seed=seed)
    made = samples_for(slot, ROWS, seed=seed)
    return replace(made, samples=replace(made.samples, feature=ragged_feature(slot, seed)))


# The loss of flow matching draws noise for each pass: cut otherwise, it is another draw.
CASES = [
    (spec, algorithm) for spec in MODULES for algorithm in ALGORITHMS
    if (spec.kind, algorithm.kind) != ("flow_matching", "awr")
]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "algorithm"), CASES, ids=[f"{spec.kind}-{one.kind}" for spec, one in CASES]
)
def test_packed_updates_equal_unpacked_ones(spec: Any, algorithm: Any) -> None:
    whole, packed = damped(spec, algorithm), damped(spec, algorithm)
    for seed in range(3):
        one = whole.update_policy(given(whole, seed), max_tokens=10**9)
        other = packed.update_policy(given(packed, seed), max_tokens=30)
        assert other.num_passes > one.num_passes == one.optimizer_steps == other.optimizer_steps
        for name in ("loss", "policy_loss", "value_loss", "entropy", "clip_fraction", "grad_norm"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-4, abs=1e-5)
    for name, array in whole.export_params().items():
        np.testing.assert_allclose(packed.export_params()[name], array, atol=3e-5)


@pytest.mark.parametrize("spec", MODULES, ids=lambda spec: spec.kind)
def test_ranks_add_up_to_the_batch(spec: Any) -> None:
    """Each rank's rows by the assignment, their shares added: the gradient of the whole."""
    algorithm = PPOSpec()
    slot = slot_of(spec, algorithm)
    samples, config = policy_rows(slot), loss_config(algorithm)
    totals = Totals.of(samples.rollout.valid)

    def gradients(rows: list[int]) -> dict[str, torch.Tensor]:
        part = samples.rows(torch.tensor(rows))
        judged = slot.module.evaluate(part.feature.trimmed(), part.state, part.latent)
        share = policy_loss(
            judged.log_prob, judged.entropy, judged.value, part.rollout, config, totals
        )
        slot.module.zero_grad()
        share.total.backward()
        return {
            name: parameter.grad.clone()
            for name, parameter in slot.module.named_parameters()
            if parameter.grad is not None
        }

    metas = [RowMeta(row=at, tokens=one) for at, one in enumerate(samples.feature.lengths)]
    ranks = assign(metas, num_ranks=3)
    assert all(ranks)
    parts = [gradients([one.row for one in mine]) for mine in ranks]
    for name, whole in gradients(list(range(ROWS))).items():
        torch.testing.assert_close(sum(part[name] for part in parts), whole, atol=1e-5, rtol=1e-4)


def test_an_update_that_stops_early_takes_nothing_of_its_last_minibatch() -> None:
    """The divergence is that of the whole minibatch, whatever pass it showed in."""
    algorithm = PPOSpec(epochs=50, minibatches=1, target_kl=0.01)
    whole, packed = (slot_of(MODULES[0], algorithm, lr=3e-2) for _ in range(2))
    one = whole.update_policy(policy_rows(whole), max_tokens=10**9)
    other = packed.update_policy(policy_rows(packed), max_tokens=5)
    assert one.stopped_early
    assert (one.stopped_early, one.optimizer_steps) == (other.stopped_early, other.optimizer_steps)
    for name, array in whole.export_params().items():
        np.testing.assert_allclose(packed.export_params()[name], array, atol=3e-5)


def test_a_batch_that_fits_is_not_touched() -> None:
    slot = slot_of(MODULES[0], PPOSpec())
    samples = policy_rows(slot)
    share = BatchShare.whole(samples.valid.sum(dim=1).tolist(), samples.lengths)
    (part,) = share.passes(range(ROWS), max_tokens=10**9)
    one = rows_of(samples, part)
    assert one.latent is samples.latent
    assert one.feature is samples.feature
