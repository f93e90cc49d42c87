"""The group mean as baseline: GRPO, with or without division by the group's standard deviation."""

from collections.abc import Mapping

from torch import Tensor

from ...data.batch import RolloutBatch
from ..groups import group_mean
from .base import BaselineEstimator, Scale, check_scale, std_scale


class GroupMean(BaselineEstimator):
    """Group mean as baseline: A_i = r_i - mean_g, or (r_i - mean_g) / (std_g + epsilon).

    scale=none is GRPO as arXiv 2606.29238 analyses it and the advantage of Dr. GRPO (arXiv 2503.20783); scale=std is
    GRPO as published (arXiv 2402.03300). The standard deviation is the unbiased one (R - 1 in its denominator).

    With the REINFORCE objective and scale=none the expected update is exactly (R - 1) / R times the policy gradient.
    With KL in the reward, baseline and standard deviation act on the total return, KL included.

    Args:
        scale: none, or std to divide by the group's unbiased standard deviation.
        epsilon: added to the standard deviation; unused with scale=none.
    """

    paper = "GRPO: arXiv 2402.03300 (scale=std); arXiv 2606.29238, Dr. GRPO arXiv 2503.20783 (scale=none)"
    zero_on_constant_group = True

    def __init__(self, scale: Scale = "none", epsilon: float = 1e-6) -> None:
        check_scale(type(self).__name__, scale, epsilon)
        self.scale = scale
        self.epsilon = epsilon

    def baseline_and_scale(
        self, returns: Tensor, rollouts: RolloutBatch, signals: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        of = rollouts.group, rollouts.reward_valid
        scale = std_scale(returns, *of, self.epsilon) if self.scale == "std" else None
        return group_mean(returns, *of), scale
