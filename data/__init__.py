"""Data: tasks, rewards, rollout batches and how they come about. No network runs here."""

from .batch import RolloutBatch
from .budget import BudgetCounter
from .configurable import Configurable, describe
from .datamodule import RolloutDataModule, Validation
from .errors import RunError, UsageError, nearest
from .rewards import CallableReward, Reward, RewardResult, TaskVerdict, combine, verify_all
from .sampler import Limits, PolicyLike, Purpose, Sampler, Samples, seed_of, uniforms
from .schemes import Direct, RolloutRequest, RolloutScheme
from .tasks import DatasetTask, ReasoningGym, RunningSums, Split, Task, Verdict

__all__ = [
    "BudgetCounter",
    "CallableReward",
    "Configurable",
    "DatasetTask",
    "Direct",
    "Limits",
    "PolicyLike",
    "Purpose",
    "ReasoningGym",
    "Reward",
    "RewardResult",
    "RolloutBatch",
    "RolloutDataModule",
    "RolloutRequest",
    "RolloutScheme",
    "RunError",
    "RunningSums",
    "Sampler",
    "Samples",
    "Split",
    "Task",
    "TaskVerdict",
    "UsageError",
    "Validation",
    "Verdict",
    "combine",
    "describe",
    "nearest",
    "seed_of",
    "uniforms",
    "verify_all",
]
