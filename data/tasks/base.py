"""What a task is: prompts for a split, and a verdict on a completion."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from datasets import Dataset

from ..configurable import Configurable
from ..errors import UsageError

Split = Literal["train", "validation"]


@dataclass
class Verdict:
    """What a task says of one completion. Spans are in characters of the completion's text.

    terms: named reward terms; "accuracy" (1.0 right, 0.0 wrong) is always among them unless the verdict is missing.
    answer_span: where the answer stands; None where there is none.
    steps: the spans of the steps, in order, and
    step_rewards: one number a step, where the task can judge steps.
    missing: why there is no verdict (then `terms` is empty), else None.
    """

    terms: dict[str, float] = field(default_factory=dict)
    answer_span: tuple[int, int] | None = None
    steps: list[tuple[int, int]] | None = None
    step_rewards: list[float] | None = None
    missing: str | None = None


class Task(Configurable, ABC):
    """A source of prompts with a verifier.

    `judges_steps`: whether `verify` fills `steps` and `step_rewards`.
    `verify_is_pure`: whether the verdict depends on nothing but the completion, the example and the arguments of the
    constructor, so that it may be asked of an equal task in another process. A class that overrides `verify` says so
    anew.
    """

    judges_steps: ClassVar[bool] = False
    verify_is_pure: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "verify" in cls.__dict__ and "verify_is_pure" not in cls.__dict__:
            cls.verify_is_pure = False

    @abstractmethod
    def prompts(self, split: Split) -> Dataset:
        """The prompts of a split: a column "prompt" (a string, or a list of chat messages), and whatever `verify`
        needs. The same call gives the same rows; train and validation share no prompt."""

    @abstractmethod
    def verify(self, completion: str, example: dict[str, Any]) -> Verdict:
        """The verdict on a completion (text without the end token) of the prompt in `example` (a row of `prompts`)."""

    def demonstrations(self, count: int, seed: int, error: float) -> Dataset:
        """Worked examples for a warm start: columns "prompt" and "completion".

        Args:
            error: the share of steps in which the teacher errs (and goes on from the wrong value).
        """
        raise UsageError(
            f"{type(self).__name__} has no worked demonstrations for a warm start: use a pre-trained policy "
            "(--model.warm_start=null) or a task that has them (RunningSums)"
        )
