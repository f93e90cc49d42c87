"""Credit by steps: process supervision of the group."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...data.batch import RolloutBatch
from ..groups import group_mean
from .base import AdvantageContext, AdvantageEstimator, Scale, check_scale, credited_tokens, std_scale


class StepLevel(AdvantageEstimator):
    """Process supervision: step rewards, standardised over all steps of the group, added up from a token's step on.

    All step rewards r_{i,j} of a group's valid completions are pooled; r~ = (r - mean) / (std + epsilon), with the
    unbiased standard deviation; A_{i,t} = sum of r~_{i,j} over the steps that end at or after t. The outcome reward
    itself is not used. With one step a completion this is GroupMean with the same scale.

    The last step runs to the end of the completion, and a token between two steps belongs to the next one. A token
    reward (KL in the reward) is added to the reward of its token's step before pooling. Completions without a step get
    0, and so does a group whose pooled rewards are all equal; a step without a reward (outside step_mask) adds nothing.

    Args:
        scale: std to divide by the pooled unbiased standard deviation, none to subtract the pooled mean only.
        epsilon: added to the standard deviation; unused with scale=none.
    """

    paper = "process supervision of GRPO: arXiv 2402.03300, section 4.1.3"
    zero_on_constant_group = False

    def __init__(self, scale: Scale = "std", epsilon: float = 1e-6) -> None:
        check_scale("StepLevel", scale, epsilon)
        self.scale = scale
        self.epsilon = epsilon

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"step_rewards"})

    @torch.no_grad()
    def __call__(self, rollouts: RolloutBatch, signals: Mapping[str, Tensor], context: AdvantageContext) -> Tensor:
        rewards = signals["step_rewards"]  # (N, S)
        credited = credited_tokens(rollouts)
        if rollouts.step_index is None or rollouts.step_mask is None:  # no completion of the batch has a step
            return rewards.new_zeros(credited.shape)
        steps, step = rollouts.step_mask, step_of_token(rollouts.step_index)
        if rewards.shape != steps.shape:
            raise ValueError(f"step_rewards are {tuple(rewards.shape)}, step_mask is {tuple(steps.shape)}")
        if rollouts.token_reward is not None:
            dtype = torch.promote_types(rewards.dtype, rollouts.token_reward.dtype)
            earned = torch.where(rollouts.action_mask & (step >= 0), rollouts.token_reward.to(dtype), 0.0)
            rewards = rewards.to(dtype).scatter_add(1, step.clamp(min=0), earned)
        pooled = rewards.flatten(), rollouts.group.repeat_interleave(rewards.shape[1])
        valid = (steps & rollouts.reward_valid[:, None]).flatten()
        standard = pooled[0] - group_mean(*pooled, valid)
        if self.scale == "std":
            standard = standard / std_scale(*pooled, valid, self.epsilon)
        standard = torch.where(valid, standard, 0.0).view_as(rewards)
        ahead = standard.flip(1).cumsum(1).flip(1)  # (N, S): from step j on
        return torch.where(credited & (step >= 0), ahead.gather(1, step.clamp(min=0)), 0.0)


def step_of_token(step_index: Tensor) -> Tensor:
    """(N, T) long: the step whose credit a token shares: its own, else the next one, else the last one; -1 in a row
    without steps.

    Args:
        step_index: (N, T) long, -1 outside steps; does not decrease along a row's steps.
    """
    if step_index.shape[1] == 0:
        return step_index
    none = torch.iinfo(step_index.dtype).max
    ahead = torch.where(step_index >= 0, step_index, none).flip(1).cummin(1).values.flip(1)
    return torch.where(ahead == none, step_index.amax(1, keepdim=True), ahead)
