"""Hyper-parameters beside final metrics, for TensorBoard's comparison of runs."""

from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from ..data.configurable import Configurable, describe
from .access import batch_number


class Hyperparameters(L.Callback):
    """Logs the run's hyper-parameters with its final metrics when training ends: TensorBoard's HPARAMS page.

    Metrics go under hp/ (hp/val_accuracy, hp/train_reward, …): under their own tags they would add a point at the end
    of the very curves that they are taken from. Needs TensorBoardLogger(default_hp_metric=False).
    """

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if not loggers:
            return
        values = hyperparameters(trainer, pl_module)
        metrics = final_metrics(trainer)
        for logger in loggers:
            logger.log_hyperparams(values, metrics, max(batch_number(pl_module), 0))


def hyperparameters(trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
    """Every option of module, datamodule, optimizer and trainer that was set, by a short dotted name."""
    values: dict[str, Any] = {}
    module = {name: value for name, value in pl_module.hparams.items() if not name.startswith("_")}
    values |= flat("model", module)
    datamodule = getattr(trainer, "datamodule", None)
    if isinstance(datamodule, Configurable):
        values |= flat("data", describe(datamodule)["init_args"])
    for optimizer in trainer.optimizers:
        group = optimizer.param_groups[0]
        values["optimizer"] = type(optimizer).__name__
        values["optimizer.lr"] = float(group.get("initial_lr", group["lr"]))
        values["optimizer.weight_decay"] = float(group.get("weight_decay", 0.0))
    values["trainer.precision"] = str(trainer.precision)
    return values


def flat(name: str, value: Any) -> dict[str, Any]:
    """Described objects as one level of options: a class is its bare name, its arguments follow after a dot, lists of
    plain values become text, and what is None is left out."""
    if value is None:
        return {}
    if isinstance(value, dict):
        options: dict[str, Any] = {}
        if "class_path" in value:
            options[name] = str(value["class_path"]).rsplit(".", 1)[-1]
            value = value.get("init_args", {})
        for key, item in value.items():
            options |= flat(f"{name}.{key}", item)
        return options
    if isinstance(value, list | tuple):
        if any(isinstance(item, dict | list | tuple) for item in value):
            return {key: item for i, part in enumerate(value) for key, item in flat(f"{name}.{i}", part).items()}
        return {name: ", ".join(map(str, value))}
    return {name: value if isinstance(value, bool | int | float | str) else str(value)}


def final_metrics(trainer: L.Trainer) -> dict[str, float]:
    """The last accuracy and pass@k of each validation set, the last reward, and what was spent."""
    chosen: dict[str, float] = {}
    for tag, value in trainer.callback_metrics.items():
        last = tag.rsplit("/", 1)[-1]
        if (
            tag.startswith("val/") and (last == "accuracy" or (last.startswith("pass_at_") and last[8:].isdigit()))
        ) or tag in ("train/reward", "budget/completions", "budget/tokens"):
            chosen["hp/" + tag.replace("/", "_")] = float(value)
    return chosen
