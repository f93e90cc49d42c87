"""The mean of the others as baseline: RLOO."""

from collections.abc import Mapping

from torch import Tensor

from ...data.batch import RolloutBatch
from ..groups import leave_one_out_mean
from .base import BaselineEstimator


class LeaveOneOut(BaselineEstimator):
    """Mean of the other completions of the prompt as baseline: A_i = r_i - mean of r_j over j != i.

    Equal to R / (R - 1) times the group-mean advantage. With the REINFORCE objective the expected update is exactly
    the policy gradient.
    """

    paper = "RLOO: arXiv 2402.14740"
    zero_on_constant_group = True

    def baseline_and_scale(
        self, returns: Tensor, rollouts: RolloutBatch, signals: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        return leave_one_out_mean(returns, rollouts.group, rollouts.reward_valid), None
