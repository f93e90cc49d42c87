"""What a policy objective is: the loss that an advantage is put into."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ...data.configurable import Configurable

Scope = Literal["token", "sequence", "group"]


@dataclass
class ObjectiveOutput:
    """loss: (N, T) per token, to be aggregated; `clipped`: (N, T) bool, tokens whose gradient the clip removed."""

    loss: Tensor
    clipped: Tensor | None = None


class PolicyObjective(Configurable, nn.Module, ABC):
    """Per-token losses from log-probabilities and advantages.

    paper: where the formula is from; shown by `apportion list`.
    scope: "token": a token's loss needs that token only. "sequence": it needs its whole completion. "group": it needs
        detached sequence log-probabilities of the whole group, from which it makes per-sequence coefficients, so that
        micro-batches may still cut a group.
    aggregations: the aggregations that it may be combined with; None = all.
    State (a dual variable) is a buffer: it is saved with the module and reduced over processes.
    """

    paper: ClassVar[str]
    scope: ClassVar[Scope] = "token"
    aggregations: ClassVar[frozenset[str] | None] = None

    @abstractmethod
    def forward(self, logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor) -> ObjectiveOutput:
        """The loss of each token, in float32 or float64.

        Args:
            logp: (N, T) under the current policy, with gradient.
            logp_old: (N, T) under the behaviour policy, detached. On an exactly on-policy step `logp.detach()`.
            advantages: (N, T), detached.
            mask: (N, T) bool, the tokens that count; the loss elsewhere is exactly 0, whatever stands there.
        """


def check_token_tensors(logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor) -> None:
    """Raise a ValueError unless all four are (N, T) and the mask is bool."""
    shapes = [tuple(x.shape) for x in (logp, logp_old, advantages, mask)]
    if logp.ndim != 2 or len(set(shapes)) != 1 or mask.dtype != torch.bool:
        raise ValueError(
            f"logp, logp_old, advantages and mask must be (N, T) and mask bool; got {shapes} and {mask.dtype}"
        )


def at_least_float32(value: Tensor) -> Tensor:
    """`value` in float32, or as it is in float64: ratios in bfloat16 would be off by 1 %."""
    return value if value.dtype == torch.float64 else value.float()
