"""Prompts, verdicts, rewards and rollouts. No network runs here."""

from .batch import RolloutBatch
from .budget import BudgetCounter
from .datamodule import RolloutDataModule, Validation
from .errors import RunError, UsageError
from .rewards import CallableReward, Reward, TaskVerdict
from .sampler import Limits, Sampler, Samples
from .schemes import Direct, RolloutScheme
from .tasks import DatasetTask, ReasoningGym, RunningSums, Task, Verdict

__all__ = [
    "BudgetCounter",
    "CallableReward",
    "DatasetTask",
    "Direct",
    "Limits",
    "ReasoningGym",
    "Reward",
    "RolloutBatch",
    "RolloutDataModule",
    "RolloutScheme",
    "RunError",
    "RunningSums",
    "Sampler",
    "Samples",
    "Task",
    "TaskVerdict",
    "UsageError",
    "Validation",
    "Verdict",
]
