"""Pure numerics on tensors: advantages, objectives, KL forms, aggregations. No network runs here, no Lightning.

Adding an estimator or objective: a file in `advantages/` or `objectives/`, and its name here and there.
"""

from .advantages import (
    AdvantageContext,
    AdvantageEstimator,
    BaselineEstimator,
    GroupMean,
    LeaveOneOut,
    OptimalBaseline,
    OutcomeReshaped,
    StepLevel,
)
from .aggregation import AGGREGATIONS, aggregate, check_aggregation, denominator
from .kl import KL_FORMS, KLPenalty
from .mismatch import TruncatedImportance
from .objectives import Clipped, ObjectiveOutput, PolicyObjective, Reinforce

__all__ = [
    "AGGREGATIONS",
    "KL_FORMS",
    "AdvantageContext",
    "AdvantageEstimator",
    "BaselineEstimator",
    "Clipped",
    "GroupMean",
    "KLPenalty",
    "LeaveOneOut",
    "ObjectiveOutput",
    "OptimalBaseline",
    "OutcomeReshaped",
    "PolicyObjective",
    "Reinforce",
    "StepLevel",
    "TruncatedImportance",
    "aggregate",
    "check_aggregation",
    "denominator",
]
