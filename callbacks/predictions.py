"""Predictions as JSON lines."""

import os
from pathlib import Path
from typing import Any, TextIO

import lightning as L

from .json_lines import json_line


class PredictionWriter(L.Callback):
    """Writes what `predict` gives, one completion a line: prompt, completion, token ids and strings, reward and its
    terms, whether it was truncated, and the advantage of every token. A number that is missing is null.

    While predicting, lines go to a file of the same name with ".part" after it, batch by batch; it gets its own name
    when all are there. Of several processes each writes a file of its own (predictions.rank1.jsonl, …).

    Args:
        path: the file; "predictions.jsonl" in the run's folder, or in the current one without a logger, unless given.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._target = Path()
        self._file: TextIO | None = None
        self._rows = 0

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = trainer.log_dir if trainer.loggers else None  # log_dir asks all processes
        target = self.path or Path(folder or ".") / "predictions.jsonl"
        if trainer.world_size > 1 and trainer.global_rank > 0:
            target = target.with_name(f"{target.stem}.rank{trainer.global_rank}{target.suffix}")
        self._target = target
        self._rows = 0
        target.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._part.open("w", encoding="utf-8")

    @property
    def _part(self) -> Path:
        return self._target.with_name(self._target.name + ".part")

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: list[dict[str, Any]],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert self._file is not None
        self._file.writelines(json_line(row) for row in outputs)
        self._file.flush()
        self._rows += len(outputs)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()
        self._part.replace(self._target)
        print(f"{self._rows:,} completions are in {self._target}")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
