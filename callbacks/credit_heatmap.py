"""Credit by token, to look at: an image in TensorBoard."""

import math
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ..data.batch import RolloutBatch
from .access import batch_number, check_at_least_one, module_of, record_of, tensorboard
from .credit_figure import CreditRow, credit_figure
from .samples import verdict_of


class CreditHeatmap(L.Callback):
    """Draws the advantages of one group's completions as coloured text: the TensorBoard image "credit/heatmap".

    The group is the first of the batch with an advantage other than 0; where no group has one, nothing is drawn. Rows
    are ordered by reward; of a larger group the best and the worst completions are shown.

    Args:
        every_n_batches: rollout batches from one picture to the next.
        completions: at most this many completions in a picture.
    """

    def __init__(self, every_n_batches: int = 10, completions: int = 8) -> None:
        check_at_least_one("CreditHeatmap", every_n_batches=every_n_batches, completions=completions)
        self.every_n_batches = every_n_batches
        self.completions = completions

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if tensorboard(trainer) is None:
            rank_zero_warn(
                "CreditHeatmap draws into TensorBoard, but the trainer has no TensorBoardLogger: no pictures"
            )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = batch_number(pl_module)
        if step % self.every_n_batches or not trainer.is_global_zero:
            return
        board = tensorboard(trainer)
        rollouts = record_of(pl_module).rollouts
        group = group_with_credit(rollouts)
        if board is None or group is None:
            return
        rows = by_reward(rollouts, group)
        shown = ends(rows, self.completions)
        policy = module_of(pl_module).policy
        drawn = []
        for row in shown.tolist():
            used = rollouts.completion_mask[row]
            assert rollouts.advantages is not None
            drawn.append(
                CreditRow(
                    label=row_label(rollouts, row),
                    tokens=policy.token_strings(rollouts.completion_ids[row, used].tolist()),
                    advantages=rollouts.advantages[row, used].tolist(),
                    sampled=rollouts.action_mask[row, used].tolist(),
                )
            )
        prompt = rollouts.prompt_texts[int(rollouts.prompt_index[rows[0]])]
        count = f"{len(shown)} of {len(rows)}" if len(shown) < len(rows) else str(len(rows))
        caption = f"{count} completions of one prompt at rollout batch {step}; one cell is one token"
        board.add_figure("credit/heatmap", credit_figure(prompt, caption, drawn), step, close=True)


def group_with_credit(rollouts: RolloutBatch) -> Tensor | None:
    """The rows of the first group that has an advantage other than 0."""
    if rollouts.advantages is None:
        return None
    has_credit = ((rollouts.advantages != 0) & rollouts.action_mask).any(1)
    return next((rows for rows in rollouts.rows_by_group() if has_credit[rows].any()), None)


def by_reward(rollouts: RolloutBatch, rows: Tensor) -> Tensor:
    """The rows from the highest reward to the lowest, missing ones last."""
    reward = torch.where(rollouts.reward_valid[rows], rollouts.reward[rows].double(), -math.inf)
    return rows[reward.argsort(descending=True, stable=True)]


def ends(rows: Tensor, most: int) -> Tensor:
    """All rows, or the first and the last ones, `most` together."""
    first = math.ceil(most / 2)
    return rows if len(rows) <= most else torch.cat([rows[:first], rows[len(rows) - (most - first) :]])


def row_label(rollouts: RolloutBatch, row: int) -> str:
    """A completion's reward with its verdict's sign, or that the reward is missing."""
    if not bool(rollouts.reward_valid[row]):
        return "missing"
    sign = {"right": "✓ ", "wrong": "✗ "}.get(verdict_of(rollouts, row), "")
    return f"{sign}reward {float(rollouts.reward[row]):.3g}"
