"""Aggregations: hand-computed values, and that no cut, padding or number of processes changes them."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from apportion.algorithms import AGGREGATIONS, Clipped, GroupMean, KLPenalty, Reinforce
from apportion.algorithms.advantages import AdvantageContext
from apportion.algorithms.aggregation import aggregate, check_aggregation, denominator
from apportion.data.errors import UsageError

MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]]).bool()
LOSS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, torch.nan, 7.0, torch.inf], [torch.nan] * 4])


def whole(loss: Tensor, mask: Tensor, name: str, length: int | None = None) -> Tensor:
    return aggregate(loss, mask, name, denominator(name, mask, length), length)


def length_of(name: str) -> int | None:
    return 10 if name == "constant_length" else None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", 22 / 6),
        ("sequence_mean", (10 / 4 + 12 / 2) / 2),
        ("sequence_sum", (10 + 12) / 2),
        ("constant_length", (10 / 10 + 12 / 10) / 2),
    ],
)
def test_hand_computed_and_pitfall_18_an_empty_row_is_in_no_denominator(name: str, expected: float) -> None:
    assert float(whole(LOSS, MASK, name, length_of(name))) == pytest.approx(expected)
    without = whole(LOSS[:2], MASK[:2], name, length_of(name))
    assert torch.equal(whole(LOSS, MASK, name, length_of(name)), without)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_pitfall_18_nothing_to_aggregate_is_zero(name: str) -> None:
    loss = torch.full((2, 3), torch.nan, requires_grad=True)
    share = whole(loss, torch.zeros(2, 3, dtype=torch.bool), name, length_of(name))
    share.backward()
    assert share.item() == 0
    assert loss.grad is not None
    assert not loss.grad.any()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_pitfall_03_one_mask_in_numerator_and_denominator(name: str) -> None:
    """A loss of 1 at every token: what the mask leaves out must be missing above and below alike."""
    loss = torch.where(MASK, 1.0, 1e9)
    expected = {"token_mean": 1.0, "sequence_mean": 1.0, "sequence_sum": 3.0, "constant_length": 0.3}[name]
    assert float(whole(loss, MASK, name, length_of(name))) == pytest.approx(expected)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_pitfall_04_padding_changes_nothing(name: str) -> None:
    """In particular the Dr. GRPO length is the configured one, not the padded width."""
    wide_loss = torch.cat([LOSS, torch.full((3, 90), 3.0)], 1)
    wide_mask = torch.cat([MASK, torch.zeros(3, 90, dtype=torch.bool)], 1)
    torch.testing.assert_close(
        whole(wide_loss, wide_mask, name, length_of(name)), whole(LOSS, MASK, name, length_of(name))
    )


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(AGGREGATIONS)), st.integers(0, 10_000), st.lists(st.integers(0, 4), min_size=9, max_size=9)
)
def test_pitfall_01_any_split_adds_up(name: str, seed: int, part: list[int]) -> None:
    """Losses and gradients of the micro-batches of any split add up to the loss and gradient of the whole batch."""
    draw = torch.Generator().manual_seed(seed)
    loss = torch.randn(9, 6, generator=draw, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(9, 6, generator=draw) < 0.5
    expected = whole(loss, mask, name, length_of(name))
    (gradient,) = torch.autograd.grad(expected, loss)
    below = denominator(name, mask, length_of(name))
    total = torch.zeros((), dtype=torch.float64)
    for number in set(part):
        rows = torch.tensor([i for i, p in enumerate(part) if p == number])
        width = int(mask[rows].any(0).nonzero().max()) + 1 if mask[rows].any() else 0
        total = total + aggregate(loss[rows, :width], mask[rows, :width], name, below, length_of(name))
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(torch.autograd.grad(total, loss)[0], gradient)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_pitfall_01_two_processes_pool_their_counts(name: str) -> None:
    """Each process divides by the pooled denominator; the sum over processes is the loss of the whole batch."""
    parts = (slice(0, 1), slice(1, 3))
    counts = [denominator(name, MASK[part], length_of(name)) for part in parts]
    pooled = torch.stack(counts).sum()
    shares = []
    for part, own in zip(parts, counts, strict=True):
        below = denominator(name, MASK[part], length_of(name), lambda count, own=own: count + pooled - own)
        assert float(below) == float(pooled)
        shares.append(aggregate(LOSS[part], MASK[part], name, below, length_of(name)))
    torch.testing.assert_close(torch.stack(shares).sum(), whole(LOSS, MASK, name, length_of(name)))


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_pitfall_11_constant_groups_keep_their_kl_and_their_place(name: str, rollouts_of) -> None:
    """A group of equal rewards has no policy gradient, but its rows count below, and a KL loss acts on them."""
    rollouts = rollouts_of(
        torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]), torch.ones(4, 3, dtype=torch.bool)
    )
    advantages = GroupMean()(rollouts, {}, AdvantageContext())
    mask = rollouts.loss_mask
    logp = torch.full((4, 3), -1.0, requires_grad=True)
    policy = Reinforce()(logp, logp.detach(), advantages, mask).loss
    kl = KLPenalty("k3_loss", coefficient=0.5).loss(logp, torch.full((4, 3), -2.0), mask)
    below = denominator(name, mask, length_of(name))
    assert float(below) == (12 if name == "token_mean" else 4)
    (of_policy,) = torch.autograd.grad(aggregate(policy, mask, name, below, length_of(name)), logp)
    (of_kl,) = torch.autograd.grad(aggregate(kl, mask, name, below, length_of(name)), logp)
    assert not of_policy[:2].any()
    assert of_policy[2:].all()
    assert torch.equal(of_kl[:2], of_kl[2:])
    assert of_kl.all()


def test_dtype_is_kept() -> None:
    for dtype in (torch.float32, torch.float64):
        assert whole(torch.ones(2, 3, dtype=dtype), torch.ones(2, 3, dtype=torch.bool), "token_mean").dtype == dtype


def test_pitfall_10_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean token_mean or sequence_mean"):
        denominator("token_means", MASK)
    with pytest.raises(UsageError, match=r"no effect with model\.aggregation=token_mean"):
        denominator("token_mean", MASK, 10)
    for length in (None, 0, -3):
        with pytest.raises(UsageError, match="give at least 1"):
            check_aggregation("constant_length", length)
    with pytest.raises(UsageError, match="known: constant_length, sequence_mean"):
        aggregate(LOSS, MASK, "average", torch.tensor(1.0))


def test_pitfall_05_an_objective_may_name_its_aggregations() -> None:
    class OfSequences(Clipped):
        aggregations = frozenset({"sequence_mean"})

    check_aggregation("sequence_mean", None, OfSequences())
    with pytest.raises(UsageError, match=r"OfSequences does not go with .*aggregation=token_mean: use sequence_mean"):
        check_aggregation("token_mean", None, OfSequences())


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\(N, T\)"):
        aggregate(torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.bool), "token_mean", torch.tensor(1.0))
    with pytest.raises(ValueError, match="mask bool"):
        denominator("token_mean", torch.ones(2, 3))
