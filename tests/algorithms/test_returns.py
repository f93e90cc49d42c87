"""Returns: gaps in the mask, where the outcome goes, and agreement between returns-to-go and totals."""

from collections.abc import Callable

import pytest
import torch

from apportion.algorithms.returns import return_to_go, returns_to_go, total_return
from apportion.data.batch import RolloutBatch


def test_pitfall_12_crosses_masked_gaps() -> None:
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[True, False, True]])
    assert return_to_go(rewards, mask, 0.5).tolist() == [[0.5, 0.0, 1.0]]
    assert return_to_go(rewards, mask).tolist() == [[1.0, 0.0, 1.0]]


@pytest.mark.parametrize("discount", [1.0, 0.5, 0.0])
def test_by_definition(discount: float) -> None:
    draw = torch.Generator().manual_seed(3)
    rewards = torch.randn(5, 7, generator=draw, dtype=torch.float64)
    mask = torch.rand(5, 7, generator=draw) < 0.6
    rewards[~mask] = torch.nan
    got = return_to_go(rewards, mask, discount)
    for i in range(5):
        sampled = [t for t in range(7) if mask[i, t]]
        for t in range(7):
            later = [s for s in sampled if s >= t]
            expected = sum(discount**k * float(rewards[i, s]) for k, s in enumerate(later)) if mask[i, t] else 0.0
            assert float(got[i, t]) == pytest.approx(expected, abs=1e-12)


def test_outcome_and_token_rewards(rollouts_of: Callable[..., RolloutBatch]) -> None:
    mask = torch.tensor([[True, False, True, False], [True, True, True, True], [False, False, False, False]])
    token_reward = torch.tensor([[1.0, 99.0, 2.0, torch.nan], [0.0, 0.5, 0.0, 0.25], [9.0, 9.0, 9.0, 9.0]])
    rollouts = rollouts_of(
        torch.tensor([10.0, torch.nan, 4.0]),
        torch.tensor([0, 0, 0]),
        mask,
        reward_valid=torch.tensor([True, False, True]),
        token_reward=token_reward,
    )
    assert returns_to_go(rollouts).tolist() == [[13, 0, 12, 0], [0.75, 0.75, 0.25, 0.25], [0, 0, 0, 0]]
    assert total_return(rollouts).tolist() == [13, 0.75, 4]
    plain = rollouts.replace(token_reward=None)
    assert returns_to_go(plain).tolist() == [[10, 0, 10, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert total_return(plain).tolist() == [10, 0, 4]


def test_totals_are_the_first_return_to_go_to_the_last_bit(random_rollouts: Callable[..., RolloutBatch]) -> None:
    """Rounding differently would turn equal returns into a difference that a standard deviation blows up."""
    for seed in range(5):
        rollouts = random_rollouts(seed, width=40, token_reward=True)
        started = rollouts.action_mask.any(1)
        first = rollouts.action_mask.long().argmax(1, keepdim=True)
        ahead = returns_to_go(rollouts).gather(1, first).squeeze(1)
        assert torch.equal(ahead[started], total_return(rollouts)[started])


def test_no_column_at_all(rollouts_of: Callable[..., RolloutBatch]) -> None:
    """A batch in which every completion is empty has width 0."""
    nothing = torch.zeros(2, 0, dtype=torch.bool)
    rollouts = rollouts_of(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]), nothing, token_reward=torch.zeros(2, 0))
    assert returns_to_go(rollouts).shape == (2, 0)
    assert total_return(rollouts).tolist() == [1.0, 2.0]


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\(N, T\)"):
        return_to_go(torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask bool"):
        return_to_go(torch.zeros(2, 3), torch.zeros(2, 3))
