"""Progress: a line that lives in a terminal, plain lines in a pipe or a log file."""

import math
import sys
import threading
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm, TQDMProgressBar

from .access import check_at_least_one, module_of, record_of
from .budget import BudgetLimit
from .throughput import tokens_per_second
from .wording import accuracies, duration, percent


class Progress(TQDMProgressBar):
    """Shows what a fit is doing (warming up, sampling, scoring, updating, validating), how far it is, reward,
    validation accuracy and sampled tokens a second.

    In a terminal it is one line that keeps moving while a long phase runs. Where the output is not a terminal (a
    pipe, a log file) it prints a line for each validation and one now and then between them.

    Args:
        every_n_batches: without a terminal, print at least once in so many rollout batches …
        every_seconds: … and at the end of a batch that comes this long after the last line.
    """

    def __init__(self, every_n_batches: int = 10, every_seconds: float = 60.0) -> None:
        check_at_least_one("Progress", every_n_batches=every_n_batches)
        super().__init__()
        self.every_n_batches = every_n_batches
        self.every_seconds = every_seconds
        self._plain = True
        self._ticker: _Ticker | None = None
        self._phase = "starting"
        self._validation = (0, 0)
        self._facts: dict[str, str] = {}
        self._started = self._last_line = 0.0
        self._start_batch = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._plain = not sys.stdout.isatty()
        if self._plain:
            self.disable()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._plain:
            print(*args, **kwargs)
        else:
            super().print(*args, **kwargs)

    # ---- fit -----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = self._last_line = time.monotonic()
        self.train_progress_bar = _Line(disable=self.is_disabled)
        if trainer.is_global_zero:
            self._ticker = _Ticker(lambda: self._tick(pl_module))

    def on_sanity_check_start(self, *_: Any) -> None:
        self._validation = (0, 0)

    def on_sanity_check_end(self, *_: Any) -> None:
        self._validation = (0, 0)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # type: ignore[override]
        self._started = self._last_line = time.monotonic()
        self._start_batch = module_of(pl_module).rollout_step
        self._show(self._start_batch, expected_batches(trainer, pl_module), pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        pass

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        record = record_of(pl_module)
        valid = record.rollouts.reward_valid
        self._facts["reward"] = f"reward {float(record.rollouts.reward[valid].double().mean()):.2f}"
        self._facts["speed"] = f"{tokens_per_second(record):,.0f} tokens/s"
        done, total = module_of(pl_module).rollout_step, expected_batches(trainer, pl_module)
        self._show(done, total, pl_module)
        late = time.monotonic() - self._last_line >= self.every_seconds
        if self._plain and trainer.is_global_zero and (late or done % self.every_n_batches == 0):
            self._say(" · ".join([_place(done, total), *self._facts_in_order(), *self._left(done, total)]))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pass

    def on_train_end(self, *_: Any) -> None:
        self._stop()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._fitting(trainer):
            super().on_validation_start(trainer, pl_module)

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not self._fitting(trainer):
            super().on_validation_batch_start(trainer, pl_module, batch, batch_idx, dataloader_idx)
            return
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        counts = [int(n) for n in batches] if isinstance(batches, list) else [int(batches)]
        self._validation = (sum(counts[:dataloader_idx]) + batch_idx + 1, sum(counts))

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not self._fitting(trainer):
            super().on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._fitting(trainer):
            super().on_validation_end(trainer, pl_module)
            return
        found = accuracies(trainer.callback_metrics)
        if not found or (trainer.sanity_checking and trainer.num_sanity_val_batches != trainer.num_val_batches):
            return
        self._facts["accuracy"] = f"accuracy {percent(next(iter(found.values())), with_error=False)}"
        if self._plain and trainer.is_global_zero:
            said = ", ".join(f"{name} {percent(value)}".strip() for name, value in found.items())
            done = module_of(pl_module).rollout_step
            self._say(f"validation {f'after batch {done}' if done else 'at the start'}: accuracy {said}")

    # ---- how it looks --------------------------------------------------------------------------------------------

    @staticmethod
    def _fitting(trainer: L.Trainer) -> bool:
        return trainer.state.fn == "fit"

    def _facts_in_order(self) -> list[str]:
        return [self._facts[name] for name in ("reward", "accuracy", "speed") if name in self._facts]

    def _left(self, done: int, total: int | None) -> list[str]:
        passed = time.monotonic() - self._started
        here = done - self._start_batch
        if total is None or here == 0:
            return [duration(passed)]
        return [f"{duration(passed / here * (total - done))} left"] if total > done else [duration(passed)]

    def _say(self, line: str) -> None:
        self._last_line = time.monotonic()
        print(line, flush=True)

    def _show(self, done: int, total: int | None, pl_module: L.LightningModule) -> None:
        bar = self.train_progress_bar
        assert isinstance(bar, _Line)
        bar.n, bar.total = done, total
        bar.place = f"{done}/{total}" if total is not None else str(done)
        bar.status = "  ".join([*self._left(done, total), *self._facts_in_order()])
        self._tick(pl_module)

    def _tick(self, pl_module: L.LightningModule) -> None:
        """Called twice a second from a thread of its own, so that a long phase does not look like a hang. It only
        reads."""
        phase = module_of(pl_module).phase
        if self._plain and phase == "warming up" and self._phase != phase:
            self._say("warming up on worked demonstrations …")
        self._phase = phase or self._phase
        shown = self._phase
        if phase == "validating" and self._validation[1]:
            shown += f" {self._validation[0]}/{self._validation[1]}"
        if not self._plain:
            self.train_progress_bar.set_description_str(f"{shown:<10}")

    def _stop(self) -> None:
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None
            self.train_progress_bar.close()


class _Line(Tqdm):
    """The terminal's line: phase, `place` (rollout batches), bar, then `status`."""

    place = status = ""

    def __init__(self, disable: bool) -> None:
        super().__init__(
            desc="starting  ",
            disable=disable,
            leave=True,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format="{desc} {place} {bar} {status}",
        )

    @property
    def format_dict(self) -> dict[str, Any]:
        known = super().format_dict
        columns = known["ncols"] or 80  # some terminals say that they have none
        return {**known, "ncols": columns, "place": self.place, "status": self.status}


class _Ticker:
    """Calls a function twice a second until it is stopped."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="apportion-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(0.5):
            self._function()

    def stop(self) -> None:
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def expected_batches(trainer: L.Trainer, pl_module: L.LightningModule) -> int | None:
    """Rollout batches that the fit will have by steps, epochs or budget, whichever ends first; None for no end."""
    module = module_of(pl_module)
    ends = []
    if trainer.max_steps > 0:
        ends.append(trainer.max_steps / (module.update_epochs * module.minibatches))
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        ends.append(trainer.max_epochs * trainer.num_training_batches)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BudgetLimit) and callback.share_spent(trainer) > 0:
            ends.append(module.rollout_step / callback.share_spent(trainer))
    known = [end for end in ends if math.isfinite(end)]
    return math.ceil(min(known) - 1e-9) if known else None  # 10 of a share of 0.1 is 100


def _place(done: int, total: int | None) -> str:
    return f"batch {done}" + (f"/{total}" if total is not None else "")
