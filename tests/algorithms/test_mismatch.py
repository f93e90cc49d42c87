"""Truncated importance weights."""

import math

import pytest
import torch

from apportion.algorithms import TruncatedImportance
from apportion.data.errors import UsageError

MASK = torch.tensor([[True, True, True], [True, False, False]])
SAMPLER = torch.log(torch.tensor([[0.5, 0.5, 0.5], [0.1, 0.9, 0.9]]))
SCORER = torch.log(torch.tensor([[0.25, 0.75, 0.5], [0.4, 0.1, 0.1]]))


def test_token_weights_by_hand():
    weights, capped = TruncatedImportance("token", cap=1.4).weights(SCORER, SAMPLER, MASK)
    torch.testing.assert_close(weights, torch.tensor([[0.5, 1.4, 1.0], [1.4, 1.0, 1.0]]))
    assert capped.tolist() == [[False, True, False], [True, False, False]]


def test_sequence_weights_by_hand():
    weights, capped = TruncatedImportance("sequence", cap=3.0).weights(SCORER, SAMPLER, MASK)
    torch.testing.assert_close(weights, torch.tensor([[0.75, 0.75, 0.75], [3.0, 1.0, 1.0]]))
    assert capped.tolist() == [[False] * 3, [True, False, False]]


def test_what_is_outside_the_mask_is_never_read():
    weights, _ = TruncatedImportance().weights(SCORER, torch.where(MASK, SAMPLER, math.nan), MASK)
    assert weights.isfinite().all()


def test_the_sequence_weight_makes_the_gradient_that_of_the_scorer():
    """All sequences of two tokens out of three: the expectation under the sampler of w r grad log pi is the gradient of
    the expected reward under the scorer, exactly; with token weights it is not."""
    generator = torch.Generator().manual_seed(0)
    scorer = torch.randn(2, 3, generator=generator, dtype=torch.float64).requires_grad_()
    sampler = (scorer + 0.5 * torch.randn(2, 3, generator=generator)).detach().log_softmax(-1)
    sequences = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    reward = torch.randn(9, generator=generator, dtype=torch.float64)
    logp = torch.stack([scorer.log_softmax(-1)[t][sequences[:, t]] for t in range(2)], 1)
    logp_sampler = torch.stack([sampler[t][sequences[:, t]] for t in range(2)], 1)
    (true,) = torch.autograd.grad((logp.sum(1).exp() * reward).sum(), scorer, retain_graph=True)
    gaps = {}
    for level in ("sequence", "token"):
        weights, _ = TruncatedImportance(level, cap=1e9).weights(logp, logp_sampler, torch.ones(9, 2, dtype=torch.bool))
        surrogate = (logp_sampler.sum(1).exp() * reward * (weights * logp).sum(1)).sum()
        (found,) = torch.autograd.grad(surrogate, scorer, retain_graph=True)
        gaps[level] = float((found - true).abs().max())
    assert gaps["sequence"] < 1e-12
    assert gaps["token"] > 1e-3


@pytest.mark.parametrize(("options", "message"), [({"cap": 0.0}, "cap is 0.0"), ({"level": "word"}, "level is 'word'")])
def test_wrong_options(options, message):
    with pytest.raises(UsageError, match=message):
        TruncatedImportance(**options)
