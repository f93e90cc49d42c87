"""What the datamodule needs of a policy and of a sampling engine. The engines are in `modules/samplers/`."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from .budget import BudgetCounter
from .configurable import Configurable

Purpose = Literal["rollout", "draft", "refinement", "continuation", "validation"]


class PolicyLike(Protocol):
    """What `data` uses of a policy (`modules/policy.py` has it)."""

    max_prompt_tokens: int | None
    version: int  # optimizer steps done

    def encode_prompt(self, prompt: str | list[dict[str, str]]) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def token_char_ends(self, ids: Sequence[int]) -> list[int]: ...
    def inference(self) -> AbstractContextManager[Any]: ...
    def limits(self, purpose: Purpose) -> "Limits": ...


@dataclass(frozen=True)
class Limits:
    """From which distribution to sample, and for how long."""

    max_new_tokens: int
    temperature: float = 1.0  # divides the logits; 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off


@dataclass
class Samples:
    """Completions in the order prefix 0 member 0, prefix 0 member 1, …; right-padded. N = prefixes x members."""

    ids: Tensor  # (N, T) long
    mask: Tensor  # (N, T) bool, the end token included
    truncated: Tensor  # (N,) bool
    logp: Tensor  # (N, T) float32, log-probabilities at the sampling temperature
    entropy: Tensor  # (N, T) float32, nats
    sum_sq_probs: Tensor  # (N, T) float32


Finished = Callable[[Sequence[int], Samples], None]
"""Is told which prefixes are finished, by their place in the call, and all of their completions."""


class Sampler(Configurable, ABC):
    """A sampling engine. It counts the budget itself, so nothing escapes.

    `budget` and `run_seed` are set by the datamodule.
    """

    def __init__(self) -> None:
        self.budget = BudgetCounter()
        self.run_seed = 0

    def sample(
        self,
        policy: Any,
        prefixes: Sequence[Sequence[int]],
        members: int,
        purpose: Purpose,
        limits: Limits,
        *,
        prompt_ids: Sequence[int],
        step: int,
        attempt: int = 0,
        finished: Finished | None = None,
    ) -> Samples:
        """Sample `members` completions of each prefix (token ids).

        Args:
            prompt_ids: the stable number of each prefix's prompt; part of the seed.
            step: the rollout batch's number; part of the seed.
            attempt: which try of the same prompt at the same step this is; part of the seed.
            finished: called by an engine that samples in waves of whole prompts after each of them, so that something
                can be done with these while the next is sampled. Other engines never call it.
        """
        seeds = [
            seed_of(self.run_seed, step, prompt_id, purpose, attempt, member)
            for prompt_id in prompt_ids
            for member in range(members)
        ]
        with policy.inference():
            samples = self.generate(policy, prefixes, members, limits, seeds, finished)
        if purpose != "validation":
            self.budget.add(len(prefixes), len(prefixes) * members, int(samples.mask.sum()))
        return samples

    @abstractmethod
    def generate(
        self,
        policy: Any,
        prefixes: Sequence[Sequence[int]],
        members: int,
        limits: Limits,
        seeds: Sequence[int],
        finished: Finished | None = None,
    ) -> Samples:
        """The engine: one seed a completion, in the order of `Samples`. A completion depends on its own prefix,
        the weights and its seed only, never on what else is in the call. See `sample` for `finished`."""


def seed_of(run: int, step: int, prompt_id: int, purpose: str, attempt: int, member: int) -> int:
    """A 63-bit seed for one completion; any change of any argument gives an unrelated one."""
    text = f"{run}/{step}/{prompt_id}/{purpose}/{attempt}/{member}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def uniforms(seeds: Sequence[int], length: int) -> Tensor:
    """(N, length) float64 in [0, 1): the random numbers of each completion, one a token."""
    rows = [torch.rand(length, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in seeds]
    return torch.stack(rows) if rows else torch.zeros(0, length, dtype=torch.float64)
