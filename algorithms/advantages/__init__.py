"""Advantage estimators: one file a method."""

from .base import AdvantageContext, AdvantageEstimator, BaselineEstimator
from .group_mean import GroupMean
from .leave_one_out import LeaveOneOut
from .optimal_baseline import OptimalBaseline
from .outcome_reshaped import OutcomeReshaped
from .step_level import StepLevel

__all__ = [
    "AdvantageContext",
    "AdvantageEstimator",
    "BaselineEstimator",
    "GroupMean",
    "LeaveOneOut",
    "OptimalBaseline",
    "OutcomeReshaped",
    "StepLevel",
]
