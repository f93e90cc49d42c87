"""How prompts become rollouts: the interface of rollout schemes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..batch import RolloutBatch
from ..configurable import Configurable
from ..sampler import PolicyLike, Purpose, Sampler, Samples

Verify = Callable[[Sequence[dict[str, Any]], Sequence[Sequence[int]], Samples], RolloutBatch]


@dataclass
class RolloutRequest:
    """One step's work for a scheme.

    examples: the prompts, rows of the task's data set with "prompt_id".
    prefixes: the token ids of each prompt.
    step: the rollout batch's number, part of every seed.
    purpose: "rollout" while training (counts into the budget), "validation" for predictions.
    verify: turns completions of (examples, prefixes) into a RolloutBatch with rewards, steps and answer spans.
    verify_ahead: may be told of completions of some examples before `verify` is asked for them and others, so that
        slow verification begins while more is sampled. Changes no result.
    """

    examples: list[dict[str, Any]]
    prefixes: list[list[int]]
    group_size: int
    step: int
    purpose: Purpose
    policy: PolicyLike
    sampler: Sampler
    verify: Verify
    verify_ahead: Callable[[Sequence[dict[str, Any]], Samples], None]


class RolloutScheme(Configurable, ABC):
    """From prompts to one verified RolloutBatch. `paper` and `cost` are shown by `apportion list`."""

    paper: ClassVar[str]
    cost: ClassVar[str]

    @abstractmethod
    def collect(self, request: RolloutRequest) -> RolloutBatch: ...
