"""Everything that runs a network: the policy, samplers, signals, the training loop, the warm start."""

from .fresh import FreshModel
from .policy import Policy
from .policy_gradient import PolicyGradient, StepRecord
from .samplers import GenerateSampler, SharedPrefixSampler
from .signals import AnswerInfluence, PolicyScores, ReferenceScores, ScoreNorms, SignalProvider, TaskStepRewards
from .warm_start import WarmStart

__all__ = [
    "AnswerInfluence",
    "FreshModel",
    "GenerateSampler",
    "Policy",
    "PolicyGradient",
    "PolicyScores",
    "ReferenceScores",
    "ScoreNorms",
    "SharedPrefixSampler",
    "SignalProvider",
    "StepRecord",
    "TaskStepRewards",
    "WarmStart",
]
