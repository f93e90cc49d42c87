"""How token losses become one number. Denominators are counted over the optimizer batch, never over a micro-batch."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..data.errors import UsageError
from .objectives.base import PolicyObjective
from .options import check_choice

AGGREGATIONS = {
    "token_mean": "all token losses over the number of tokens of the batch (DAPO, arXiv 2503.14476)",
    "sequence_mean": "mean over completions of their token means (GRPO, arXiv 2402.03300)",
    "sequence_sum": "mean over completions of their token sums (arXiv 2606.29238)",
    "constant_length": "mean over completions of their token sums over a constant (Dr. GRPO, arXiv 2503.20783)",
}


def check_aggregation(
    aggregation: str, constant_length: int | None = None, objective: PolicyObjective | None = None
) -> None:
    """Raise a UsageError for an unknown aggregation, a constant length that is missing, useless or not positive, or an
    objective that the aggregation does not go with (a sequence-level ratio needs a sequence mean)."""
    check_choice("model.aggregation", aggregation, AGGREGATIONS)
    if aggregation == "constant_length" and (constant_length is None or constant_length < 1):
        raise UsageError(
            f"model.aggregation=constant_length divides by constant_length, which is {constant_length}: give at least "
            "1 (usually the largest completion length)"
        )
    if aggregation != "constant_length" and constant_length is not None:
        raise UsageError(
            f"model.constant_length={constant_length} has no effect with model.aggregation={aggregation}: leave it "
            "out, or use model.aggregation=constant_length"
        )
    if objective is not None and objective.aggregations is not None and aggregation not in objective.aggregations:
        raise UsageError(
            f"{type(objective).__name__} does not go with model.aggregation={aggregation}: "
            f"use {' or '.join(sorted(objective.aggregations))}"
        )


def denominator(
    aggregation: str,
    mask: Tensor,
    constant_length: int | None = None,
    reduce_sum: Callable[[Tensor], Tensor] = lambda count: count,
) -> Tensor:
    """What `aggregate` divides by: tokens of the batch for token_mean, else completions with at least one token.

    Count it once over the whole optimizer batch, before the first backward pass. A row without a token in the mask (an
    empty completion, a missing reward, a masked truncation) is in no denominator; a row whose advantage is 0 (a
    constant group) is, so the scale of a KL or entropy term does not depend on how many groups are constant.

    Args:
        mask: (N, T) bool, the loss mask of the optimizer batch.
        constant_length: of aggregation=constant_length; only checked here, `aggregate` divides by it.
        reduce_sum: sums over processes.

    Returns: a float64 scalar, 0 if there is no token at all.
    """
    check_aggregation(aggregation, constant_length)
    _check_mask(mask, mask)
    counted = mask.sum() if aggregation == "token_mean" else mask.any(1).sum()
    return reduce_sum(counted.to(torch.float64))


def aggregate(
    loss: Tensor, mask: Tensor, aggregation: str, denominator: Tensor, constant_length: int | None = None
) -> Tensor:
    """A micro-batch's share of the optimizer batch's loss; the shares of any split into rows add up to the same loss.

    Args:
        loss: (N, T) per token; ignored outside the mask, also where it is infinite or NaN.
        mask: (N, T) bool, the loss mask of the micro-batch.
        denominator: of the whole optimizer batch, from `denominator`.
        constant_length: of aggregation=constant_length.

    Returns: a scalar; 0 without a token.
    """
    check_aggregation(aggregation, constant_length)
    _check_mask(loss, mask)
    sums = torch.where(mask, loss, 0.0).sum(1)  # (N,)
    if aggregation == "sequence_mean":
        sums = sums / mask.sum(1).clamp(min=1)
    elif constant_length is not None:
        sums = sums / constant_length
    return sums.sum() / denominator.to(loss).clamp(min=1)


def _check_mask(loss: Tensor, mask: Tensor) -> None:
    if loss.ndim != 2 or loss.shape != mask.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"loss and mask must be (N, T) and mask bool; got {tuple(loss.shape)}, {tuple(mask.shape)} {mask.dtype}"
        )
