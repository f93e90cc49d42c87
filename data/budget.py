"""Counting what a run has spent on sampling. Validation never counts."""

from dataclasses import asdict, dataclass


@dataclass
class BudgetCounter:
    """Everything sampled for training so far, drafts, continuations and resampled groups included.

    prompts: prompts sampled for (a prompt counts again each time it is sampled).
    completions: completions sampled.
    tokens: tokens sampled, end tokens included.
    """

    prompts: int = 0
    completions: int = 0
    tokens: int = 0

    def add(self, prompts: int, completions: int, tokens: int) -> None:
        self.prompts += prompts
        self.completions += completions
        self.tokens += tokens

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.__dict__.update(state)
