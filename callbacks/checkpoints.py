"""Which checkpoints a fit keeps."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from .wording import accuracies


class BestAndLast(Checkpoint):
    """Keeps two checkpoints in the run's folder: checkpoints/last.ckpt, written after each validation and at the end
    of the fit, and checkpoints/best.ckpt, of the highest validation accuracy (on the first of several sets).

    Lightning's ModelCheckpoint with a monitored metric writes its last.ckpt only when the metric was among the best.
    """

    def __init__(self) -> None:
        self.best_accuracy = float("-inf")
        self.best_step = -1
        self.best_model_path = ""
        self._saved_step = -1

    def state_dict(self) -> dict[str, Any]:
        return {"best_accuracy": self.best_accuracy, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_accuracy, self.best_step = state_dict["best_accuracy"], state_dict["best_step"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._folder = Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints"  # log_dir asks all processes

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        measured = list(accuracies(trainer.callback_metrics).values())
        better = bool(measured) and measured[0][0] > self.best_accuracy
        if better:
            self.best_accuracy, self.best_step = measured[0][0], trainer.global_step
        self._save(trainer, "last.ckpt")
        if better:
            self.best_model_path = self._save(trainer, "best.ckpt")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._saved_step != trainer.global_step and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save(trainer, "last.ckpt")

    def _save(self, trainer: L.Trainer, name: str) -> str:
        path = self._folder / name
        part = self._folder / f"{name}.part"
        trainer.save_checkpoint(part, weights_only=False)  # with the optimizer's state
        if trainer.is_global_zero:
            part.replace(path)  # a reader never sees half a checkpoint
        trainer.strategy.barrier()
        self._saved_step = trainer.global_step
        return str(path)
