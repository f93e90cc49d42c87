"""KL forms: values, score coefficients, and the exact KL gradient by enumeration (one token, and sequences)."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from apportion.algorithms import Clipped, KLPenalty, LeaveOneOut, Reinforce
from apportion.algorithms.kl import k1, k2, k3
from apportion.algorithms.returns import return_to_go
from apportion.data.batch import RolloutBatch
from apportion.data.errors import UsageError

MASK = torch.tensor([[True, True, False, True, False]])
OLD = torch.tensor([[-1.0, -2.0, torch.nan, -0.5, torch.inf]])
REF = torch.tensor([[-1.5, -1.0, torch.inf, -0.5, 7.0]])


def one_token(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and reference log-probabilities of one token of four, float64."""
    draw = torch.Generator().manual_seed(seed)
    theta = torch.randn(4, generator=draw, dtype=torch.float64, requires_grad=True)
    return theta, torch.randn(4, generator=draw, dtype=torch.float64).log_softmax(0)


def test_values_by_hand() -> None:
    logp, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    torch.testing.assert_close(k1(logp, ref), torch.tensor([math.log(2)]))
    torch.testing.assert_close(k2(logp, ref), torch.tensor([0.5 * math.log(2) ** 2]))
    torch.testing.assert_close(k3(logp, ref), torch.tensor([0.5 - 1 + math.log(2)]))
    tiny = torch.tensor([1e-4])
    torch.testing.assert_close(k3(tiny, torch.zeros(1)), torch.tensor([5e-9]), rtol=1e-3, atol=0)


def test_k1_and_k3_are_unbiased_and_k2_is_not() -> None:
    theta, ref = one_token()
    logp = theta.detach().log_softmax(0)
    exact = (logp.exp() * (logp - ref)).sum()
    for estimator, unbiased in ((k1, True), (k2, False), (k3, True)):
        close = torch.isclose((logp.exp() * estimator(logp, ref)).sum(), exact, rtol=1e-12)
        assert bool(close) == unbiased, estimator.__name__


def test_pitfall_25_gradients_of_one_token() -> None:
    """Expected gradients over the four tokens: k1 coefficient and k2 follow the reverse KL, k3 the forward KL."""
    theta, ref = one_token()
    logp = theta.log_softmax(0)
    (reverse,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), theta, retain_graph=True)
    (forward,) = torch.autograd.grad((ref.exp() * (ref - logp)).sum(), theta, retain_graph=True)
    rows, mask = logp[:, None], torch.ones(4, 1, dtype=torch.bool)
    probability, old = logp.detach().exp()[:, None], rows.detach()

    def expected(loss: Tensor) -> Tensor:
        return torch.autograd.grad((probability * loss).sum(), theta, retain_graph=True)[0]

    reward = KLPenalty("k1_reward", 1.0).token_reward(old, ref[:, None], mask)
    penalty = KLPenalty("k1_coefficient", 1.0).advantage_penalty(old, ref[:, None], mask)
    torch.testing.assert_close(expected(Reinforce()(rows, old, return_to_go(reward, mask), mask).loss), reverse)
    torch.testing.assert_close(expected(Reinforce()(rows, old, -penalty, mask).loss), reverse)
    torch.testing.assert_close(expected(KLPenalty("k2_loss", 1.0).loss(rows, ref[:, None], mask)), reverse)
    of_k3 = expected(KLPenalty("k3_loss", 1.0).loss(rows, ref[:, None], mask))
    torch.testing.assert_close(of_k3, forward)
    assert not torch.allclose(of_k3, reverse, rtol=0.05)
    assert torch.allclose(expected(k1(rows, ref[:, None])), torch.zeros(4, dtype=torch.float64), atol=1e-15), "refused"


def test_identity_8_coefficients_per_sample() -> None:
    """k2 as a loss has the gradient of the per-token k1 coefficient, sample by sample; k3 has beta (1 - delta)."""
    draw = torch.Generator().manual_seed(1)
    logp = torch.randn(3, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(3, 5, generator=draw, dtype=torch.float64)
    mask = torch.rand(3, 5, generator=draw) < 0.7
    penalty = KLPenalty("k1_coefficient", 0.3).advantage_penalty(logp, ref, mask)
    (as_coefficient,) = torch.autograd.grad(Reinforce()(logp, logp.detach(), -penalty, mask).loss.sum(), logp)
    (as_loss,) = torch.autograd.grad(KLPenalty("k2_loss", 0.3).loss(logp, ref, mask).sum(), logp)
    torch.testing.assert_close(as_loss, as_coefficient)
    torch.testing.assert_close(as_loss, torch.where(mask, 0.3 * (logp - ref).detach(), 0.0))
    (of_k3,) = torch.autograd.grad(KLPenalty("k3_loss", 0.3).loss(logp, ref, mask).sum(), logp)
    torch.testing.assert_close(of_k3, torch.where(mask, 0.3 * (1 - (ref - logp).exp()), 0.0).detach())


def test_off_policy_the_coefficient_has_the_ratio_of_the_policy_term() -> None:
    logp = torch.tensor([[math.log(0.5)]], requires_grad=True)
    old, ref, mask = (
        torch.tensor([[math.log(0.4)]]),
        torch.tensor([[math.log(0.2)]]),
        torch.ones(1, 1, dtype=torch.bool),
    )
    penalty = KLPenalty("k1_coefficient", 0.1).advantage_penalty(old, ref, mask)
    loss = Clipped(epsilon_low=0.9, epsilon_high=0.9)(logp, old, -penalty, mask).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    assert float(gradient) == pytest.approx(1.25 * 0.1 * math.log(2), rel=1e-5)


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("return_to_go", [True, False])
def test_pitfall_25_k1_in_the_reward_is_the_exact_sequence_gradient(
    steps: int, return_to_go: bool, enumerated: Callable[..., Any], rollouts_of: Callable[..., RolloutBatch]
) -> None:
    """By enumeration: reward and KL through leave-one-out of pairs give exactly grad(J - beta KL(pi || pi_ref)); the
    per-token coefficient does not."""
    policy = enumerated(vocabulary=3, steps=steps)
    beta = 0.7
    objective = (
        policy.value() - beta * (policy.probability() * (policy.sequence_logp() - policy.ref_sequence_logp)).sum()
    )
    (exact,) = torch.autograd.grad(objective, policy.theta)

    reward_form = KLPenalty("k1_reward", beta, return_to_go)
    token_reward = reward_form.token_reward(policy.logp().detach(), policy.logp_ref, policy.mask)
    torch.testing.assert_close(policy.expected_update(LeaveOneOut(), 2, token_reward=token_reward), exact)

    coefficient = KLPenalty("k1_coefficient", beta)
    penalty = coefficient.advantage_penalty(policy.logp().detach(), policy.logp_ref, policy.mask)
    approximate = policy.expected_update(LeaveOneOut(), 2, penalty=penalty)
    assert (approximate - exact).norm() > 0.01 * exact.norm()


def test_token_reward_places() -> None:
    """-beta k1 at each token, or all of it at the last sampled one; nothing outside the mask, whatever stands there."""
    ahead = KLPenalty("k1_reward", 0.1).token_reward(OLD, REF, MASK)
    torch.testing.assert_close(ahead, torch.tensor([[-0.05, 0.1, 0.0, 0.0, 0.0]]))
    whole = KLPenalty("k1_reward", 0.1, return_to_go=False).token_reward(OLD, REF, MASK)
    torch.testing.assert_close(whole, torch.tensor([[0.0, 0.0, 0.0, 0.05, 0.0]]))
    torch.testing.assert_close(return_to_go(whole, MASK), torch.tensor([[0.05, 0.05, 0.0, 0.05, 0.0]]))
    nobody = torch.zeros_like(MASK)
    assert not KLPenalty("k1_reward", 0.1, return_to_go=False).token_reward(OLD, REF, nobody).any()


def test_nothing_outside_the_mask() -> None:
    """Also no gradient, where log-probabilities are garbage."""
    for form in ("k2_loss", "k3_loss"):
        logp = OLD.clone().requires_grad_()
        loss = KLPenalty(form, 2.0).loss(logp, REF, MASK)
        (gradient,) = torch.autograd.grad(loss.sum(), logp)
        assert not loss[~MASK].any()
        assert not gradient[~MASK].any()
        assert gradient[0, :2].all()
    assert not KLPenalty("k1_coefficient").advantage_penalty(OLD, REF, MASK)[~MASK].any()
    estimate = KLPenalty("k1_reward").estimate(OLD, REF, MASK)
    torch.testing.assert_close(estimate, torch.where(MASK, k3(OLD, REF), 0.0))


def test_pitfall_20_log_ratios_are_float32() -> None:
    """The difference of two bfloat16 log-probabilities is exact in float32 and rounded in bfloat16."""
    logp, ref = torch.tensor([[-3.0]], dtype=torch.bfloat16), torch.tensor([[-0.00390625]], dtype=torch.bfloat16)
    penalty = KLPenalty("k1_coefficient", 1.0).advantage_penalty(logp, ref, torch.ones(1, 1, dtype=torch.bool))
    assert penalty.dtype == torch.float32
    assert float(penalty) == -2.99609375


def test_no_gradient_through_rewards_and_penalties() -> None:
    logp, mask = torch.zeros(1, 2, requires_grad=True), torch.ones(1, 2, dtype=torch.bool)
    assert not KLPenalty("k1_reward").token_reward(logp, logp, mask).requires_grad
    assert not KLPenalty("k1_coefficient").advantage_penalty(logp, logp, mask).requires_grad
    assert not KLPenalty("k3_loss").estimate(logp, logp, mask).requires_grad


def test_needs() -> None:
    for form in ("k1_reward", "k1_coefficient"):
        assert KLPenalty(form).needs == {"logp_ref", "logp_old"}
    for form in ("k2_loss", "k3_loss"):
        assert KLPenalty(form).needs == {"logp_ref"}


def test_pitfall_25_k1_as_a_loss_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="no regularisation") as error:
        KLPenalty("k1_loss")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "k3"}, "known: k1_coefficient, k1_reward, k2_loss, k3_loss"),
        ({"form": "k1_rewards"}, "did you mean k1_reward"),
        ({"coefficient": -0.1}, "kl.coefficient is -0.1"),
        ({"return_to_go": "none"}, "give true or false"),
    ],
)
def test_pitfall_10_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        KLPenalty(**options)


def test_loss_of_a_form_without_loss_is_an_error() -> None:
    with pytest.raises(ValueError, match="no loss term"):
        KLPenalty("k1_reward").loss(OLD, REF, MASK)
    with pytest.raises(ValueError, match=r"\(N, T\)"):
        KLPenalty("k1_reward").token_reward(OLD, REF[:, :2], MASK)
