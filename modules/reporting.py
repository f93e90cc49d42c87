"""The numbers of one training step. Everything is a sum and a count until the end: nothing averages averages."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from ..algorithms.groups import is_constant
from ..data.batch import RolloutBatch

log = logging.getLogger(__name__)


class Totals:
    """Sums and counts of what the update sees, over micro-batches and optimizer steps."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, float] = {}
        self.gap_max = 0.0

    def add(self, name: str, value: Tensor, count: Tensor | int) -> None:
        """Add `value` (a sum over `count` things)."""
        value = value.detach().double().sum().cpu()
        self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.counts[name] = self.counts.get(name, 0.0) + float(count)

    def compare_sampler(self, logp: Tensor, logp_sampler: Tensor, mask: Tensor) -> None:
        """The distance between the scorer's and the sampler's log-probabilities of the same tokens."""
        gap = torch.where(mask, (logp.double() - logp_sampler.double()).abs(), 0.0)
        self.add("logp_gap", gap, mask.sum())
        self.gap_max = max(self.gap_max, float(gap.max()) if gap.numel() else 0.0)

    def warn_of_gap(self, precision: object) -> None:
        threshold = 0.01 if str(precision) in ("32-true", "64-true") else 1.0
        if self.gap_max > threshold:
            log.warning(
                "sampler and scorer disagree by up to %.3g nats on a token (above %g at precision %s): "
                "the two do not run the same policy",
                self.gap_max,
                threshold,
                precision,
            )


def rollout_metrics(rollouts: RolloutBatch, totals: Totals, reduce_sum: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """TensorBoard's scalars of one rollout batch, pooled over processes."""
    valid, mask = rollouts.reward_valid, rollouts.loss_mask
    reward = torch.where(valid, rollouts.reward, 0.0).double()
    constant = [is_constant(rollouts.reward[rows], rollouts.reward_valid[rows]) for rows in rollouts.rows_by_group()]
    sums: dict[str, tuple[float | Tensor, float | Tensor]] = {
        "train/reward": (reward.sum(), valid.sum()),
        "train/completion_length": (rollouts.lengths.sum(), len(rollouts)),
        "train/truncated": (rollouts.truncated.sum(), len(rollouts)),
        "credit/zero_variance_groups": (sum(constant), len(constant)),
    }
    for name, values in rollouts.reward_terms.items():
        known = ~values.isnan()
        sums[f"train/reward_terms/{name}"] = (torch.where(known, values, 0.0).double().sum(), known.sum())
    if rollouts.advantages is not None:  # rollouts that move the policy at all: ε-effective of 2606.29238, with ε = 0
        effective = (torch.where(mask, rollouts.advantages, 0.0) != 0).any(1)
        sums["credit/effective_rollouts"] = (effective.sum(), len(rollouts))
    if rollouts.entropy is not None:
        sums["train/entropy"] = (torch.where(mask, rollouts.entropy, 0.0).double().sum(), mask.sum())
    names = {"grad_norm": "train/grad_norm", "kl": "train/kl", "ratio_clipped": "train/ratio_clipped"}
    names |= {"logp_gap": "sampler/logp_gap_mean", "importance_weight": "sampler/importance_weight"}
    names |= {"importance_capped": "sampler/importance_capped"}
    for name, tag in names.items():
        if name in totals.sums:
            sums[tag] = (totals.sums[name], totals.counts[name])
    pooled = reduce_sum(torch.tensor([[float(a), float(b)] for a, b in sums.values()], dtype=torch.float64))
    values = {tag: float(a / b) for tag, (a, b) in zip(sums, pooled, strict=True) if b > 0}
    values["train/missing_rewards"] = float(reduce_sum((~valid).sum().double()))
    if "loss" in totals.sums:
        steps = max(1.0, totals.counts.get("grad_norm", 1.0))
        values["train/loss"] = float(reduce_sum(totals.sums["loss"])) / steps
    if "logp_gap" in totals.sums:
        values["sampler/logp_gap_max"] = totals.gap_max
    squares = reduce_sum((torch.where(valid, reward - values.get("train/reward", 0.0), 0.0) ** 2).sum())
    count = float(reduce_sum(valid.sum().double()))
    values["train/reward_std"] = float(squares / max(1.0, count - 1)) ** 0.5
    return values
