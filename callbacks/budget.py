"""Stopping a fit at a budget of sampled completions or tokens."""

from typing import Any

import lightning as L

from ..data.errors import UsageError
from .access import budget_of


class BudgetLimit(L.Callback):
    """Ends the fit once a budget of sampling is spent. Validation is not counted.

    The limit is tested after each rollout batch: the last one may go beyond it by less than one batch. What was
    spent is logged as budget/completions, budget/tokens and budget/prompts, limit or not.

    Args:
        completions: stop after so many sampled completions; null for no limit.
        tokens: stop after so many sampled tokens; null for no limit.
    """

    def __init__(self, completions: int | None = None, tokens: int | None = None) -> None:
        for name, value in (("completions", completions), ("tokens", tokens)):
            if value is not None and value < 1:
                raise UsageError(f"budget.{name} is {value}: give a whole number of at least 1, or null for no limit")
        self.completions = completions
        self.tokens = tokens

    def share_spent(self, trainer: L.Trainer) -> float:
        """The larger of the shares that completions and tokens have spent of their limits; 0 without a limit."""
        spent = budget_of(trainer, type(self).__name__)
        limits = ((spent.completions, self.completions), (spent.tokens, self.tokens))
        return max((used / limit for used, limit in limits if limit is not None), default=0.0)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            budget_of(trainer, type(self).__name__)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop_if_spent(trainer)  # a resumed run may have nothing left

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        spent = budget_of(trainer, type(self).__name__)
        for name, value in spent.state_dict().items():
            pl_module.log(f"budget/{name}", float(value), batch_size=1)
        self._stop_if_spent(trainer)

    def _stop_if_spent(self, trainer: L.Trainer) -> None:
        if self.share_spent(trainer) >= 1:
            trainer.should_stop = True
