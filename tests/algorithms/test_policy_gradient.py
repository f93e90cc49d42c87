"""Identity 11 of ALGORITHMS section 8: the expected update against the policy gradient, by full enumeration."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from apportion.algorithms import AdvantageEstimator, GroupMean, LeaveOneOut, OptimalBaseline
from apportion.algorithms.advantages.optimal_baseline import logit_norms

WEIGHTS = ("exact", "logit_norm", "length")


def compare(update: Tensor, gradient: Tensor) -> tuple[float, float]:
    """Slope along the policy gradient, and what is orthogonal to it, relative to its norm."""
    slope = float((update * gradient).sum() / gradient.square().sum())
    return slope, float((update - slope * gradient).norm() / gradient.norm())


@pytest.mark.parametrize(("steps", "group_size"), [(2, 2), (2, 3), (3, 2), (4, 2)])
def test_group_mean_is_exactly_the_gradient_shrunk(enumerated: Callable, steps: int, group_size: int) -> None:
    """(R - 1) / R times the policy gradient: the baseline carries a completion's own reward."""
    policy = enumerated(vocabulary=3, steps=steps)
    expected = policy.policy_gradient() * (group_size - 1) / group_size
    torch.testing.assert_close(policy.expected_update(GroupMean(), group_size), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("steps", "group_size"), [(2, 2), (2, 3), (3, 2), (4, 2)])
@pytest.mark.parametrize(
    "estimator",
    [LeaveOneOut(), *(OptimalBaseline(weight, leave_one_out=True) for weight in WEIGHTS)],  # type: ignore[arg-type]
    ids=["plain", *WEIGHTS],
)
def test_leaving_oneself_out_is_exactly_the_gradient(
    enumerated: Callable, estimator: AdvantageEstimator, steps: int, group_size: int
) -> None:
    policy = enumerated(vocabulary=3, steps=steps)
    update = policy.expected_update(estimator, group_size)
    torch.testing.assert_close(update, policy.policy_gradient(), rtol=1e-9, atol=1e-12)


def test_a_vocabulary_of_four(enumerated: Callable) -> None:
    policy = enumerated(vocabulary=4, steps=2)
    gradient = policy.policy_gradient()
    torch.testing.assert_close(policy.expected_update(LeaveOneOut(), 3), gradient, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(policy.expected_update(GroupMean(), 3), gradient * 2 / 3, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("weight", "slopes", "across"),
    [("exact", (0.09, 0.55), 0.09), ("logit_norm", (0.09, 0.55), 0.09), ("length", (0.36, 0.51), 0.04)],
)
def test_in_sample_weights_are_biased_as_the_docstring_says(
    enumerated: Callable, weight, slopes: tuple[float, float], across: float
) -> None:
    """Five random policies and rewards, pairs: from and to what slope, and the largest part across the gradient."""
    policies = [enumerated(vocabulary=3, steps=2, seed=seed) for seed in range(5)]
    found = [compare(p.expected_update(OptimalBaseline(weight), 2), p.policy_gradient()) for p in policies]
    measured = min(slope for slope, _ in found), max(slope for slope, _ in found), max(rest for _, rest in found)
    assert measured == pytest.approx((*slopes, across), abs=0.005)


def test_logit_norms_are_the_score_norms_of_a_table(enumerated: Callable) -> None:
    """With a row of logits per prefix the scores of a completion's tokens are orthogonal: the proxy is exact."""
    policy = enumerated(vocabulary=3, steps=3)
    signals = policy.signals()
    proxy = logit_norms(signals["logp_old"], signals["sum_sq_probs"], policy.mask)
    torch.testing.assert_close(proxy, signals["score_norms"])


@pytest.mark.parametrize("group_size", [2, 3])
def test_division_by_the_deviation_is_biased(enumerated: Callable, group_size: int) -> None:
    """No equality is claimed for scale=std: it weighs groups by 1 / std. At R = 2 it keeps only who was better."""
    policy = enumerated(vocabulary=3, steps=2)
    gradient = policy.policy_gradient()
    slope, rest = compare(policy.expected_update(GroupMean("std"), group_size), gradient)
    assert slope > 1
    assert rest > 1
