"""REINFORCE and the clipped surrogate: hand-computed values, gradients, and what stands outside the mask."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from apportion.algorithms import Clipped, PolicyObjective, Reinforce
from apportion.data.errors import UsageError


def run(objective: PolicyObjective, ratio: list[float], advantage: list[float]) -> tuple[Tensor, Tensor, list[bool]]:
    """Loss, gradient to logp, and clipped, of one row with the given ratios."""
    old = torch.full((1, len(ratio)), -1.5, dtype=torch.float64)
    logp = (old + torch.tensor([ratio], dtype=torch.float64).log()).requires_grad_()
    mask = torch.ones_like(old, dtype=torch.bool)
    output = objective(logp, old, torch.tensor([advantage], dtype=torch.float64), mask)
    (gradient,) = torch.autograd.grad(output.loss.sum(), logp)
    assert output.clipped is not None
    return output.loss[0].detach(), gradient[0], output.clipped[0].tolist()


def test_clipped_by_hand() -> None:
    """Ratios 0.5, 1, 2 with a good and a bad advantage: the clip stops only what has gone far enough already."""
    loss, gradient, clipped = run(Clipped(), [0.5, 1.0, 2.0, 0.5, 1.0, 2.0], [1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    torch.testing.assert_close(loss, torch.tensor([-0.5, -1.0, -1.2, 0.8, 1.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([-0.5, -1.0, 0.0, 0.0, 1.0, 2.0], dtype=torch.float64))
    assert clipped == [False, False, True, True, False, False]


def test_asymmetric_and_dual_clip_by_hand() -> None:
    objective = Clipped(epsilon_low=0.1, epsilon_high=0.28, dual_clip=3.0)
    loss, gradient, clipped = run(
        objective, [1.25, 1.3, 0.95, 0.5, 2.9, 5.0, 5.0], [2.0, 2.0, -2.0, -2.0, -2.0, -2.0, 0.0]
    )
    torch.testing.assert_close(loss, torch.tensor([-2.5, -2.56, 1.9, 1.8, 5.8, 6.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([-2.5, 0.0, 1.9, 0.0, 5.8, 0.0, 0.0], dtype=torch.float64))
    assert clipped == [False, True, False, True, False, True, False]


@settings(max_examples=80, deadline=None)
@given(
    st.floats(-3, 3),
    st.floats(-3, 3),
    st.floats(0, 0.9),
    st.floats(0, 0.9),
    st.one_of(st.none(), st.floats(1.5, 4)),
)
def test_clipped_is_the_published_formula(
    log_ratio: float, advantage: float, low: float, high: float, dual: float | None
) -> None:
    ratio = math.exp(log_ratio)
    expected = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        expected = max(expected, dual * advantage)
    loss, gradient, clipped = run(Clipped(low, high, dual), [ratio], [advantage])
    assert float(loss) == pytest.approx(-expected, rel=1e-9, abs=1e-12)
    assert float(gradient) == pytest.approx(0.0 if clipped[0] else -ratio * advantage, rel=1e-9, abs=1e-12)


def test_reinforce_by_hand() -> None:
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    output = Reinforce()(logp, torch.zeros(1, 2), torch.tensor([[3.0, -0.5]]), torch.ones(1, 2, dtype=torch.bool))
    assert output.loss.tolist() == [[3.0, -1.0]]
    assert torch.autograd.grad(output.loss.sum(), logp)[0].tolist() == [[-3.0, 0.5]]
    assert output.clipped is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_pitfall_21_on_policy_the_ratio_is_exactly_one(dtype: torch.dtype) -> None:
    """The loss is -A and the gradient that of REINFORCE, to the last bit, however small the probabilities."""
    draw = torch.Generator().manual_seed(0)
    logp = (-20 * torch.rand(4, 5, generator=draw, dtype=torch.float64)).to(dtype).requires_grad_()
    advantages = torch.randn(4, 5, generator=draw, dtype=torch.float64).to(dtype)
    mask = torch.ones(4, 5, dtype=torch.bool)
    output = Clipped()(logp, logp.detach(), advantages, mask)
    assert torch.equal(output.loss, -advantages.to(output.loss.dtype))
    assert output.clipped is not None
    assert not output.clipped.any()
    of_ratio = torch.autograd.grad(output.loss.sum(), logp)[0]
    of_score = torch.autograd.grad(Reinforce()(logp, logp.detach(), advantages, mask).loss.sum(), logp)[0]
    assert torch.equal(of_ratio, of_score)
    assert torch.equal(of_ratio, -advantages)


def test_pitfall_20_ratios_are_float32_whatever_the_weights_are() -> None:
    """exp(-5.0 + 5.03125) in bfloat16 is off by 0.2 %."""
    logp, old = torch.tensor([[-5.0]], dtype=torch.bfloat16), torch.tensor([[-5.03125]], dtype=torch.bfloat16)
    output = Clipped()(logp, old, torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert output.loss.dtype == torch.float32
    assert float(output.loss) == pytest.approx(-math.exp(0.03125), rel=1e-6)
    assert Reinforce()(logp, old, torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)).loss.dtype == torch.float32


@pytest.mark.parametrize("dual", [None, 3.0])
def test_an_overflowing_ratio_gives_no_nan_where_the_clip_or_a_zero_advantage_stops_it(dual: float | None) -> None:
    logp = torch.tensor([[0.0, 0.0, 0.0]], requires_grad=True)
    old = torch.tensor([[-200.0, -200.0, -200.0]])
    advantages = torch.tensor([[1.0, 0.0, -1.0 if dual else 0.0]])
    output = Clipped(dual_clip=dual)(logp, old, advantages, torch.ones(1, 3, dtype=torch.bool))
    assert torch.equal(output.loss[0, :2].detach(), torch.tensor([-1.2, 0.0]))
    assert torch.autograd.grad(output.loss.sum(), logp)[0].tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("objective", [Reinforce(), Clipped()])
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_pitfall_30_a_nan_under_the_mask_is_not_hidden(objective: PolicyObjective, advantage: float) -> None:
    nan = torch.full((1, 1), torch.nan)
    loss = objective(nan, torch.zeros(1, 1), torch.full((1, 1), advantage), torch.ones(1, 1, dtype=torch.bool)).loss
    assert loss.isnan().all()


@pytest.mark.parametrize(
    "options",
    [
        {"epsilon_low": -0.1},
        {"epsilon_high": float("nan")},
        {"dual_clip": 1.0},
        {"dual_clip": 0.5},
        {"epsilon_low": "x"},
    ],
)
def test_senseless_options_are_refused(options: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        Clipped(**options)


def test_pitfall_10_unknown_options_are_errors() -> None:
    with pytest.raises(TypeError):
        Clipped(epsilon=0.2)  # type: ignore[call-arg]
