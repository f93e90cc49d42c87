"""Step rewards from the task's own verdicts."""

from torch import Tensor

from ...data.batch import RolloutBatch
from ...data.errors import UsageError
from ...data.tasks.base import Task
from .base import SignalContext, SignalProvider


class TaskStepRewards(SignalProvider):
    """The task's own verdict on each step of a completion. (N, S), where `rollouts.step_mask` holds."""

    provides = frozenset({"step_rewards"})
    cost = "none: the task's verifier gives them"

    def check(self, task: Task, asked_by: str) -> None:
        if not task.judges_steps:
            raise UsageError(
                f"{asked_by} needs a verdict on each step, and the task {type(task).__name__} judges only whole "
                "completions: use a task with step verdicts (RunningSums) or another estimator"
            )

    def forward(self, rollouts: RolloutBatch, context: SignalContext) -> dict[str, Tensor]:
        if rollouts.step_reward is None:
            return {"step_rewards": rollouts.reward.new_zeros(len(rollouts), 1)}
        return {"step_rewards": rollouts.step_reward}
