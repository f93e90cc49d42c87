"""Signal providers: what estimators may ask for beyond rewards and masks."""

from .answer_influence import AnswerInfluence
from .base import SignalContext, SignalProvider, Signals, providers_for
from .scores import PolicyScores, ReferenceScores, ScoreNorms, score_in_micro_batches
from .steps import TaskStepRewards

__all__ = [
    "AnswerInfluence",
    "PolicyScores",
    "ReferenceScores",
    "ScoreNorms",
    "SignalContext",
    "SignalProvider",
    "Signals",
    "TaskStepRewards",
    "providers_for",
    "score_in_micro_batches",
]
