"""Signals: what estimators and objectives may ask for beyond rewards and masks.

Each has one provider and is computed lazily, once a batch, only when something declared it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from ...data.batch import RolloutBatch
from ...data.budget import BudgetCounter
from ...data.configurable import Configurable
from ...data.errors import UsageError, nearest
from ...data.sampler import Sampler
from ...data.tasks.base import Task


@dataclass
class SignalContext:
    """What a provider may use."""

    policy: Any
    reference: Any | None
    sampler: Sampler
    task: Task
    budget: BudgetCounter
    step: int
    run_seed: int
    micro_batch_tokens: int


class SignalProvider(Configurable, nn.Module, ABC):
    """Computes one or more signals for a rollout batch.

    provides: names of the signals.
    cost: what it costs beside sampling and one update, in words; shown by `apportion list`.
    layout: "rows" if it needs each completion in a row of its own, "packed" if a shared prompt is fine.
    A provider may own parameters, a loss and an optimizer group (a critic, an implicit reward model).
    """

    provides: ClassVar[frozenset[str]]
    cost: ClassVar[str]
    layout: ClassVar[Literal["rows", "packed"]] = "packed"

    def check(self, task: Task, asked_by: str) -> None:
        """Raise a UsageError at the start of a run if `task` cannot give what this provider needs."""

    @abstractmethod
    def forward(self, rollouts: RolloutBatch, context: SignalContext) -> dict[str, Tensor]:
        """Every provided signal, detached, aligned with the rows of `rollouts`."""


class Signals(Mapping[str, Tensor]):
    """The declared signals of one batch. Reading an undeclared one is an error: its cost was never agreed to."""

    def __init__(
        self,
        declared: Iterable[str],
        providers: Mapping[str, SignalProvider],
        rollouts: RolloutBatch,
        context: SignalContext,
    ) -> None:
        self._declared = frozenset(declared)
        self._providers = providers
        self._rollouts = rollouts
        self._context = context
        self._values: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._declared:
            raise KeyError(f"signal '{name}' was read but not declared in `needs` ({sorted(self._declared)})")
        if name not in self._values:
            self._values.update(self._providers[name](self._rollouts, self._context))
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._declared

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)


def providers_for(needs: Iterable[str], given: Iterable[SignalProvider]) -> dict[str, SignalProvider]:
    """One provider for each needed signal: from `given` if one provides it, else the shipped one with its defaults."""
    chosen = {name: provider for provider in given for name in provider.provides}
    shipped = {name: cls for cls in _subclasses(SignalProvider) for name in cls.provides}
    made: dict[type[SignalProvider], SignalProvider] = {}
    for name in needs:
        if name in chosen:
            continue
        if name not in shipped:
            raise UsageError(f"nothing provides the signal '{name}': {nearest(name, shipped)}")
        cls = shipped[name]
        chosen[name] = made.setdefault(cls, cls()) if cls not in made else made[cls]
    return {name: chosen[name] for name in needs}


def _subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        if not getattr(child, "__abstractmethods__", None):
            yield child
        yield from _subclasses(child)
