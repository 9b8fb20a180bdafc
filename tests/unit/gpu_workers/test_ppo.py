"""Policy losses against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from vla_platform.gpu_workers.action_modules.stochastic import gaussian_entropy, gaussian_log_prob
from vla_platform.gpu_workers.algorithms.ppo import (
    PolicyLossConfig,
    RolloutSamples,
    mean_of,
    policy_loss,
    value_loss,
)


def samples(log_prob, advantages, *, valid=None, returns=None, values=None) -> RolloutSamples:
    old = torch.tensor(log_prob)
    return RolloutSamples(
        old,
        torch.tensor(advantages),
        None if returns is None else torch.tensor(returns),
        None if values is None else torch.tensor(values),
        torch.ones_like(old, dtype=torch.bool) if valid is None else torch.tensor(valid),
    )


def loss_of(new, given: RolloutSamples, **options):
    log_prob = torch.tensor(new, requires_grad=True)
    zeros = torch.zeros_like(log_prob)
    found = policy_loss(log_prob, zeros, zeros[:, 0], given, PolicyLossConfig(**options))
    return found, log_prob


def test_equal_policies_have_ratio_one_and_no_divergence() -> None:
    given = samples([[-1.0, -2.0]], [[2.0, -1.0]])
    found, log_prob = loss_of([[-1.0, -2.0]], given)
    assert found.policy.item() == pytest.approx(-0.5)
    assert (found.approx_kl.item(), found.clip_fraction.item()) == (0.0, 0.0)
    found.total.backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor([[-1.0, 0.5]]))  # -A / 2


def test_ratios_are_clipped_on_the_side_that_would_gain() -> None:
    up, down = math.log(1.5), math.log(0.5)
    given = samples([[0.0, 0.0, 0.0, 0.0]], [[1.0, 1.0, -1.0, -1.0]])
    found, log_prob = loss_of([[up, down, up, down]], given)
    # Gains stop at 1.2 and 0.8; losses do not: -1.2, -0.5, 1.5, 0.8.
    assert found.policy.item() == pytest.approx((-1.2 - 0.5 + 1.5 + 0.8) / 4)
    found.total.backward()
    assert [bool(grad) for grad in log_prob.grad[0]] == [False, True, True, False]
    assert found.clip_fraction.item() == 1.0


def test_dual_clip_caps_bad_actions_that_became_likely() -> None:
    given = samples([[0.0]], [[-1.0]])
    assert loss_of([[math.log(50.0)]], given)[0].policy.item() == pytest.approx(3.0)
    assert loss_of([[math.log(50.0)]], given, dual_clip=None)[0].policy.item() == pytest.approx(50)


def test_a_chunk_has_one_ratio_where_asked() -> None:
    given = samples([[0.0, 0.0]], [[1.0, 1.0]], valid=[[True, True]])
    found, _ = loss_of([[0.05, 0.05]], given, chunk_ratio=True)
    assert found.policy.item() == pytest.approx(-math.exp(0.1))


def test_nothing_valid_gives_zero_and_no_gradient_pf31_b40() -> None:
    given = samples([[float("nan")]], [[float("inf")]], valid=[[False]])
    found, log_prob = loss_of([[0.0]], given)
    found.total.backward()
    assert (found.total.item(), log_prob.grad.item()) == (0.0, 0.0)
    assert mean_of(torch.tensor([float("nan")]), torch.tensor([False])).item() == 0.0


def test_reinforce_is_log_probability_times_advantage() -> None:
    given = samples([[0.0, 0.0]], [[2.0, 4.0]])
    found, log_prob = loss_of([[-1.0, -3.0]], given, surrogate=False)
    assert found.policy.item() == pytest.approx((2.0 * 1 + 4.0 * 3) / 2)
    found.total.backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor([[-1.0, -2.0]]))


def test_value_loss_is_huber_and_clipped() -> None:
    valid = torch.tensor([True, True, False])
    value, returns = torch.tensor([1.0, 30.0, 9.0]), torch.tensor([0.0, 0.0, float("nan")])
    plain = value_loss(value, returns, None, valid, clip=None)
    assert plain.item() == pytest.approx((0.5 + 10 * (30 - 5)) / 2)
    # The step from 3 to 1 is cut at 2.8: it may not claim what it jumped over.
    near = value_loss(
        torch.tensor([1.0]),
        torch.tensor([0.0]),
        torch.tensor([3.0]),
        torch.tensor([True]),
        clip=0.2,
    )
    assert near.item() == pytest.approx(0.5 * 2.8**2)


def test_value_and_entropy_join_the_total() -> None:
    given = samples([[0.0]], [[0.0]], returns=[2.0], values=[0.0])
    log_prob, value = torch.zeros(1, 1), torch.tensor([0.0])
    config = PolicyLossConfig(value_weight=0.5, entropy_weight=0.1, value_clip=None)
    found = policy_loss(log_prob, torch.full((1, 1), 3.0), value, given, config)
    assert found.total.item() == pytest.approx(0.5 * 2.0 - 0.1 * 3.0)


def test_gaussian_equals_torchs_and_constant_dimensions_count_nothing() -> None:
    x, mean = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
    log_std = torch.tensor([-1.0, 0.3])
    normal = torch.distributions.Normal(mean, log_std.exp())
    every = torch.tensor([True, True])
    torch.testing.assert_close(
        gaussian_log_prob(x, mean, log_std, every), normal.log_prob(x).sum(-1)
    )
    torch.testing.assert_close(gaussian_entropy(log_std, every), normal.entropy()[0, 0].sum())
    first = torch.tensor([True, False])
    torch.testing.assert_close(
        gaussian_log_prob(x, mean, log_std, first), normal.log_prob(x)[..., 0]
    )
