"""The score-function objective."""

import torch
from torch import Tensor

from .base import ObjectiveOutput, PolicyObjective, at_least_float32, check_token_tensors


class Reinforce(PolicyObjective):
    """REINFORCE: loss_t = -A_t log pi_t, without ratio and without clip. Meant for one update per rollout batch."""

    paper = "REINFORCE: Williams 1992"

    def forward(self, logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor) -> ObjectiveOutput:
        check_token_tensors(logp, logp_old, advantages, mask)
        return ObjectiveOutput(reinforce_loss(logp, advantages, mask))


def reinforce_loss(logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """-A log pi on the mask, 0 elsewhere; all (N, T). The gradient flows through `logp` only."""
    logp = torch.where(mask, at_least_float32(logp), 0.0)
    return -torch.where(mask, advantages.detach(), 0.0) * logp
