"""The loss of one micro-batch, term by term. Every term is per token and uses the same mask and denominator."""

import torch
from torch import Tensor

from ..algorithms.kl import KLPenalty
from ..algorithms.mismatch import TruncatedImportance
from ..algorithms.objectives.base import PolicyObjective
from ..data.batch import RolloutBatch
from .policy import Policy
from .reporting import Totals


def loss_terms(
    policy: Policy,
    objective: PolicyObjective,
    kl: KLPenalty | None,
    entropy_coefficient: float,
    mismatch: TruncatedImportance | None,
    micro: RolloutBatch,
    totals: Totals,
) -> dict[str, Tensor]:
    """(N, T) per-token losses by name: "policy", "kl" (k2 and k3 as losses), "entropy" (the bonus, negative).

    Where the weights are those that sampled, the old log-probabilities are the current ones, detached: the ratio is
    exactly 1. `totals` gets what is logged on the way.
    """
    mask = micro.loss_mask
    scores = policy.score(micro, entropy=entropy_coefficient != 0)
    on_policy = bool((micro.policy_version == policy.version).all())
    logp_old = scores.logp.detach() if on_policy else micro.logp_old
    if logp_old is None or micro.advantages is None:
        raise ValueError("an update needs advantages, and old log-probabilities once the weights have moved on")
    output = objective(scores.logp, logp_old, micro.advantages, mask)
    terms = {"policy": output.loss}
    if mismatch is not None and micro.logp_sampler is not None:
        weights, capped = mismatch.weights(logp_old, micro.logp_sampler, mask)
        terms["policy"] = output.loss * weights
        totals.add("importance_weight", torch.where(mask, weights, 0.0), mask.sum())
        totals.add("importance_capped", capped.sum(), mask.sum())
    if kl is not None and micro.logp_ref is not None:
        if kl.form in ("k2_loss", "k3_loss"):
            terms["kl"] = kl.loss(scores.logp, micro.logp_ref, mask)
        totals.add("kl", kl.estimate(scores.logp, micro.logp_ref, mask), mask.sum())
    if scores.entropy is not None:
        terms["entropy"] = torch.where(mask, -entropy_coefficient * scores.entropy, 0.0)
    if output.clipped is not None:
        totals.add("ratio_clipped", (output.clipped & mask).sum(), mask.sum())
    if on_policy and micro.logp_sampler is not None:
        totals.compare_sampler(scores.logp.detach(), micro.logp_sampler, mask)
    return terms
