"""What an advantage estimator is, and what every estimator of the form (return - baseline) / scale shares."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...data.batch import RolloutBatch
from ...data.configurable import Configurable
from ..groups import group_count, group_std
from ..options import check_choice, check_range
from ..returns import returns_to_go, total_return

Scale = Literal["none", "std"]


def _identity(value: Tensor) -> Tensor:
    return value


@dataclass
class AdvantageContext:
    """What an estimator may use beside the batch.

    reduce_sum: sums a tensor over all processes (identity on one). Estimators that pool over the batch use it.
    """

    reduce_sum: Callable[[Tensor], Tensor] = _identity


class AdvantageEstimator(Configurable, ABC):
    """Turns rewards (and declared signals) into one advantage per token.

    paper: where the formula is from; shown by `apportion list`.
    zero_on_constant_group: whether a group whose valid rewards are all equal gets exactly 0.
    smallest_group: the smallest group size that makes sense; a configured smaller one is refused.
    needs: the signals that it reads; an undeclared read is an error. A property where it depends on options.
    """

    paper: ClassVar[str]
    zero_on_constant_group: ClassVar[bool]
    smallest_group: ClassVar[int] = 2

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    @abstractmethod
    def __call__(self, rollouts: RolloutBatch, signals: Mapping[str, Tensor], context: AdvantageContext) -> Tensor:
        """(N, T) advantages, exactly 0 outside `action_mask` and on rows with a missing reward; no gradient."""


class BaselineEstimator(AdvantageEstimator):
    """A_{i,t} = (G_{i,t} - b_i) / s_i: the return from token t on against a baseline for the whole completion.

    Without token rewards G_{i,t} is the outcome reward at every token. Baseline and scale come from total returns.
    """

    @abstractmethod
    def baseline_and_scale(
        self, returns: Tensor, rollouts: RolloutBatch, signals: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Both (N,), the scale None for 1. `returns` (N,) are total returns, 0 where the reward is missing."""

    @torch.no_grad()
    def __call__(self, rollouts: RolloutBatch, signals: Mapping[str, Tensor], context: AdvantageContext) -> Tensor:
        baseline, scale = self.baseline_and_scale(total_return(rollouts), rollouts, signals)
        advantages = returns_to_go(rollouts) - baseline[:, None]
        if scale is not None:
            advantages = advantages / scale[:, None]
        return torch.where(credited_tokens(rollouts), advantages, 0.0)


def credited_tokens(rollouts: RolloutBatch) -> Tensor:
    """(N, T) bool: action tokens of rows whose reward is known, in groups with at least two such rows."""
    credited = rollouts.reward_valid & (group_count(rollouts.group, rollouts.reward_valid) >= 2)
    return rollouts.action_mask & credited[:, None]


def std_scale(values: Tensor, group: Tensor, valid: Tensor, epsilon: float) -> Tensor:
    """(N,): unbiased standard deviation of each group + epsilon, and 1 where the deviation is exactly 0: then a token
    differs from the baseline only by token rewards, which a division by epsilon would blow up."""
    std = group_std(values, group, valid)
    return torch.where(std > 0, std + epsilon, 1.0)


def check_scale(owner: str, scale: str, epsilon: float) -> None:
    """Raise a UsageError for an unknown kind of scale or an epsilon below 0."""
    check_choice(f"{owner}.scale", scale, ("none", "std"))
    check_range(f"{owner}.epsilon", epsilon, 0.0)
