"""Weighted means of the group as baseline: the variance-optimal one, its logit-norm proxy, and OPO's lengths."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ...data.batch import RolloutBatch
from ..groups import group_mean, leave_one_out_mean
from ..options import check_choice, check_flag
from .base import BaselineEstimator

NEEDS = {
    "exact": frozenset({"score_norms"}),
    "logit_norm": frozenset({"sum_sq_probs", "logp_old"}),
    "length": frozenset[str](),
}


class OptimalBaseline(BaselineEstimator):
    """Weighted mean of the group as baseline: A_i = r_i - sum_j w_j r_j / sum_j w_j.

    weight=exact: w_j = ||psi_j||^2, the squared norm of the score. Among constant baselines E[w r] / E[w] minimises
    the trace of the gradient's covariance.
    weight=logit_norm: w_j = sum_t ||e_{y_t} - pi_t||^2, the same norm taken at the logits, which costs nothing.
    weight=length: w_j = tokens of the completion (OPO): the same if scores of tokens have equal norms, independently.

    A group in which all weights are 0 (only empty completions) has the plain mean as baseline.

    A completion pulls its own baseline towards its own reward, by its own weight. So the expected update is biased, and
    not by a factor: in five enumerated policies (3 tokens, up to 2 positions, groups of two) it is 0.09 to 0.55 times
    the policy gradient plus up to 0.09 of its norm across it (exact, logit_norm), or 0.36 to 0.51 and up to 0.04
    (length), where the group mean gives exactly 0.5 times. leave_one_out=true removes this: the expected update is
    then exactly the policy gradient, with any weights.

    Args:
        weight: exact (needs the score norms), logit_norm (needs sums of squared probabilities) or length.
        leave_one_out: leave a completion out of its own baseline. With groups of two that is leave-one-out itself.
    """

    paper = "Weaver & Tao 2001 (exact); arXiv 2602.07078 (logit_norm); OPO: arXiv 2505.23585 (length)"
    zero_on_constant_group = True

    def __init__(self, weight: Literal["exact", "logit_norm", "length"] = "exact", leave_one_out: bool = False) -> None:
        check_choice("OptimalBaseline.weight", weight, NEEDS)
        check_flag("OptimalBaseline.leave_one_out", leave_one_out)
        self.weight = weight
        self.leave_one_out = leave_one_out

    @property
    def needs(self) -> frozenset[str]:
        return NEEDS[self.weight]

    def baseline_and_scale(
        self, returns: Tensor, rollouts: RolloutBatch, signals: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        mean = leave_one_out_mean if self.leave_one_out else group_mean
        weights = self._weights(rollouts, signals).to(returns.dtype)
        return mean(returns, rollouts.group, rollouts.reward_valid, weights), None

    def _weights(self, rollouts: RolloutBatch, signals: Mapping[str, Tensor]) -> Tensor:
        if self.weight == "exact":
            return signals["score_norms"]
        if self.weight == "logit_norm":
            return logit_norms(signals["logp_old"], signals["sum_sq_probs"], rollouts.action_mask)
        return rollouts.lengths


def logit_norms(logp: Tensor, sum_sq_probs: Tensor, mask: Tensor) -> Tensor:
    """w_i = sum_t (1 - 2 pi_t + sum_v pi_v^2) = sum_t ||e_{y_t} - pi_t||^2, squared norms of the score at the logits.

    Args:
        logp: (N, T) of the sampled tokens, pi_t = exp(logp_t).
        sum_sq_probs: (N, T), sum over the vocabulary of squared probabilities.
        mask: (N, T) bool.

    Returns: (N,), at least 0 (rounding below 0 is clamped away); 0 for an empty completion.
    """
    if not logp.shape == sum_sq_probs.shape == mask.shape or logp.ndim != 2:
        raise ValueError(
            f"logp, sum_sq_probs and mask must be (N, T); got {tuple(logp.shape)}, {tuple(sum_sq_probs.shape)}, "
            f"{tuple(mask.shape)}"
        )
    norms = (1.0 - 2.0 * logp.exp() + sum_sq_probs).clamp(min=0.0)
    return torch.where(mask, norms, 0.0).sum(1)
