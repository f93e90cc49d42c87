"""What a fit did, in a few plain sentences at its end."""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from .access import budget_of, module_of, record_of
from .wording import accuracies, duration, percent

PHASES = {
    "warm_start": "warming up",
    "rollout": "sampling",
    "score": "scoring",
    "update": "updating",
    "validation": "validating",
}


class FitSummary(L.Callback):
    """Prints at the end of a fit: validation accuracy at the start and at the end, steps done, completions and tokens
    sampled, where the time went, where the run lies, and how to look at it.

    The start is the validation before the first step (trainer.num_sanity_val_steps=-1 asks for one on all prompts);
    without it the first one during training, which the text says. Counts and times go on over a resume.
    """

    def __init__(self) -> None:
        self.first: dict[str, tuple[float, float | None]] = {}
        self.first_batch = 0  # rollout batches done at the first validation
        self.last: dict[str, tuple[float, float | None]] = {}
        self.seconds: dict[str, float] = {}
        self.total_seconds = 0.0
        self._fit_start = self._validation_start = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "first": {name: list(value) for name, value in self.first.items()},
            "first_batch": self.first_batch,
            "seconds": dict(self.seconds),
            "total_seconds": self._elapsed(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first = {name: (mean, error) for name, (mean, error) in state_dict["first"].items()}
        self.first_batch = state_dict["first_batch"]
        self.seconds = dict(state_dict["seconds"])
        self.total_seconds = state_dict["total_seconds"]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._fit_start = time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._add("warm_start", module_of(pl_module).seconds.get("warm_start", 0.0))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for phase, seconds in record_of(pl_module).seconds.items():
            self._add(phase, seconds)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._add("validation", time.perf_counter() - self._validation_start)
        if trainer.sanity_checking and trainer.num_sanity_val_batches != trainer.num_val_batches:
            return  # a look at two batches is not an accuracy
        self.last = accuracies(trainer.callback_metrics)
        if not self.first:
            self.first, self.first_batch = self.last, module_of(pl_module).rollout_step

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            print("\n" + "\n".join(self.sentences(trainer, pl_module)))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        interrupted = isinstance(exception, KeyboardInterrupt) or isinstance(exception.__context__, KeyboardInterrupt)
        if interrupted and trainer.is_global_zero and self._fit_start:
            batches = module_of(pl_module).rollout_step
            print(f"\nInterrupted after {_count(batches, 'rollout batch', 'rollout batches')}.")
            print("\n".join(self._places(trainer)))
            print(self._going_on(trainer))

    def sentences(self, trainer: L.Trainer, pl_module: L.LightningModule) -> list[str]:
        """The summary's lines."""
        batches = module_of(pl_module).rollout_step
        spent = budget_of(trainer, type(self).__name__)
        total = self._elapsed()
        ordered = sorted(
            self.seconds.items(), key=lambda item: list(PHASES).index(item[0]) if item[0] in PHASES else 99
        )
        parts = [(PHASES.get(phase, phase), seconds) for phase, seconds in ordered]
        parts.append(("the rest", total - sum(self.seconds.values())))
        times = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts if seconds >= 0.5)
        lines = [
            *self._accuracy_lines(),
            f"Done: {_count(batches, 'rollout batch', 'rollout batches')}, "
            f"{_count(trainer.global_step, 'optimizer step')}; sampled {_count(spent.completions, 'completion')}, "
            f"{_count(spent.tokens, 'token')}.",
            f"Time: {duration(total)}" + (f" ({times})." if times else "."),
        ]
        return [*lines, *self._places(trainer)]

    def _places(self, trainer: L.Trainer) -> list[str]:
        logger = next((logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)), None)
        if logger is None:
            return []
        return [
            f"The run is in {_shown(logger.log_dir)}",
            f"To look at it: {_tensorboard()} --logdir {_shown(logger.save_dir)}",
        ]

    def _going_on(self, trainer: L.Trainer) -> str:
        last = Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints" / "last.ckpt"
        if not last.exists():
            return "There is no checkpoint yet: the first is written after the first validation during training."
        return "To go on from the last checkpoint: the same command with --ckpt_path last"

    def _accuracy_lines(self) -> list[str]:
        lines = []
        for name, last in self.last.items():
            what = f"Validation accuracy on {name}" if name else "Validation accuracy"
            first = self.first.get(name)
            if first is None or first is last:
                lines.append(f"{what}: {percent(last)}.")
                continue
            when = "at the start" if self.first_batch == 0 else f"after {_count(self.first_batch, 'batch', 'batches')}"
            lines.append(f"{what}: {percent(first)} {when}, {percent(last)} at the end.")
        return lines

    def _add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def _elapsed(self) -> float:
        return self.total_seconds + (time.perf_counter() - self._fit_start if self._fit_start else 0.0)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _tensorboard() -> str:
    """The command, with its folder unless it is on the path: an environment need not be active."""
    beside = Path(sys.executable).with_name("tensorboard")
    return "tensorboard" if shutil.which("tensorboard") or not beside.exists() else _shown(beside)


def _shown(path: str | os.PathLike[str]) -> str:
    """Relative to the current folder where it lies below it."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
