"""Signals from scoring passes: log-probabilities of the behaviour and the reference policy, entropy, score norms."""

from typing import Any

import torch
from torch import Tensor

from ...algorithms.objectives.base import at_least_float32
from ...data.batch import RolloutBatch
from ..sharding import gathered
from .base import SignalContext, SignalProvider


def score_in_micro_batches(
    policy: Any, rollouts: RolloutBatch, tokens: int, names: tuple[str, ...] = ("logp",)
) -> dict[str, Tensor]:
    """Score all rows without gradient, a token budget at a time. Returns (N, T) tensors, 0 outside the completions."""
    found: dict[str, Tensor] = {}
    with policy.inference():
        for rows in policy.micro_batches(rollouts, tokens):
            micro = rollouts[rows]
            scores = policy.score(micro, entropy="entropy" in names, sum_sq_probs="sum_sq_probs" in names)
            for name in names:
                value = getattr(scores, name)
                if name not in found:
                    found[name] = value.new_zeros(rollouts.completion_ids.shape)
                found[name][rows, : value.shape[1]] = value
    return found


class PolicyScores(SignalProvider):
    """Log-probabilities, entropy and sum of squared probabilities under the policy that sampled, by the scorer.

    The sampler has them as by-products too; these are the scorer's own, so that they agree with the update to the last
    bit of its precision. (N, T) each, entropy in nats.
    """

    provides = frozenset({"logp_old", "entropy", "sum_sq_probs"})
    cost = "one forward pass"

    def forward(self, rollouts: RolloutBatch, context: SignalContext) -> dict[str, Tensor]:
        scores = score_in_micro_batches(
            context.policy, rollouts, context.micro_batch_tokens, ("logp", "entropy", "sum_sq_probs")
        )
        return {"logp_old": scores["logp"], "entropy": scores["entropy"], "sum_sq_probs": scores["sum_sq_probs"]}


class ReferenceScores(SignalProvider):
    """Log-probabilities under the frozen reference policy. (N, T)."""

    provides = frozenset({"logp_ref"})
    cost = "one forward pass of the reference policy, which is kept in memory"

    def forward(self, rollouts: RolloutBatch, context: SignalContext) -> dict[str, Tensor]:
        if context.reference is None:
            raise ValueError("logp_ref was asked for, but no reference policy was made: a KL penalty makes one")
        return {"logp_ref": score_in_micro_batches(context.reference, rollouts, context.micro_batch_tokens)["logp"]}


class ScoreNorms(SignalProvider):
    """Squared norm of each completion's score, ||sum_t grad log pi(a_t | s_t)||^2, over all trainable parameters. (N,).

    The reference implementation: one backward pass a completion. 0 for an empty completion.
    """

    provides = frozenset({"score_norms"})
    cost = "one forward and backward pass a completion, unbatched"
    layout = "rows"

    def forward(self, rollouts: RolloutBatch, context: SignalContext) -> dict[str, Tensor]:
        with gathered(context.policy):
            return {"score_norms": torch.stack([self._norm(rollouts[[row]], context) for row in range(len(rollouts))])}

    @staticmethod
    def _norm(alone: RolloutBatch, context: SignalContext) -> Tensor:
        if not alone.action_mask.any():
            return torch.zeros((), device=alone.reward.device)
        parameters = [p for p in context.policy.parameters() if p.requires_grad]
        with torch.enable_grad():
            score = (context.policy.score(alone).logp * alone.action_mask).sum()
            gradients = torch.autograd.grad(score, parameters, allow_unused=True)
        return torch.stack([at_least_float32(g).pow(2).sum() for g in gradients if g is not None]).sum()
