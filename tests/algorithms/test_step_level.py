"""Process supervision: hand-computed, against plain loops, and the identity with GroupMean at one step."""

import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from apportion.algorithms import AdvantageContext, GroupMean, StepLevel
from apportion.algorithms.advantages.step_level import step_of_token
from apportion.data.batch import RolloutBatch
from apportion.data.errors import UsageError

Build = Callable[..., RolloutBatch]


def advantages(estimator: StepLevel, rollouts: RolloutBatch, step_rewards: Tensor) -> Tensor:
    return estimator(rollouts, {"step_rewards": step_rewards}, AdvantageContext())


def test_by_hand(rollouts_of: Build) -> None:
    """Steps 1, 0 and 1 pooled: mean 2/3, so 1/3 and -2/3; the sum of the steps that end at or after a token."""
    rollouts = rollouts_of(
        torch.tensor([0.0, 1.0]),
        torch.tensor([5, 5]),
        torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool(),
        step_index=torch.tensor([[0, 0, 1, 1], [0, 0, -1, -1]]),
        step_mask=torch.tensor([[True, True], [True, False]]),
    )
    rewards = torch.tensor([[1.0, 0.0], [1.0, torch.nan]])
    got = advantages(StepLevel(scale="none"), rollouts, rewards)
    torch.testing.assert_close(got, torch.tensor([[-1 / 3, -1 / 3, -2 / 3, -2 / 3], [1 / 3, 1 / 3, 0, 0]]))
    deviation = statistics.stdev([1, 0, 1]) + 1e-6
    torch.testing.assert_close(advantages(StepLevel(), rollouts, rewards), got / deviation)


@pytest.mark.parametrize("token_reward", [False, True])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_against_plain_loops(random_rollouts: Build, token_reward: bool, scale) -> None:
    for seed in range(6):
        rollouts = random_rollouts(seed, dtype=torch.float64, missing=0.2, token_reward=token_reward)
        assert rollouts.step_reward is not None
        got = advantages(StepLevel(scale), rollouts, rollouts.step_reward)
        assert torch.allclose(got, by_loops(rollouts, scale), rtol=1e-9, atol=1e-12)


def by_loops(r: RolloutBatch, scale: str) -> Tensor:
    """Every token, step and group in its own loop; every token of these batches lies in a step."""
    assert r.step_reward is not None
    assert r.step_mask is not None
    assert r.step_index is not None
    n, width = r.action_mask.shape
    earned = {(i, j): float(r.step_reward[i, j]) for i in range(n) for j in range(3) if r.step_mask[i, j]}
    if r.token_reward is not None:
        for i in range(n):
            for t in range(width):
                if r.action_mask[i, t]:
                    earned[i, int(r.step_index[i, t])] += float(r.token_reward[i, t])
    out = torch.zeros(n, width, dtype=torch.float64)
    for i in range(n):
        members = [k for k in range(n) if r.group[k] == r.group[i] and r.reward_valid[k]]
        if not r.reward_valid[i] or len(members) < 2:
            continue
        pool = [value for (k, _), value in earned.items() if k in members]
        mean = statistics.fmean(pool)
        deviation = statistics.stdev(pool) if len(pool) > 1 else 0.0
        for t in range(width):
            if r.action_mask[i, t] and deviation > 0:
                ahead = sum(earned[i, j] - mean for j in range(int(r.step_index[i, t]), 3) if (i, j) in earned)
                out[i, t] = ahead / (deviation + 1e-6) if scale == "std" else ahead
    return out


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identity_9_one_step_is_group_mean(random_rollouts: Build, scale, dtype: torch.dtype) -> None:
    """Bit for bit, over the same numbers, the same epsilon and kind of deviation."""
    rollouts = random_rollouts(4, dtype=dtype, missing=0.2)
    single = rollouts.replace(
        step_index=torch.where(rollouts.completion_mask, 0, -1),
        step_mask=torch.ones(len(rollouts), 1, dtype=torch.bool),
        step_reward=None,
    )
    got = advantages(StepLevel(scale), single, rollouts.reward[:, None])
    expected = GroupMean(scale)(rollouts, {}, AdvantageContext())
    started = rollouts.completion_mask.any(1)
    assert torch.equal(got[started], expected[started])


def test_step_of_token() -> None:
    """Before, between and after the steps, padding, and a row without any."""
    index = torch.tensor([[-1, 0, 0, -1, 1, -1, -1], [-1] * 7, [0, 2, -1, -1, -1, -1, -1]])
    expected = [[0, 0, 0, 1, 1, 1, 1], [-1] * 7, [0, 2, 2, 2, 2, 2, 2]]
    assert step_of_token(index).tolist() == expected
    assert step_of_token(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0)


def test_token_rewards_go_to_the_step_that_earns_them(rollouts_of: Build) -> None:
    """A gap's token earns for the next step, a tail's for the last one, padding's for none."""
    rollouts = rollouts_of(
        torch.tensor([0.0, 0.0]),
        torch.tensor([0, 0]),
        torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]).bool(),
        token_reward=torch.tensor([[1.0, 2.0, 4.0, 8.0, 99.0], [0.0, 0.0, 99.0, 99.0, 99.0]]),
        step_index=torch.tensor([[0, -1, 1, -1, -1], [0, 1, -1, -1, -1]]),
        step_mask=torch.ones(2, 2, dtype=torch.bool),
    )
    got = advantages(StepLevel("none"), rollouts, torch.zeros(2, 2))
    mean = 15 / 4  # steps earn 1, 2 + 4 + 8, 0, 0
    expected = [[15 - 2 * mean, 14 - mean, 14 - mean, 14 - mean, 0], [-2 * mean, -mean, 0, 0, 0]]
    assert got.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_pooled_rewards_give_exactly_zero(random_rollouts: Build, dtype: torch.dtype) -> None:
    rollouts = random_rollouts(1, dtype=dtype)
    assert rollouts.step_mask is not None
    for scale in ("std", "none"):
        assert not advantages(StepLevel(scale), rollouts, torch.full(rollouts.step_mask.shape, 0.95, dtype=dtype)).any()


def test_completions_without_steps_get_nothing(rollouts_of: Build) -> None:
    """Also where no completion of the batch has any, so that there are no step fields at all."""
    rollouts = rollouts_of(
        torch.tensor([1.0, 0.0, 1.0]),
        torch.tensor([0, 0, 0]),
        torch.ones(3, 2, dtype=torch.bool),
        step_index=torch.tensor([[-1, -1], [0, 0], [0, 1]]),
        step_mask=torch.tensor([[False, False], [True, False], [True, True]]),
        token_reward=torch.tensor([[50.0, 50.0], [0.0, 0.0], [0.0, 0.0]]),
    )
    got = advantages(StepLevel("none"), rollouts, torch.tensor([[7.0, 7.0], [1.0, 7.0], [0.0, 1.0]]))
    torch.testing.assert_close(got, torch.tensor([[0, 0], [1 / 3, 1 / 3], [-1 / 3, 1 / 3]]))
    bare = rollouts.replace(step_index=None, step_mask=None)
    assert advantages(StepLevel(), bare, torch.zeros(3, 1)).tolist() == [[0, 0]] * 3


def test_the_outcome_itself_is_not_used(random_rollouts: Build) -> None:
    rollouts = random_rollouts(3)
    assert rollouts.step_reward is not None
    other = rollouts.replace(reward=rollouts.reward * 5 - 2)
    assert torch.equal(
        advantages(StepLevel(), rollouts, rollouts.step_reward), advantages(StepLevel(), other, rollouts.step_reward)
    )


def test_dtypes_mix_upwards(random_rollouts: Build) -> None:
    """A float32 KL does not round float64 step rewards."""
    rollouts = random_rollouts(3, token_reward=True)
    assert rollouts.step_reward is not None
    assert advantages(StepLevel(), rollouts, rollouts.step_reward.double()).dtype == torch.float64


def test_wrong_shapes_and_options(random_rollouts: Build) -> None:
    rollouts = random_rollouts(0)
    with pytest.raises(ValueError, match="step_rewards are"):
        advantages(StepLevel(), rollouts, torch.zeros(len(rollouts), 2))
    with pytest.raises(UsageError, match=r"StepLevel\.scale is 'true'"):
        StepLevel("true")  # type: ignore[arg-type]
