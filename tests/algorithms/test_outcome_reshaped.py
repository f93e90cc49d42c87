"""OAR's bi-level reshaping: by hand, against plain Python, and every edge case of ALGORITHMS section 3."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st

from apportion.algorithms import AdvantageContext, GroupMean, OutcomeReshaped
from apportion.algorithms.advantages.outcome_reshaped import reasoning_tokens, reshaping_weights
from apportion.data.batch import RolloutBatch
from apportion.data.errors import UsageError

Build = Callable[..., RolloutBatch]


def reference(scores: list[float], quantile: float, beta: float) -> list[float]:
    """The formula in plain Python, for one completion's reasoning tokens."""
    logs = [math.log1p(max(s, 0.0)) for s in scores]
    low, high = min(logs), max(logs)
    if low == high:
        return [1.0] * len(scores)
    u = [(x - low) / (high - low) for x in logs]
    ordered, place = sorted(u), quantile * (len(u) - 1)
    k = math.floor(place)
    tau = ordered[k] + (place - k) * (ordered[min(k + 1, len(u) - 1)] - ordered[k])
    weights = [max(x / tau, 0.1) if x < tau else (1 + beta * (x - tau) / (1 - tau) if tau < 1 else 1.0) for x in u]
    return [w * len(weights) / sum(weights) for w in weights]


def test_by_hand() -> None:
    """log1p(s) = 0, 1, 2, 3, 4, so u = 0, 1/4, ..., 1; the quarter quantile is 1/4; w = 0.1, 1, 4/3, 5/3, 2 before
    normalisation, whose sum is 6.1."""
    score = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]], dtype=torch.float64).expm1()
    got = reshaping_weights(score, torch.ones(1, 5, dtype=torch.bool), quantile=0.25, beta=1.0)
    expected = torch.tensor([[0.1, 1.0, 4 / 3, 5 / 3, 2.0]], dtype=torch.float64) * 5 / 6.1
    torch.testing.assert_close(got, expected)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-2, 100), st.booleans()).map(lambda pair: (round(pair[0], 2), pair[1])),
        min_size=1,
        max_size=12,
    ),
    st.floats(0, 1),
    st.floats(0, 3),
)
def test_against_plain_python(tokens: list[tuple[float, bool]], quantile: float, beta: float) -> None:
    """Any scores (equal, negative, one), any reasoning mask, garbage outside it; mass is kept."""
    reasoning = torch.tensor([[inside for _, inside in tokens]])
    score = torch.tensor([[s if inside else math.nan for s, inside in tokens]], dtype=torch.float64)
    got = reshaping_weights(score, reasoning, quantile, beta)
    assert got[~reasoning].eq(1).all()
    inside = [s for s, r in tokens if r]
    if inside:
        assert got[reasoning].tolist() == pytest.approx(reference(inside, quantile, beta), rel=1e-6)
        assert float(got[reasoning].sum()) == pytest.approx(len(inside))


def test_identity_4_weights_of_one() -> None:
    """Constant scores (negative ones are clamped at 0 first), no tokens, one token, or beta = 0 with quantile 0."""
    everything = torch.ones(1, 4, dtype=torch.bool)
    for score in ([3.0] * 4, [0.0] * 4, [-1.0, -2.0, 0.0, -5.0]):
        assert torch.equal(reshaping_weights(torch.tensor([score]), everything, 0.25, 1.0), torch.ones(1, 4))
    uneven = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert torch.equal(reshaping_weights(uneven, ~everything, 0.25, 1.0), torch.ones(1, 4))
    one = torch.tensor([[False, True, False, False]])
    assert torch.equal(reshaping_weights(uneven, one, 0.25, 1.0), torch.ones(1, 4))
    torch.testing.assert_close(reshaping_weights(uneven, everything, 0.0, 0.0), torch.ones(1, 4))
    assert not torch.equal(reshaping_weights(uneven, everything, 0.25, 1.0), torch.ones(1, 4))


def test_a_quantile_of_one_turns_down_all_but_the_highest() -> None:
    """tau = 1: the highest-scored token has weight 1, not 1 + beta * 0 / 0."""
    score = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64).expm1()
    got = reshaping_weights(score, torch.ones(1, 3, dtype=torch.bool), quantile=1.0, beta=1.0)
    torch.testing.assert_close(got, torch.tensor([[0.1, 0.5, 1.0]], dtype=torch.float64) * 3 / 1.6)


def test_rows_of_different_lengths_do_not_mix() -> None:
    draw = torch.Generator().manual_seed(0)
    score = torch.rand(6, 9, generator=draw)
    reasoning = torch.arange(9) < torch.tensor([0, 1, 2, 5, 8, 9])[:, None]
    together = reshaping_weights(score, reasoning, 0.25, 1.0)
    for i in range(6):
        assert torch.equal(reshaping_weights(score[i : i + 1], reasoning[i : i + 1], 0.25, 1.0)[0], together[i])
    assert reshaping_weights(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), 0.25, 1.0).shape == (2, 0)


def test_reasoning_is_what_comes_before_the_answer(rollouts_of: Build) -> None:
    """Answer at 2-3, none, at the very start, and a gap inside the reasoning."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1]]).bool()
    span = torch.tensor([[2, 4], [-1, -1], [0, 2], [3, 4]])
    rollouts = rollouts_of(torch.ones(4), torch.zeros(4, dtype=torch.long), mask, answer_span=span)
    expected = [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0]]
    assert reasoning_tokens(rollouts).long().tolist() == expected
    assert not reasoning_tokens(rollouts.replace(answer_span=None)).any()


@pytest.mark.parametrize("signal", ["answer_influence", "entropy"])
@pytest.mark.parametrize("scale", ["none", "std"])
def test_credit_is_moved_not_made(random_rollouts: Build, random_signals, signal, scale) -> None:
    """Over the reasoning tokens, and so over the completion, the sum of a rollout's credit is GroupMean's."""
    rollouts = random_rollouts(2, width=12, dtype=torch.float64)
    got = OutcomeReshaped(signal=signal, scale=scale)(
        rollouts, {signal: random_signals(rollouts)[signal]}, AdvantageContext()
    )
    plain = GroupMean(scale)(rollouts, {}, AdvantageContext())
    torch.testing.assert_close(got.sum(1), plain.sum(1))
    outside = ~reasoning_tokens(rollouts)
    assert torch.equal(got[outside], plain[outside])
    assert not torch.allclose(got, plain)


def test_groups_of_equal_returns_are_not_reshaped(rollouts_of: Build) -> None:
    """With a token reward such a group still has credit, and it is GroupMean's."""
    fields = {
        "token_reward": torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]),
        "answer_span": torch.tensor([[2, 3], [2, 3]]),
    }
    rollouts = rollouts_of(
        torch.ones(2), torch.zeros(2, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool), **fields
    )
    score = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    got = OutcomeReshaped(signal="entropy")(rollouts, {"entropy": score}, AdvantageContext())
    assert got.tolist() == GroupMean()(rollouts, {}, AdvantageContext()).tolist() == [[0, -1, -1], [0, -1, -1]]


def test_needs() -> None:
    assert OutcomeReshaped().needs == {"answer_influence"}
    assert OutcomeReshaped(signal="entropy").needs == {"entropy"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantile": 1.5}, "OutcomeReshaped.quantile is 1.5: give a number at least 0 and at most 1"),
        ({"beta": -1.0}, "OutcomeReshaped.beta"),
        ({"signal": "entropies"}, "did you mean entropy"),
        ({"scale": "yes"}, "OutcomeReshaped.scale"),
    ],
)
def test_pitfall_10_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        OutcomeReshaped(**options)
