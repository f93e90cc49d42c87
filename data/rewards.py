"""Rewards: what a completion is worth. Named, weighted terms from the task's verdict or from any Python callable, and
the rules for those that fail."""

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from .configurable import Configurable
from .dotted_path import accepted_arguments, import_callable
from .errors import RunError, UsageError, nearest
from .tasks.base import Task, Verdict

log = logging.getLogger(__name__)

LARGEST = 1e18  # of a reward: its square is still a 32-bit float


class Reward(Configurable, ABC):
    """One named term of the reward.

    Args:
        name: the term's name in logs, different from every other term's.
        weight: what the term is multiplied with in the sum; 0 logs it without using it.
    """

    def __init__(self, name: str, weight: float = 1.0) -> None:
        if not math.isfinite(weight):
            raise UsageError(f"the weight of the reward '{name}' is {weight}: give a finite number")
        self.name = name
        self.weight = weight

    @abstractmethod
    def __call__(
        self,
        prompts: list[Any],
        completions: list[str],
        verdicts: list[Verdict],
        columns: dict[str, list[Any]],
    ) -> Sequence[float | None]:
        """One number a completion; None or NaN where there is none. `columns` are the data set's, a value a completion.

        What raises, or returns anything else, is called again for each completion alone: see `combine`.
        """


class TaskVerdict(Reward):
    """A term of the task's own verdict.

    Args:
        term: which one; every task has "accuracy".
        weight: what the term is multiplied with in the sum; 0 logs it without using it.
        name: the term's name in logs; null takes the term's own.
    """

    def __init__(self, term: str = "accuracy", weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(name or term, weight)
        self.term = term

    def __call__(
        self,
        prompts: list[Any],
        completions: list[str],
        verdicts: list[Verdict],
        columns: dict[str, list[Any]],
    ) -> list[float | None]:
        for verdict in verdicts:
            if verdict.missing is None and self.term not in verdict.terms:
                raise UsageError(
                    f"the task's verdicts have no term '{self.term}' (TaskVerdict.term): "
                    f"{nearest(self.term, verdict.terms)}"
                )
        return [None if verdict.missing is not None else verdict.terms[self.term] for verdict in verdicts]


class CallableReward(Reward):
    """Any Python function, called once a batch as `function(prompts=…, completions=…, **columns)`.

    Every argument is a list with one item a completion; a prompt is text or a list of chat messages, as the task gives
    it; the columns are the data set's ("prompts" and "completions" are never columns). A function without `**kwargs`
    gets only the arguments that it names. It returns a list (or array, or tensor) with a number a completion, None or
    NaN where it cannot tell.

    Args:
        function: the function's import path, say package.module.function. Its module must be importable: installed, or
            in a folder on PYTHONPATH.
        weight: what the term is multiplied with in the sum; 0 logs it without using it.
        name: the term's name in logs; null takes the function's.
    """

    def __init__(self, function: str, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(name or function.rpartition(".")[2], weight)
        self.function = import_callable(function)
        self.accepted = accepted_arguments(self.function, function)

    def __call__(
        self,
        prompts: list[Any],
        completions: list[str],
        verdicts: list[Verdict],
        columns: dict[str, list[Any]],
    ) -> Sequence[float | None]:
        given = {**columns, "prompts": prompts, "completions": completions}
        if self.accepted is not None:
            given = {name: values for name, values in given.items() if name in self.accepted}
        return self.function(**given)


@dataclass
class RewardResult:
    """N completions. reward: the weighted sum, NaN where it is missing; valid: where it is not; terms: every term by
    name, NaN where missing; failures: how many values are missing, by term and reason."""

    reward: list[float]
    valid: list[bool]
    terms: dict[str, list[float]]
    failures: dict[str, int]


def check_rewards(rewards: Sequence[Reward]) -> None:
    """Raise a UsageError unless there is a term, the names differ, and a weight is not 0."""
    if not rewards:
        raise UsageError("data.reward is an empty list: give at least one term, say TaskVerdict")
    twice = [name for name, count in Counter(reward.name for reward in rewards).items() if count > 1]
    if twice:
        raise UsageError(f"two rewards are called '{twice[0]}': give one of them another name (data.reward … name)")
    if all(reward.weight == 0 for reward in rewards):
        raise UsageError("every weight in data.reward is 0, so nothing can be learnt: give one term a weight")


def combine(
    rewards: Sequence[Reward],
    prompts: list[Any],
    completions: list[str],
    verdicts: list[Verdict],
    columns: dict[str, list[Any]],
) -> RewardResult:
    """The weighted sum of the terms, reward = Σ weight · term. N = number of completions; every list has N items.

    A value that is None, NaN, infinite or beyond 1e18 is missing, and with it the reward of its row, unless the
    term's weight is 0; a missing reward is never 0. A term that raises, or returns something that is not a list of N,
    is called again for each completion alone, so that only the rows at fault are missing; each kind of failure is
    logged once a term.
    UsageError and RunError are not failures of a row and pass through.

    Verdict terms that no reward is named after are added to `terms`, so that they are logged as well.
    """
    check_rewards(rewards)
    n = len(completions)
    failures: Counter[str] = Counter()
    total, valid = [0.0] * n, [True] * n
    known = dict.fromkeys(term for verdict in verdicts for term in verdict.terms)
    terms = {term: [verdict.terms.get(term, math.nan) for verdict in verdicts] for term in known}
    for reward in rewards:
        values, reasons = _values(reward, prompts, completions, verdicts, columns)
        terms[reward.name] = values
        failures.update(f"{reward.name}: {reason}" for reason in reasons if reason is not None)
        if reward.weight:
            total = [a + reward.weight * b for a, b in zip(total, values, strict=True)]
            valid = [a and b is None for a, b in zip(valid, reasons, strict=True)]
    return RewardResult(
        [a if ok else math.nan for a, ok in zip(total, valid, strict=True)], valid, terms, dict(failures)
    )


@dataclass(frozen=True)
class Raised:
    """What a verifier raised instead of giving a verdict: the error's class, and all of it."""

    kind: str
    error: str


def judge(task: Task, completion: str, example: dict[str, Any]) -> Verdict | Raised:
    """The task's verdict on one completion. UsageError and RunError pass through."""
    try:
        return task.verify(completion, example)
    except (UsageError, RunError):
        raise
    except Exception as error:
        return Raised(type(error).__name__, repr(error))


def verify_all(
    task: Task,
    completions: Sequence[str],
    examples: Sequence[dict[str, Any]],
    judge: Callable[[Task, str, dict[str, Any]], Verdict | Raised] = judge,
) -> list[Verdict]:
    """The task's verdict on every completion. A verifier that raises gives `Verdict(missing=…)` for that completion;
    each kind of error is logged once a task. UsageError and RunError pass through."""
    verdicts = []
    for completion, example in zip(completions, examples, strict=True):
        found = judge(task, completion, example)
        if isinstance(found, Raised):
            reason = f"verifier raised {found.kind}"
            _warn_once(
                task, reason, f"the verifier of {type(task).__name__} failed ({found.error}): its verdict is missing"
            )
            found = Verdict(missing=reason)
        verdicts.append(found)
    return verdicts


def _values(
    reward: Reward,
    prompts: list[Any],
    completions: list[str],
    verdicts: list[Verdict],
    columns: dict[str, list[Any]],
) -> tuple[list[float], list[str | None]]:
    """The term's N values, NaN where missing, and why they are missing."""
    n = len(completions)
    returned = _call(reward, n, prompts, completions, verdicts, columns)
    if isinstance(returned, _Failure) and n == 1:
        returned = [returned]
    elif isinstance(returned, _Failure):
        returned = []
        for row in range(n):
            cut = slice(row, row + 1)
            own = {name: values[cut] for name, values in columns.items()}
            alone = _call(reward, 1, prompts[cut], completions[cut], verdicts[cut], own)
            returned.append(alone if isinstance(alone, _Failure) else alone[0])
    numbers: list[float] = []
    reasons: list[str | None] = []
    for value, verdict in zip(returned, verdicts, strict=True):
        number, reason = _number(value)
        if value is None and isinstance(reward, TaskVerdict):
            reason = verdict.missing
        numbers.append(number)
        reasons.append(reason)
    return numbers, reasons


@dataclass(frozen=True)
class _Failure:
    """A call that gave no list of values."""

    reason: str


def _call(reward: Reward, n: int, *arguments: Any) -> list[Any] | _Failure:
    """The list of n values that the term returned, or what went wrong."""
    try:
        returned: Any = reward(*arguments)
        returned = returned.tolist() if hasattr(returned, "tolist") else returned
    except (UsageError, RunError):
        raise
    except Exception as error:
        failure = _Failure(f"raised {type(error).__name__}")
        problem = f"failed ({error!r})"
    else:
        if isinstance(returned, list | tuple) and len(returned) == n:
            return list(returned)
        what = f"{len(returned)} values" if isinstance(returned, list | tuple) else f"a {type(returned).__name__}"
        failure = _Failure("returned no list of one number a completion")
        problem = f"returned {what} for {n} completions, not a list of one number a completion"
    _warn_once(
        reward,
        failure.reason,
        f"the reward '{reward.name}' {problem}; where that happens each completion is judged alone",
    )
    return failure


def _number(value: Any) -> tuple[float, str | None]:
    """The value as a float, or NaN and the reason why it is none."""
    if isinstance(value, _Failure):
        return math.nan, value.reason
    if value is None:
        return math.nan, "None"
    try:
        plain = value.item() if hasattr(value, "item") else value  # numpy scalars, tensors of one number
        number = float(plain) if isinstance(plain, int | float) else None
    except OverflowError:  # a whole number beyond floats
        return math.nan, "infinite"
    except (ValueError, RuntimeError):  # an array or tensor of several numbers
        number = None
    if number is None:
        return math.nan, f"a {type(value).__name__}, not a number"
    if not math.isfinite(number):
        return math.nan, "NaN" if math.isnan(number) else "infinite"
    if abs(number) > LARGEST:
        return math.nan, f"beyond {LARGEST:g}"
    return number, None


_warned: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def _warn_once(owner: Any, kind: str, message: str) -> None:
    """Log a kind of failure once for each object."""
    kinds = _warned.setdefault(owner, set())
    if kind not in kinds:
        kinds.add(kind)
        log.warning("%s; further failures of this kind are only counted", message)
