"""Where the time goes, and how many tokens a second that makes."""

import time
from typing import TYPE_CHECKING, Any

import lightning as L

from .access import record_of

if TYPE_CHECKING:
    from ..modules.policy_gradient import StepRecord


def tokens_per_second(record: "StepRecord") -> float:
    """Sampled tokens of the batch over the seconds that sampling, scoring and updating took."""
    seconds = sum(record.seconds.values())
    return float(record.rollouts.lengths.sum()) / seconds if seconds > 0 else 0.0


class Throughput(L.Callback):
    """Logs seconds a rollout batch by phase (time/rollout, time/score, time/update), the whole batch with what
    Lightning and other callbacks take (time/batch), and throughput/tokens_per_second: sampled tokens over the seconds
    of all phases.
    """

    def __init__(self) -> None:
        self._start = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        record = record_of(pl_module)
        for phase, seconds in record.seconds.items():
            pl_module.log(f"time/{phase}", seconds, batch_size=1)
        pl_module.log("time/batch", time.perf_counter() - self._start, batch_size=1)
        pl_module.log("throughput/tokens_per_second", tokens_per_second(record), batch_size=1)
