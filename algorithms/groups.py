"""Statistics of groups of rollouts by group id, over valid rows only. Advantages are not made here.

Ids are any integers in any order, and groups may have any sizes. Everything is summed in float64 and returned in the
dtype of the values, with one number a row. A mean lies within the smallest and the largest of its values (rounding is
clamped away), so a constant group has exactly its constant as mean, and exactly 0 as standard deviation.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class _Table(NamedTuple):
    """Rows gathered into a table with one row a group: K groups, R = the size of the largest."""

    row: Tensor  # (N,) long: the table's row of each rollout
    column: Tensor  # (N,) long
    members: Tensor  # (K, R) bool: valid rollouts

    def place(self, values: Tensor) -> Tensor:
        """(K, R) float64 from (N,); 0 where there is no valid rollout, whatever stands there."""
        table = torch.zeros(self.members.shape, dtype=torch.float64, device=values.device)
        table[self.row, self.column] = values.to(torch.float64)
        return table.masked_fill(~self.members, 0.0)


def _tabulate(group: Tensor, valid: Tensor) -> _Table:
    if group.ndim != 1 or group.shape != valid.shape or valid.dtype != torch.bool:
        raise ValueError(
            f"group and valid must be (N,) and valid bool; got {tuple(group.shape)}, {tuple(valid.shape)} {valid.dtype}"
        )
    _, row, sizes = torch.unique(group, return_inverse=True, return_counts=True)
    order = torch.argsort(row, stable=True)
    column = torch.empty_like(row)
    column[order] = torch.arange(len(row), device=row.device) - (sizes.cumsum(0) - sizes)[row[order]]
    members = torch.zeros(len(sizes), int(sizes.max()), dtype=torch.bool, device=group.device)
    members[row, column] = valid
    return _Table(row, column, members)


def _check_values(values: Tensor, group: Tensor) -> None:
    if values.shape != group.shape or not values.is_floating_point():
        raise ValueError(
            f"values must be floating point of shape {tuple(group.shape)}; got {values.dtype} {tuple(values.shape)}"
        )


def group_count(group: Tensor, valid: Tensor) -> Tensor:
    """(N,) long: valid rows in each row's group, R in the formulas."""
    table = _tabulate(group, valid)
    return table.members.sum(1)[table.row]


def group_sum(values: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """(N,): sum of the valid values of each row's group; 0 where there are none."""
    _check_values(values, group)
    table = _tabulate(group, valid)
    return table.place(values).sum(1)[table.row].to(values.dtype)


def group_mean(values: Tensor, group: Tensor, valid: Tensor, weights: Tensor | None = None) -> Tensor:
    """(N,): sum_j w_j x_j / sum_j w_j over the valid rows of each row's group; 0 where there are none.

    Args:
        values: (N,) floating point; invalid rows may hold anything.
        group: (N,) ids.
        valid: (N,) bool.
        weights: (N,) of at least 0; equal by default, and in groups where they add up to 0.
    """
    return _mean(values, group, valid, weights, leave_one_out=False)


def leave_one_out_mean(values: Tensor, group: Tensor, valid: Tensor, weights: Tensor | None = None) -> Tensor:
    """(N,): `group_mean` over the other valid rows of each row's group, summed over the others themselves (total
    minus own would cancel); 0 where there are no others."""
    return _mean(values, group, valid, weights, leave_one_out=True)


def _mean(values: Tensor, group: Tensor, valid: Tensor, weights: Tensor | None, leave_one_out: bool) -> Tensor:
    _check_values(values, group)
    table = _tabulate(group, valid)
    x = table.place(values)[:, None]  # (K, 1, R)
    counted = table.members[:, None]  # (K, 1, R); (K, R, R) when each member sees the others
    if leave_one_out:
        counted = counted & ~torch.eye(counted.shape[-1], dtype=torch.bool, device=counted.device)
    w = counted.to(torch.float64)
    if weights is not None:
        _check_values(weights, group)
        given = w * table.place(weights)[:, None]
        w = torch.where(given.sum(-1, keepdim=True) > 0, given, w)
    total = w.sum(-1)
    mean = (w * x).sum(-1) / torch.where(total > 0, total, 1.0)
    low = torch.where(w > 0, x, torch.inf).amin(-1)
    high = torch.where(w > 0, x, -torch.inf).amax(-1)
    mean = torch.where(total > 0, mean.clamp(low, high), 0.0)  # (K, 1) or (K, R)
    return mean[table.row, table.column if leave_one_out else 0].to(values.dtype)


def group_std(values: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """(N,): unbiased standard deviation (R - 1 in the denominator) of the valid values of each row's group, in two
    passes. Exactly 0 for a constant group, and 0 for fewer than two valid rows, where it is not defined."""
    _check_values(values, group)
    table = _tabulate(group, valid)
    mean = group_mean(values.to(torch.float64), group, valid)
    squares = table.place((values.to(torch.float64) - mean).square()).sum(1)
    variance = squares / (table.members.sum(1) - 1).clamp(min=1)
    return variance.sqrt()[table.row].to(values.dtype)


def constant_groups(values: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """(N,) bool: whether all valid values of a row's group are exactly equal; True for fewer than two of them.

    Values are compared, not a variance with 0: a one-pass fp32 variance of seven times 0.95 is 1.8e-7.
    """
    _check_values(values, group)
    table = _tabulate(group, valid)
    x = table.place(values)
    low = torch.where(table.members, x, torch.inf).amin(1)
    high = torch.where(table.members, x, -torch.inf).amax(1)
    return (low >= high)[table.row]


def is_constant(values: Tensor, valid: Tensor) -> bool:
    """`constant_groups` of rows that are one group."""
    return bool(constant_groups(values, torch.zeros_like(values, dtype=torch.long), valid).all())
