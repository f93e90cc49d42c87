"""Completions to read: as JSON lines in the run's folder, and as a table in TensorBoard."""

import math
from pathlib import Path
from typing import Any

import lightning as L
import torch

from ..data.batch import RolloutBatch
from .access import batch_number, check_at_least_one, record_of, tensorboard
from .json_lines import json_line


class Samples(L.Callback):
    """Writes a few completions of a rollout batch with prompt, reward, verdict and credit: to samples.jsonl in the
    run's folder, and as the TensorBoard text "samples".

    The completions are spread evenly over the batch, so they show the policy as it is, neither its best nor its worst.

    Args:
        every_n_batches: rollout batches from one writing to the next.
        count: completions each time.
    """

    def __init__(self, every_n_batches: int = 10, count: int = 4) -> None:
        check_at_least_one("Samples", every_n_batches=every_n_batches, count=count)
        self.every_n_batches = every_n_batches
        self.count = count
        self._folder = Path()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # log_dir asks all processes

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = batch_number(pl_module)
        if step % self.every_n_batches or not trainer.is_global_zero:
            return
        rows = sample_rows(record_of(pl_module).rollouts, self.count, step)
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json_line(row) for row in rows)
        board = tensorboard(trainer)
        if board is not None:
            board.add_text("samples", samples_table(rows), step)


def sample_rows(rollouts: RolloutBatch, count: int, step: int) -> list[dict[str, Any]]:
    """`count` completions, evenly spaced over the rows of the batch, as plain data.

    "reward" is NaN where it is missing; "advantage" is the mean over the sampled tokens of a completion (NaN for an
    empty one or before there are advantages).
    """
    chosen = sorted({int(row) for row in torch.linspace(0, len(rollouts) - 1, min(count, len(rollouts))).round()})
    rows = []
    for row in chosen:
        prompt = int(rollouts.prompt_index[row])
        missing = not bool(rollouts.reward_valid[row])
        mask = rollouts.action_mask[row]
        advantages = rollouts.advantages
        rows.append(
            {
                "step": step,
                "group": int(rollouts.group[row]),
                "prompt_id": int(rollouts.prompt_id[prompt]),
                "prompt": rollouts.prompt_texts[prompt],
                "completion": rollouts.completion_texts[row],
                "reward": math.nan if missing else float(rollouts.reward[row]),
                "reward_terms": {name: float(values[row]) for name, values in rollouts.reward_terms.items()},
                "verdict": verdict_of(rollouts, row),
                "truncated": bool(rollouts.truncated[row]),
                "tokens": int(mask.sum()),
                "advantage": math.nan if advantages is None else float(advantages[row][mask].double().mean()),
            }
        )
    return rows


def verdict_of(rollouts: RolloutBatch, row: int) -> str:
    """In one word: "right" or "wrong" by the term "accuracy" (a number where it is in between), "missing" where the
    reward is, "unjudged" where no term has that name."""
    if not bool(rollouts.reward_valid[row]):
        return "missing"
    if "accuracy" not in rollouts.reward_terms:
        return "unjudged"
    accuracy = float(rollouts.reward_terms["accuracy"][row])
    if math.isnan(accuracy):
        return "missing"
    return {1.0: "right", 0.0: "wrong"}.get(accuracy, f"{accuracy:.2f}")


def samples_table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table that TensorBoard can show."""
    lines = ["| prompt | completion | verdict | reward | advantage |", "|:--|:--|:--|--:|--:|"]
    for row in rows:
        verdict = {"right": "✓ right", "wrong": "✗ wrong"}.get(row["verdict"]) or str(row["verdict"])
        if row["truncated"]:
            verdict += ", truncated"
        numbers = [
            "–" if math.isnan(value) else f"{value:{form}}"
            for value, form in ((row["reward"], ".3g"), (row["advantage"], "+.3f"))
        ]
        cells = [cell(row["prompt"]), cell(row["completion"]) or "*(empty)*", verdict, *numbers]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(text: str, longest: int = 2000) -> str:
    """`text` as it is in one cell of a Markdown table: nothing in it is read as Markdown."""
    if len(text) > longest:
        text = f"{text[:longest]} … ({len(text) - longest} more characters)"
    for mark in "\\`*_{}[]()#+-.!|":
        text = text.replace(mark, f"\\{mark}")
    for mark, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("\r", ""), ("\n", "<br>")):
        text = text.replace(mark, entity)
    return text
