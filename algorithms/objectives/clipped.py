"""The clipped surrogate of PPO and GRPO, with asymmetric and dual clip."""

import torch
from torch import Tensor

from ..options import check_range
from .base import ObjectiveOutput, PolicyObjective, at_least_float32, check_token_tensors


class Clipped(PolicyObjective):
    """Clipped surrogate: loss_t = -min(ratio_t A_t, clip(ratio_t, 1 - epsilon_low, 1 + epsilon_high) A_t).

    ratio_t = pi_t / pi_old_t, in float32 at least, and exactly 1 on an exactly on-policy step, where the gradient is
    that of REINFORCE. DAPO (arXiv 2503.14476) uses epsilon_high=0.28.

    Args:
        epsilon_low: how far below 1 the ratio still counts.
        epsilon_high: how far above 1 the ratio still counts.
        dual_clip: c > 1: for negative advantages the surrogate does not fall below c A_t (arXiv 1912.09729);
            none = no such limit.
    """

    paper = "PPO: arXiv 1707.06347; GRPO: arXiv 2402.03300"

    def __init__(self, epsilon_low: float = 0.2, epsilon_high: float = 0.2, dual_clip: float | None = None) -> None:
        super().__init__()
        check_range("Clipped.epsilon_low", epsilon_low, 0.0)
        check_range("Clipped.epsilon_high", epsilon_high, 0.0)
        if dual_clip is not None:
            check_range("Clipped.dual_clip", dual_clip, 1.0, above=True)
        self.epsilon_low = epsilon_low
        self.epsilon_high = epsilon_high
        self.dual_clip = dual_clip

    def forward(self, logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor) -> ObjectiveOutput:
        check_token_tensors(logp, logp_old, advantages, mask)
        return clipped_loss(logp, logp_old, advantages, mask, self.epsilon_low, self.epsilon_high, self.dual_clip)


def clipped_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    epsilon_low: float,
    epsilon_high: float,
    dual_clip: float | None = None,
) -> ObjectiveOutput:
    """The formula of `Clipped` on (N, T) tensors; 0 outside the mask, and the gradient flows through `logp` only.

    Where the clip decides, the loss is a constant, so an overflowing ratio there gives no NaN gradient (0 * inf).
    """
    advantages = torch.where(mask, advantages.detach(), 0.0)
    log_ratio = torch.where(mask, at_least_float32(logp) - at_least_float32(logp_old.detach()), 0.0)
    ratio = log_ratio.detach().exp()
    low, high = 1.0 - epsilon_low, 1.0 + epsilon_high
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    bound = ratio.clamp(low, high)
    if dual_clip is not None:
        dual = (advantages < 0) & (ratio > dual_clip)
        clipped, bound = clipped | dual, torch.where(dual, dual_clip, bound)
    constant = clipped | ((advantages == 0) & ratio.isinf())  # a NaN stays: it must stop the run
    factor = torch.where(clipped, bound, torch.where(constant, 0.0, log_ratio).exp())
    return ObjectiveOutput(-factor * advantages, clipped)
