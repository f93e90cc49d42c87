"""Importance weights for rollouts whose sampler and scorer do not run the same policy to the last bit."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..data.configurable import Configurable
from .objectives.base import at_least_float32
from .options import check_choice, check_range


class TruncatedImportance(Configurable):
    """Policy losses times w = min(pi_old / pi_sampler, cap), detached: truncated importance sampling.

    pi_old is the scorer's policy at the time of sampling, pi_sampler what the engine drew from: in bf16, or with an
    engine of its own, the two differ, and what is trained on is off-policy by their quotient. Without a cap the
    weighted gradient is unbiased and may have a large variance; the cap trades some bias for it.

    Args:
        level: token, a weight for each token from its own quotient; sequence, one weight for a completion from the
            product of its tokens' quotients, which is what the unbiased gradient asks for.
        cap: the largest weight, above 0.
    """

    paper: ClassVar[str] = "truncated importance sampling: Ionides 2008; for mismatched engines: Yao et al. 2025"

    def __init__(self, level: Literal["token", "sequence"] = "token", cap: float = 2.0) -> None:
        check_choice("model.mismatch.level", level, ("token", "sequence"))
        check_range("model.mismatch.cap", cap, 0.0, above=True)
        self.level = level
        self.cap = cap

    def weights(self, logp_old: Tensor, logp_sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, 1 outside the mask, and where the cap decides; (N, T) each.

        Args:
            logp_old: (N, T) by the scorer, under the weights that sampled.
            logp_sampler: (N, T) by the sampler.
            mask: (N, T) bool.
        """
        if not logp_old.shape == logp_sampler.shape == mask.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"logp_old, logp_sampler and mask must be (N, T) and mask bool; got {tuple(logp_old.shape)}, "
                f"{tuple(logp_sampler.shape)}, {tuple(mask.shape)} {mask.dtype}"
            )
        gap = at_least_float32(logp_old.detach()) - at_least_float32(logp_sampler.detach()).to(logp_old.device)
        gap = torch.where(mask, gap, 0.0)
        if self.level == "sequence":
            gap = gap.sum(1, keepdim=True).expand_as(gap)
        ratio = gap.exp()
        return torch.where(mask, ratio.clamp(max=self.cap), 1.0), mask & (ratio > self.cap)
