"""Builders of rollout batches for all tests, as session fixtures (so that hypothesis may use them too)."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from apportion.data.batch import RolloutBatch


def make_rollouts(reward: Tensor, group: Tensor, mask: Tensor, **fields: Any) -> RolloutBatch:
    """A batch of given rewards (N,), group ids (N,) and sampled tokens (N, T), one prompt a group; `fields` are any
    other fields of RolloutBatch, which replace what is made up here."""
    n = len(reward)
    ids, prompt_index = torch.unique(group, return_inverse=True)
    valid = fields.get("reward_valid", torch.ones(n, dtype=torch.bool))
    made: dict[str, Any] = {
        "prompt_ids": torch.ones(len(ids), 2, dtype=torch.long),
        "prompt_mask": torch.ones(len(ids), 2, dtype=torch.bool),
        "prompt_id": ids,
        "prompt_index": prompt_index,
        "group": group,
        "completion_ids": mask.long(),
        "completion_mask": mask,
        "action_mask": mask,
        "reward": reward,
        "reward_valid": valid,
        "truncated": torch.zeros(n, dtype=torch.bool),
        "in_loss": valid,
        "policy_version": torch.zeros(n, dtype=torch.long),
    }
    return RolloutBatch(**{**made, **fields})


def make_random_rollouts(
    seed: int = 0,
    sizes: Sequence[int] = (4, 3, 2, 5),
    width: int = 8,
    dtype: torch.dtype = torch.float32,
    missing: float = 0.0,
    token_reward: bool = False,
    gaps: bool = True,
    group_ids: Sequence[int] = (7, -3, 40, 0),
) -> RolloutBatch:
    """Groups of unequal sizes under arbitrary ids, rows shuffled, completions of unequal lengths.

    The first row in the order of sampling is empty and the second is as long as the batch is wide and truncated. With
    steps, step rewards, answers, and gaps of tokens that the policy did not sample. The same seed gives the same
    numbers in every dtype.

    Args:
        missing: the share of rows whose reward is missing; it is NaN there.
        token_reward: give each sampled token a reward of its own.
        gaps: let some tokens inside a completion be attended, but not sampled.
        group_ids: one id a group.
    """
    draw = torch.Generator().manual_seed(seed)
    n = sum(sizes)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (n,), generator=draw)
    lengths[:2] = torch.tensor([0, width])[: min(n, 2)]
    position = torch.arange(width)
    completion = position < lengths[:, None]
    holes = (uniform(n, width) < 0.2) & gaps
    action = completion & ~(holes & (position < lengths[:, None] - 1) & (position > 0))
    reward = torch.where(uniform(n) < 0.5, (uniform(n) < 0.5).double(), uniform(n))
    valid = uniform(n) >= missing
    steps = 3
    step_index = torch.where(completion, (position * steps // lengths.clamp(min=1)[:, None]).clamp(max=steps - 1), -1)
    has_step = (step_index[:, :, None] == torch.arange(steps)).any(1)
    answer = torch.stack([lengths - 1, lengths], 1)
    answer[(lengths < 2) | (uniform(n) < 0.2)] = -1
    token_rewards = torch.where(action, uniform(n, width) - 0.5, 0.0).to(dtype)
    group = torch.tensor(group_ids[: len(sizes)]).repeat_interleave(torch.tensor(sizes))
    rollouts = make_rollouts(
        torch.where(valid, reward, torch.nan).to(dtype),
        group,
        action,
        completion_ids=torch.randint(1, 50, (n, width), generator=draw) * completion,
        completion_mask=completion,
        reward_valid=valid,
        truncated=lengths == width,
        member=torch.cat([torch.arange(size) for size in sizes]),
        token_reward=token_rewards if token_reward else None,
        step_index=step_index,
        step_reward=torch.where(has_step, (uniform(n, steps) < 0.6).double(), 0.0).to(dtype),
        step_mask=has_step,
        answer_span=answer,
    )
    return rollouts[torch.randperm(n, generator=draw)]


def make_random_signals(rollouts: RolloutBatch, seed: int = 0) -> dict[str, Tensor]:
    """A plausible value of every signal that an estimator may declare, in the dtype of the rewards.

    A row's numbers depend on the seed, its group and its member only, not on its place or on the padding.
    """
    n, width = rollouts.action_mask.shape
    assert rollouts.member is not None
    drawn = torch.zeros(n, 5, width, dtype=torch.float64)
    for row, (group, member) in enumerate(zip(rollouts.group.tolist(), rollouts.member.tolist(), strict=True)):
        length = int(rollouts.completion_mask[row].sum())
        generator = torch.Generator().manual_seed(hash((seed, group, member)) % 2**31)
        for line in range(5):
            drawn[row, line, :length] = torch.rand(length, generator=generator, dtype=torch.float64)
    probability, extra, entropy, influence, values = drawn.unbind(1)
    mask = rollouts.completion_mask
    signals = {
        "logp_old": torch.where(mask, (0.05 + 0.9 * probability).log(), 0.0),
        "sum_sq_probs": torch.where(mask, (0.05 + 0.9 * probability).square() + 0.05 * extra, 0.0),
        "entropy": entropy,
        "answer_influence": influence,
        "values": values,
        "score_norms": (drawn.sum((1, 2)) + 0.1) * mask.any(1),
    }
    if rollouts.step_reward is not None:
        signals["step_rewards"] = rollouts.step_reward.double()
        signals["step_values"] = rollouts.step_reward.double() * 0.5
    return {name: value.to(rollouts.reward.dtype) for name, value in signals.items()}


@pytest.fixture(scope="session")
def rollouts_of() -> Callable[..., RolloutBatch]:
    return make_rollouts


@pytest.fixture(scope="session")
def random_rollouts() -> Callable[..., RolloutBatch]:
    return make_random_rollouts


@pytest.fixture(scope="session")
def random_signals() -> Callable[..., dict[str, Tensor]]:
    return make_random_signals
