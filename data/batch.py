"""The rollout batch: prompts, completions, rewards and everything else that is known about them, as tensors.

Nothing is computed here beyond selecting, moving and padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

PER_PROMPT = ("prompt_ids", "prompt_mask", "prompt_id")
PER_TOKEN = (
    "completion_ids",
    "completion_mask",
    "action_mask",
    "token_reward",
    "logp_old",
    "logp_sampler",
    "logp_ref",
    "entropy",
    "sum_sq_probs",
    "step_index",
    "turn_index",
    "advantages",
)


@dataclass
class RolloutBatch:
    """N completions of P prompts. P, Lp = prompts and their padded length; N, T = completions and their padded
    length; S = the largest number of steps of a completion.

    Prompts are padded on the left, completions on the right. Rows belong together by `group`, never by position.
    """

    prompt_ids: Tensor  # (P, Lp) long, left-padded
    prompt_mask: Tensor  # (P, Lp) bool
    prompt_id: Tensor  # (P,) long: the prompt's number in its data set, stable over the run
    prompt_index: Tensor  # (N,) long: the row of `prompt_ids` that a completion continues
    group: Tensor  # (N,) long: completions that are compared with each other
    completion_ids: Tensor  # (N, T) long, right-padded
    completion_mask: Tensor  # (N, T) bool: attended
    action_mask: Tensor  # (N, T) bool: sampled by the policy, the end token included; all losses
    reward: Tensor  # (N,) float; meaningless where `reward_valid` is False
    reward_valid: Tensor  # (N,) bool: False where the reward is missing
    truncated: Tensor  # (N,) bool: ended by the length limit, not by an end token
    in_loss: Tensor  # (N,) bool: False for rows that no loss may see (missing reward, masked truncation)
    policy_version: Tensor  # (N,) long: optimizer steps done when the row was sampled
    member: Tensor | None = None  # (N,) long: a completion's number within its prompt, as sampled; part of its seeds
    reward_terms: dict[str, Tensor] = field(default_factory=dict)  # name -> (N,) float, NaN where missing
    token_reward: Tensor | None = None  # (N, T) float: rewards earned at a token, beside `reward` at the end
    logp_old: Tensor | None = None  # (N, T) float: under the behaviour policy, by the scorer
    logp_sampler: Tensor | None = None  # (N, T) float: the same by the sampler
    logp_ref: Tensor | None = None  # (N, T) float: under the reference policy
    entropy: Tensor | None = None  # (N, T) float, nats
    sum_sq_probs: Tensor | None = None  # (N, T) float: sum over the vocabulary of squared probabilities
    step_index: Tensor | None = None  # (N, T) long: the step a token belongs to, -1 outside
    turn_index: Tensor | None = None  # (N, T) long: the turn a token belongs to, -1 outside
    step_reward: Tensor | None = None  # (N, S) float
    step_mask: Tensor | None = None  # (N, S) bool
    answer_span: Tensor | None = None  # (N, 2) long: first token of the answer and one past its last; (-1, -1) if none
    advantages: Tensor | None = None  # (N, T) float, once an estimator has given them
    prompt_texts: list[str] = field(default_factory=list)  # P
    completion_texts: list[str] = field(default_factory=list)  # N
    examples: list[dict[str, Any]] = field(default_factory=list)  # P: the data set's columns

    def __post_init__(self) -> None:
        n, t = self.completion_ids.shape
        p, lp = self.prompt_ids.shape
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                shape = tuple(value.shape)
                if f.name in PER_TOKEN:
                    expected: tuple[int, ...] = (n, t)
                elif f.name in PER_PROMPT:
                    expected = (p, lp)[: value.ndim]
                else:
                    expected = (n, *shape[1:])
                if shape != expected:
                    raise ValueError(f"RolloutBatch.{f.name} has shape {shape}, expected {expected}")

    def __len__(self) -> int:
        """N, the number of completions."""
        return self.completion_ids.shape[0]

    @property
    def loss_mask(self) -> Tensor:
        """(N, T) bool: the tokens that losses sum over and that denominators count."""
        return self.action_mask & self.in_loss[:, None]

    @property
    def lengths(self) -> Tensor:
        """(N,) long: sampled tokens of each completion."""
        return self.action_mask.sum(1)

    def to(self, device: torch.device | str) -> RolloutBatch:
        """All tensors on `device`."""
        moved: dict[str, Any] = {
            f.name: value.to(device) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, reward_terms={k: v.to(device) for k, v in self.reward_terms.items()}, **moved)

    def replace(self, **changes: Any) -> RolloutBatch:
        """A copy with some fields exchanged."""
        return replace(self, **changes)

    def __getitem__(self, rows: Tensor | slice | Sequence[int]) -> RolloutBatch:
        """The given completions (bool mask, indices or slice), with only the prompts that they continue and
        without columns that are padding for all of them."""
        device = self.completion_ids.device
        if isinstance(rows, slice):
            rows = torch.arange(len(self), device=device)[rows]
        rows = torch.as_tensor(rows, device=device)
        if rows.dtype == torch.bool:
            rows = rows.nonzero().squeeze(1)
        prompts, prompt_index = torch.unique(self.prompt_index[rows], return_inverse=True)
        width = _used_width(self.completion_mask[rows])
        start = self.prompt_ids.shape[1] - _used_width(self.prompt_mask[prompts].flip(1))
        chosen: dict[str, Any] = {"prompt_index": prompt_index}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "prompt_index" or not isinstance(value, Tensor):
                continue
            if f.name in PER_PROMPT:
                chosen[f.name] = value[prompts][:, start:] if value.ndim == 2 else value[prompts]
            else:
                chosen[f.name] = value[rows][:, :width] if f.name in PER_TOKEN else value[rows]
        chosen["reward_terms"] = {k: v[rows] for k, v in self.reward_terms.items()}
        for name, index in (("prompt_texts", prompts), ("examples", prompts), ("completion_texts", rows)):
            values = getattr(self, name)
            chosen[name] = [values[i] for i in index.tolist()] if values else []
        return replace(self, **chosen)

    def rows_by_group(self) -> list[Tensor]:
        """The row indices of each group, in the order in which the groups first appear."""
        found: dict[int, list[int]] = {}
        for row, group in enumerate(self.group.tolist()):
            found.setdefault(group, []).append(row)
        return [torch.tensor(rows, device=self.group.device) for rows in found.values()]

    def rows_by_token_budget(self, tokens: int, shared_prompts: bool = False) -> Iterator[Tensor]:
        """Cut the rows into runs whose size stays within `tokens`; a row that alone is larger makes a run of its own.

        The size is the padded one, rows x (longest prompt + longest completion), and rows of similar length go
        together. With `shared_prompts` it is the number of tokens when each prompt stands once, and rows of the same
        prompt go together.
        """
        if shared_prompts:
            yield from self._rows_by_prompt(tokens)
            return
        prompt = self.prompt_mask.sum(1)[self.prompt_index]
        completion = self.completion_mask.sum(1)
        order = torch.argsort(prompt + completion, stable=True, descending=True).tolist()
        lengths = list(zip(prompt.tolist(), completion.tolist(), strict=True))
        run: list[int] = []
        longest_prompt = longest_completion = 0
        for row in order:
            p, c = max(longest_prompt, lengths[row][0]), max(longest_completion, lengths[row][1])
            if run and (len(run) + 1) * (p + c) > tokens:
                yield torch.tensor(run, device=self.group.device)
                run, (p, c) = [], lengths[row]
            run.append(row)
            longest_prompt, longest_completion = p, c
        if run:
            yield torch.tensor(run, device=self.group.device)

    def _rows_by_prompt(self, tokens: int) -> Iterator[Tensor]:
        prompts, completions = self.prompt_mask.sum(1).tolist(), self.completion_mask.sum(1).tolist()
        prompt_of = self.prompt_index.tolist()
        run: list[int] = []
        size = 0
        for row in sorted(range(len(self)), key=lambda row: prompt_of[row]):
            new_prompt = not run or prompt_of[run[-1]] != prompt_of[row]
            more = completions[row] + (prompts[prompt_of[row]] if new_prompt else 0)
            if run and size + more > tokens:
                yield torch.tensor(run, device=self.group.device)
                run, size, more = [], 0, completions[row] + prompts[prompt_of[row]]
            run.append(row)
            size += more
        if run:
            yield torch.tensor(run, device=self.group.device)


def _used_width(mask: Tensor) -> int:
    """1 + the last column in which any row is True (0 for none)."""
    used = mask.any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0
