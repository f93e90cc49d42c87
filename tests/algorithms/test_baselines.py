"""GroupMean, LeaveOneOut and OptimalBaseline: hand-computed advantages and the identities between them."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from apportion.algorithms import AdvantageContext, AdvantageEstimator, GroupMean, LeaveOneOut, OptimalBaseline
from apportion.algorithms.advantages.optimal_baseline import logit_norms
from apportion.data.batch import RolloutBatch
from apportion.data.errors import UsageError

Build = Callable[..., RolloutBatch]


def advantages(estimator: AdvantageEstimator, rollouts: RolloutBatch, **signals: Tensor) -> Tensor:
    return estimator(rollouts, signals, AdvantageContext())


def one_group(rollouts_of: Build, rewards: list[float], dtype: torch.dtype = torch.float32, **fields) -> RolloutBatch:
    n = len(rewards)
    mask = torch.ones(n, 1, dtype=torch.bool)
    return rollouts_of(torch.tensor(rewards, dtype=dtype), torch.zeros(n, dtype=torch.long), mask, **fields)


def test_group_mean_by_hand(rollouts_of: Build) -> None:
    rollouts = one_group(rollouts_of, [1.0, 0.0, 0.0, 0.0])
    assert advantages(GroupMean(), rollouts).squeeze(1).tolist() == [0.75, -0.25, -0.25, -0.25]
    scaled = advantages(GroupMean("std"), rollouts).squeeze(1)  # unbiased std of 1, 0, 0, 0 is 0.5
    torch.testing.assert_close(scaled, torch.tensor([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-6))
    coarse = advantages(GroupMean("std", epsilon=0.5), rollouts).squeeze(1)
    torch.testing.assert_close(coarse, torch.tensor([0.75, -0.25, -0.25, -0.25]))


def test_leave_one_out_by_hand(rollouts_of: Build) -> None:
    got = advantages(LeaveOneOut(), one_group(rollouts_of, [1.0, 0.0, 0.5])).squeeze(1)
    assert got.tolist() == [0.75, -0.75, 0.0]


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_optimal_baseline_by_hand(rollouts_of: Build, leave_one_out: bool) -> None:
    """Weights 1, 2, 3 by each of the three options: b = (1 + 0 + 1.5) / 6, or of the others. Tokens that the policy
    did not sample count in none."""
    mask = torch.tensor([[1, 0, 0], [1, 0, 1], [1, 1, 1]]).bool()
    attended = torch.ones_like(mask)
    rollouts = rollouts_of(
        torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3, dtype=torch.long), mask, completion_mask=attended
    )
    baseline = torch.tensor([0.3, 0.625, 1 / 3] if leave_one_out else [2.5 / 6] * 3)
    expected = torch.where(mask, (rollouts.reward - baseline)[:, None], 0.0)
    half = torch.full((3, 3), math.log(0.5))
    signals = {"score_norms": torch.tensor([1.0, 2.0, 3.0]), "logp_old": half, "sum_sq_probs": torch.ones(3, 3)}
    for weight in ("exact", "logit_norm", "length"):
        torch.testing.assert_close(advantages(OptimalBaseline(weight, leave_one_out), rollouts, **signals), expected)


def test_needs_of_the_weights() -> None:
    assert OptimalBaseline("exact").needs == {"score_norms"}
    assert OptimalBaseline("logit_norm").needs == {"sum_sq_probs", "logp_old"}
    assert OptimalBaseline("length").needs == frozenset()
    assert GroupMean().needs == LeaveOneOut().needs == frozenset()


def test_logit_norms_are_squared_distances() -> None:
    """||e_y - pi||^2 of explicit distributions, at masked tokens only; a certain token rounds to 0, not below."""
    draw = torch.Generator().manual_seed(0)
    pi = torch.randn(2, 4, 5, generator=draw).softmax(-1)
    y = torch.randint(0, 5, (2, 4), generator=draw)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]]).bool()
    logp = pi.gather(-1, y[..., None]).squeeze(-1).log()
    distance = (torch.nn.functional.one_hot(y, 5) - pi).square().sum(-1)
    got = logit_norms(logp.masked_fill(~mask, torch.inf), pi.square().sum(-1), mask)
    torch.testing.assert_close(got, torch.where(mask, distance, 0.0).sum(1))
    certain = logit_norms(torch.zeros(1, 1), torch.full((1, 1), 1 - 1e-7), torch.ones(1, 1, dtype=torch.bool))
    assert certain.tolist() == [0.0]


def test_empty_completions_have_no_weight(rollouts_of: Build) -> None:
    """Alone with empty completions, a completion has the plain mean of the others; all empty divides nothing by 0."""
    mask = torch.tensor([[1, 1], [0, 0], [0, 0]]).bool()
    rollouts = rollouts_of(torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3, dtype=torch.long), mask)
    assert advantages(OptimalBaseline("length"), rollouts).tolist() == [[0.0, 0.0]] * 3
    assert advantages(OptimalBaseline("length", leave_one_out=True), rollouts)[0].tolist() == [0.75, 0.75]
    nobody = rollouts.replace(action_mask=torch.zeros_like(mask))
    assert not advantages(OptimalBaseline("length"), nobody).any()


def test_identity_1_a_pair_scaled_by_its_deviation(rollouts_of: Build) -> None:
    """R = 2, one right: (+1, -1) / sqrt(2), the soft pair up to the constant of the unbiased deviation."""
    got = advantages(GroupMean("std", epsilon=0.0), one_group(rollouts_of, [1.0, 0.0], torch.float64)).squeeze(1)
    torch.testing.assert_close(got * math.sqrt(2), torch.tensor([1.0, -1.0], dtype=torch.float64))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.3]), st.booleans())
def test_identity_2_leave_one_out_is_the_mean_baseline_rescaled(
    rollouts_of: Build, random_rollouts: Build, seed: int, missing: float, token_reward: bool
) -> None:
    """R / (R - 1) times, with R the valid members of the row's own group; with token rewards, of the first token."""
    rollouts = random_rollouts(seed, dtype=torch.float64, missing=missing, token_reward=token_reward)
    members = torch.stack([((rollouts.group == g) & rollouts.reward_valid).sum() for g in rollouts.group])
    factor = (members / (members - 1).clamp(min=1))[:, None].double()
    of_mean, of_others = advantages(GroupMean(), rollouts), advantages(LeaveOneOut(), rollouts)
    first = rollouts.action_mask & (rollouts.action_mask.cumsum(1) == 1) if token_reward else rollouts.action_mask
    torch.testing.assert_close(of_others[first], (of_mean * factor)[first])


def test_identity_2_within_a_group_all_three_are_proportional(rollouts_of: Build) -> None:
    rollouts = one_group(rollouts_of, [0.9, 0.1, 0.4, 0.4], torch.float64)
    of_mean = advantages(GroupMean(), rollouts)
    for other in (GroupMean("std"), LeaveOneOut()):
        ratio = advantages(other, rollouts) / of_mean
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


@pytest.mark.parametrize("weight", ["exact", "logit_norm", "length"])
def test_identity_3_equal_weights_are_the_mean_baseline(rollouts_of: Build, weight) -> None:
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]]).bool()
    rollouts = rollouts_of(torch.tensor([0.9, 0.1, 0.4, 0.7]), torch.tensor([3, 3, 3, 3]), mask)
    half = torch.full((4, 3), math.log(0.5))
    signals = {"score_norms": torch.full((4,), 2.5), "logp_old": half, "sum_sq_probs": torch.full((4, 3), 0.7)}
    for leave_one_out, plain in ((False, GroupMean()), (True, LeaveOneOut())):
        got = advantages(OptimalBaseline(weight, leave_one_out), rollouts, **signals)
        torch.testing.assert_close(got, advantages(plain, rollouts))


def test_a_weighted_pair_left_out_is_leave_one_out(rollouts_of: Build) -> None:
    rollouts = one_group(rollouts_of, [1.0, 0.25])
    got = advantages(OptimalBaseline("exact", True), rollouts, score_norms=torch.tensor([100.0, 0.01]))
    assert torch.equal(got, advantages(LeaveOneOut(), rollouts))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(-50, 50), st.floats(0.01, 100))
def test_shift_and_scale_of_rewards(
    random_rollouts: Build, random_signals, seed: int, shift: float, scale: float
) -> None:
    """A constant added to all rewards changes nothing; a factor goes through, or away with scale=std."""
    rollouts = random_rollouts(seed, dtype=torch.float64)
    moved = rollouts.replace(reward=rollouts.reward * scale + shift)
    signals = random_signals(rollouts)
    for estimator in (GroupMean(), LeaveOneOut(), OptimalBaseline("length"), OptimalBaseline("exact", True)):
        expected = advantages(estimator, rollouts, **signals) * scale
        torch.testing.assert_close(advantages(estimator, moved, **signals), expected, rtol=1e-6, atol=1e-9)
    free = GroupMean("std", epsilon=0.0)
    torch.testing.assert_close(advantages(free, moved), advantages(free, rollouts), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rewards", [[0.95] * 7, [0.1] * 3, [1 / 3] * 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pitfall_09_constant_groups_scaled_by_a_tiny_epsilon(rollouts_of: Build, rewards, dtype: torch.dtype) -> None:
    assert not advantages(GroupMean("std", epsilon=1e-12), one_group(rollouts_of, rewards, dtype)).any()


def test_token_rewards_by_hand(rollouts_of: Build) -> None:
    """Returns-to-go [5, 3, 2] and [1, 1, 1] against the mean 3 of the totals; the KL earned before t is not t's."""
    rollouts = rollouts_of(
        torch.tensor([2.0, 1.0]),
        torch.tensor([0, 0]),
        torch.ones(2, 3, dtype=torch.bool),
        token_reward=torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
    )
    assert advantages(GroupMean(), rollouts).tolist() == [[2, 0, -1], [-2, -2, -2]]
    assert advantages(LeaveOneOut(), rollouts).tolist() == [[4, 2, 1], [-4, -4, -4]]


def test_equal_returns_with_token_rewards_are_not_divided_by_epsilon(rollouts_of: Build) -> None:
    """Identical completions: totals are equal, tokens differ by the KL already paid, and std is exactly 0."""
    rollouts = rollouts_of(
        torch.tensor([1.0, 1.0]),
        torch.tensor([0, 0]),
        torch.ones(2, 2, dtype=torch.bool),
        token_reward=torch.tensor([[-0.25, -0.5], [-0.25, -0.5]]),
    )
    assert advantages(GroupMean("std"), rollouts).tolist() == [[0.0, 0.25], [0.0, 0.25]]


def test_masked_truncations_stay_in_the_baseline(rollouts_of: Build) -> None:
    """A row that is out of the loss but has a reward counts for its siblings."""
    rollouts = one_group(rollouts_of, [1.0, 0.0], in_loss=torch.tensor([True, False]))
    assert advantages(GroupMean(), rollouts).squeeze(1).tolist() == [0.5, -0.5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GroupMean("true"), "GroupMean.scale is 'true': known: none, std"),  # type: ignore[arg-type]
        (lambda: GroupMean(None), "GroupMean.scale is None"),  # type: ignore[arg-type]
        (lambda: GroupMean("stdd"), "did you mean std"),  # type: ignore[arg-type]
        (lambda: GroupMean("std", -1e-6), "GroupMean.epsilon is -1e-06: give a number at least 0"),
        (lambda: OptimalBaseline("lengths"), r"did you mean length\?"),  # type: ignore[arg-type]
        (lambda: OptimalBaseline(leave_one_out="none"), "give true or false"),  # type: ignore[arg-type]
    ],
)
def test_pitfall_10_wrong_options(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_pitfall_10_unknown_options() -> None:
    with pytest.raises(TypeError):
        GroupMean(normalise=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        LeaveOneOut(scale="std")  # type: ignore[call-arg]
