"""From sampled token ids, verdicts and rewards to one RolloutBatch: spans of text become spans of tokens here."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .batch import RolloutBatch
from .rewards import RewardResult
from .sampler import PolicyLike, Samples
from .tasks.base import Verdict

Truncated = Literal["keep", "mask", "penalise"]


def assemble(
    samples: Samples,
    prefixes: Sequence[Sequence[int]],
    prompt_texts: Sequence[str],
    examples: Sequence[dict[str, Any]],
    completion_texts: Sequence[str],
    verdicts: Sequence[Verdict],
    rewards: RewardResult,
    policy: PolicyLike,
    truncated: Truncated = "keep",
    truncation_penalty: float = 0.0,
) -> RolloutBatch:
    """One group a prompt; rows in the order of `samples`.

    Args:
        truncated: what happens to completions without an end token. "keep": nothing. "mask": out of every loss, while
            their reward stays in their siblings' baseline. "penalise": `truncation_penalty` is subtracted from their
            reward.
    """
    n, width = samples.ids.shape
    members = n // len(prefixes)
    prompt_index = torch.arange(len(prefixes)).repeat_interleave(members)
    valid = torch.tensor(rewards.valid, dtype=torch.bool)
    reward = torch.where(valid, torch.tensor(rewards.reward, dtype=torch.float32), 0.0)
    in_loss = valid
    if truncated == "mask":
        in_loss = valid & ~samples.truncated
    elif truncated == "penalise":
        reward = reward - truncation_penalty * (samples.truncated & valid)
    ids, mask = _left_padded(prefixes)
    ends = _token_ends(samples, verdicts, policy)
    step_index, step_reward, step_mask = _steps(verdicts, ends, samples.mask)
    return RolloutBatch(
        prompt_ids=ids,
        prompt_mask=mask,
        prompt_id=torch.tensor([example["prompt_id"] for example in examples]),
        prompt_index=prompt_index,
        group=prompt_index.clone(),
        completion_ids=samples.ids,
        completion_mask=samples.mask,
        action_mask=samples.mask,
        reward=reward,
        reward_valid=valid,
        truncated=samples.truncated,
        in_loss=in_loss,
        policy_version=torch.full((n,), policy.version),
        member=torch.arange(members).repeat(len(prefixes)),
        reward_terms={name: torch.tensor(values, dtype=torch.float32) for name, values in rewards.terms.items()},
        logp_sampler=samples.logp,
        entropy=samples.entropy,
        sum_sq_probs=samples.sum_sq_probs,
        step_index=step_index,
        step_reward=step_reward,
        step_mask=step_mask,
        answer_span=_answer_spans(verdicts, ends),
        prompt_texts=list(prompt_texts),
        completion_texts=list(completion_texts),
        examples=list(examples),
    )


def _left_padded(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(P, Lp) ids, zeros on the left, and the mask of the real ones."""
    width = max(len(sequence) for sequence in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = torch.as_tensor(sequence)
        mask[row, width - len(sequence) :] = True
    return ids, mask


def _token_ends(samples: Samples, verdicts: Sequence[Verdict], policy: PolicyLike) -> list[list[int]]:
    """For each completion with spans the character at which each of its tokens ends; an empty list for the others."""
    return [
        policy.token_char_ends(samples.ids[row, samples.mask[row]].tolist())
        if verdict.answer_span is not None or verdict.steps
        else []
        for row, verdict in enumerate(verdicts)
    ]


def _answer_spans(verdicts: Sequence[Verdict], ends: list[list[int]]) -> Tensor | None:
    """(N, 2): first token that overlaps the answer and one past the last; (-1, -1) where there is none."""
    if all(verdict.answer_span is None for verdict in verdicts):
        return None
    spans = torch.full((len(verdicts), 2), -1, dtype=torch.long)
    for row, verdict in enumerate(verdicts):
        if verdict.answer_span is None:
            continue
        start, stop = verdict.answer_span
        starts = [0, *ends[row][:-1]]
        inside = [k for k, (a, b) in enumerate(zip(starts, ends[row], strict=True)) if a < stop and b > start]
        if inside:
            spans[row] = torch.tensor([inside[0], inside[-1] + 1])
    return spans


def _steps(
    verdicts: Sequence[Verdict], ends: list[list[int]], mask: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """step_index (N, T), step_reward (N, S), step_mask (N, S). A token belongs to the first step that ends after the
    token's start; what follows the last step (the end token included) belongs to the last step."""
    if all(verdict.steps is None for verdict in verdicts):
        return None, None, None
    steps = max(1, *(len(verdict.steps or []) for verdict in verdicts))
    step_index = torch.full(mask.shape, -1, dtype=torch.long)
    step_reward = torch.zeros(len(verdicts), steps)
    step_mask = torch.zeros(len(verdicts), steps, dtype=torch.bool)
    for row, verdict in enumerate(verdicts):
        if not verdict.steps:
            continue
        stops = [stop for _, stop in verdict.steps]
        starts = [0, *ends[row][:-1]]
        of_token = [next((j for j, stop in enumerate(stops) if start < stop), len(stops) - 1) for start in starts]
        step_index[row, : len(of_token)] = torch.tensor(of_token, dtype=torch.long)
        if verdict.step_rewards is not None:
            step_reward[row, : len(stops)] = torch.tensor(verdict.step_rewards)
            step_mask[row, : len(stops)] = True
    return step_index, step_reward, step_mask
