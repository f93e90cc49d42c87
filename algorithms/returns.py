"""Returns: what a completion earns in all, and from each token on. Baselines are not subtracted here."""

import torch
from torch import Tensor

from ..data.batch import RolloutBatch


def return_to_go(rewards: Tensor, mask: Tensor, discount: float = 1.0) -> Tensor:
    """G_t = sum over masked t' >= t of discount^(masked tokens between) * rewards_t'. (N, T); 0 outside the mask.

    Tokens outside the mask (an environment's, padding) earn nothing and are no step in time: rewards [0, 0, 1] with
    mask [1, 0, 1] and discount 0.5 give 0.5 at the first token.

    Args:
        rewards: (N, T) floating point; anything outside the mask.
        mask: (N, T) bool.
    """
    return torch.where(mask, _accumulated(rewards, mask, discount), 0.0)


def _accumulated(rewards: Tensor, mask: Tensor, discount: float) -> Tensor:
    """(N, T): as `return_to_go`, and outside the mask the value of the next token inside it."""
    if rewards.ndim != 2 or rewards.shape != mask.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"rewards and mask must be (N, T) and mask bool; got {tuple(rewards.shape)}, {tuple(mask.shape)} "
            f"{mask.dtype}"
        )
    earned = torch.where(mask, rewards, 0.0)
    if discount == 1.0:
        return earned.flip(1).cumsum(1).flip(1)
    sums = torch.zeros_like(earned)
    ahead = earned.new_zeros(len(earned))
    for t in reversed(range(earned.shape[1])):
        ahead = torch.where(mask[:, t], earned[:, t] + discount * ahead, ahead)
        sums[:, t] = ahead
    return sums


def returns_to_go(rollouts: RolloutBatch) -> Tensor:
    """G (N, T) = reward, which comes at the end, + the token rewards from t on; 0 outside the action mask.

    A missing reward counts as 0 here: such a row gets no advantage.
    """
    reward = torch.where(rollouts.reward_valid, rollouts.reward, 0.0)[:, None]
    if rollouts.token_reward is None:
        return torch.where(rollouts.action_mask, reward, 0.0)
    ahead = _accumulated(rollouts.token_reward, rollouts.action_mask, 1.0)
    return torch.where(rollouts.action_mask, reward + ahead, 0.0)


def total_return(rollouts: RolloutBatch) -> Tensor:
    """(N,): reward + all token rewards of a completion, bit for bit the return-to-go of its first sampled token.

    A missing reward counts as 0 here, and an empty completion has its reward alone.
    """
    reward = torch.where(rollouts.reward_valid, rollouts.reward, 0.0)
    if rollouts.token_reward is None or rollouts.token_reward.shape[1] == 0:
        return reward
    return reward + _accumulated(rollouts.token_reward, rollouts.action_mask, 1.0)[:, 0]
