"""Tasks: prompts, and verdicts on completions."""

from .base import Split, Task, Verdict
from .dataset import DatasetTask
from .reasoning_gym import ReasoningGym
from .running_sums import RunningSums

__all__ = ["DatasetTask", "ReasoningGym", "RunningSums", "Split", "Task", "Verdict"]
