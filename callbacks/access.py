"""What callbacks read of the trainer and the module. Nothing is written or computed here."""

from typing import TYPE_CHECKING, Any, cast

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter

from ..data.budget import BudgetCounter
from ..data.errors import UsageError

if TYPE_CHECKING:
    from ..modules.policy_gradient import PolicyGradient, StepRecord


def module_of(pl_module: L.LightningModule) -> "PolicyGradient":
    """The module as what it is: these callbacks watch a PolicyGradient."""
    return cast("PolicyGradient", pl_module)


def record_of(pl_module: L.LightningModule) -> "StepRecord":
    """What the training step that just ended left behind."""
    record = module_of(pl_module).record
    assert record is not None, "a training step leaves a record"
    return record


def batch_number(pl_module: L.LightningModule) -> int:
    """The number, from 0, of the rollout batch that the record is of: where `self.log` puts it on the x-axis."""
    return module_of(pl_module).rollout_step - 1


def budget_of(trainer: L.Trainer, asked_by: str) -> BudgetCounter:
    """The datamodule's counter of what was sampled for training."""
    budget = getattr(getattr(trainer, "datamodule", None), "budget", None)
    if not isinstance(budget, BudgetCounter):
        raise UsageError(f"{asked_by} reads the budget of a RolloutDataModule: call trainer.fit(module, datamodule=…)")
    return budget


def tensorboard(trainer: L.Trainer) -> SummaryWriter | None:
    """The event file of the first TensorBoard logger, if there is one."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            return cast(Any, logger.experiment)
    return None


def check_at_least_one(owner: str, **options: int) -> None:
    """Refuse counts below 1 by name."""
    for name, value in options.items():
        if value < 1:
            raise UsageError(f"{owner}.{name} is {value}: give a whole number of at least 1")
