"""Statistics of groups against plain Python, and the numeric traps of ALGORITHMS section 2."""

import math
import statistics
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings, strategies as st

from apportion.algorithms.groups import (
    constant_groups,
    group_count,
    group_mean,
    group_std,
    group_sum,
    is_constant,
    leave_one_out_mean,
)

GROUP = torch.tensor([9, -2, 9, 9, -2, 5])
VALID = torch.tensor([True, True, False, True, True, True])
VALUES = torch.tensor([1.0, 2.0, torch.nan, 4.0, 6.0, 3.0])


def test_hand_computed() -> None:
    """Group 9 has 1 and 4 (one value is missing), group -2 has 2 and 6, group 5 has 3 alone."""
    of = GROUP, VALID
    assert group_count(*of).tolist() == [2, 2, 2, 2, 2, 1]
    assert group_sum(VALUES, *of).tolist() == [5, 8, 5, 5, 8, 3]
    assert group_mean(VALUES, *of).tolist() == [2.5, 4, 2.5, 2.5, 4, 3]
    assert leave_one_out_mean(VALUES, *of).tolist() == [4, 6, 2.5, 1, 2, 0]
    expected = torch.tensor(
        [3 / math.sqrt(2), 4 / math.sqrt(2), 3 / math.sqrt(2), 3 / math.sqrt(2), 4 / math.sqrt(2), 0]
    )
    torch.testing.assert_close(group_std(VALUES, *of), expected)
    assert constant_groups(VALUES, *of).tolist() == [False, False, False, False, False, True]


def test_weighted_means() -> None:
    weights = torch.tensor([3.0, 1.0, 5.0, 1.0, 3.0, 0.0])
    of = GROUP, VALID
    assert group_mean(VALUES, *of, weights).tolist() == [1.75, 5, 1.75, 1.75, 5, 3]
    assert leave_one_out_mean(VALUES, *of, weights)[[0, 1, 3, 4]].tolist() == [4, 6, 1, 2]
    nothing = torch.zeros(6)
    assert torch.equal(group_mean(VALUES, *of, nothing), group_mean(VALUES, *of)), "no weight: the plain mean"


def test_a_group_without_a_valid_row_gives_zeros() -> None:
    values, group, valid = (
        torch.full((3,), torch.nan),
        torch.zeros(3, dtype=torch.long),
        torch.zeros(3, dtype=torch.bool),
    )
    for statistic in (group_sum, group_mean, leave_one_out_mean, group_std):
        assert statistic(values, group, valid).tolist() == [0, 0, 0]
    assert group_count(group, valid).tolist() == [0, 0, 0]
    assert constant_groups(values, group, valid).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constant", [0.95, 0.1, 1 / 3, -0.7, 1e-30, 123456.789])
def test_pitfall_09_constant_groups_are_exact(constant: float, dtype: torch.dtype) -> None:
    """Every mean of a constant group is the constant to the last bit and its deviation exactly 0."""
    for size in (2, 3, 6, 7, 10, 49):
        values = torch.full((size,), constant, dtype=dtype)
        of = torch.zeros(size, dtype=torch.long), torch.ones(size, dtype=torch.bool)
        weights = torch.rand(size, dtype=dtype, generator=torch.Generator().manual_seed(size))
        assert torch.equal(group_mean(values, *of), values)
        assert torch.equal(group_mean(values, *of, weights), values)
        assert torch.equal(leave_one_out_mean(values, *of), values)
        assert torch.equal(leave_one_out_mean(values, *of, weights), values)
        assert torch.equal(group_std(values, *of), torch.zeros_like(values))
        assert constant_groups(values, *of).all()


def test_trap_seven_equal_values_and_a_zero() -> None:
    """The mean of the seven equal values, seen from the 0, is 0.95 exactly; their one-pass fp32 variance is not 0."""
    values = torch.tensor([0.95] * 7 + [0.0])
    of = torch.zeros(8, dtype=torch.long), torch.ones(8, dtype=torch.bool)
    assert leave_one_out_mean(values, *of)[7] == values[0]
    assert group_std(values[:7], of[0][:7], of[1][:7])[0] == 0
    assert not constant_groups(values, *of).any()


def test_trap_values_far_from_zero_need_two_passes() -> None:
    """Values 1e4 + {0, 1, 2}: E[x^2] - E[x]^2 in fp32 is off by several units, the right answer is 1."""
    values = torch.tensor([10000.0, 10001.0, 10002.0])
    of = torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool)
    assert group_std(values, *of).tolist() == [1.0, 1.0, 1.0]
    wide = torch.tensor([1e8, 1e8 + 1, 1e8 + 2], dtype=torch.float64)
    assert group_std(wide, *of).tolist() == [1.0, 1.0, 1.0], "E[x^2] - E[x]^2 fails here in float64 too"


def test_trap_leave_one_out_does_not_cancel() -> None:
    """Total minus own loses the others beside a huge value: they are summed themselves."""
    values = torch.tensor([1e20, 1.0, 2.0], dtype=torch.float64)
    of = torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool)
    assert leave_one_out_mean(values, *of)[0] == 1.5
    weights = torch.tensor([1e20, 1.0, 3.0], dtype=torch.float64)
    assert leave_one_out_mean(values, *of, weights)[0] == 1.75


def test_constancy_is_equality_not_nearness() -> None:
    values = torch.tensor([0.5, 0.5 + 2**-24, 0.5], dtype=torch.float32)
    everything = torch.ones(3, dtype=torch.bool)
    assert not is_constant(values, everything)
    assert is_constant(values, torch.tensor([True, False, True]))
    assert is_constant(values, torch.tensor([False, True, False])), "one value has nothing to differ from"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 2.0, 4.0], dtype=dtype)
    of = torch.tensor([1, 1, 2]), torch.ones(3, dtype=torch.bool)
    for statistic in (group_sum, group_mean, leave_one_out_mean, group_std):
        assert statistic(values, *of).dtype == dtype


def test_shapes_are_checked() -> None:
    group, valid = torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool)
    with pytest.raises(ValueError, match="floating point of shape"):
        group_mean(torch.zeros(4), group, valid)
    with pytest.raises(ValueError, match="floating point of shape"):
        group_mean(torch.zeros(3, dtype=torch.long), group, valid)
    with pytest.raises(ValueError, match="valid bool"):
        group_mean(torch.zeros(3), group, valid.long())


ROWS = st.lists(
    st.tuples(st.integers(-3, 3), st.booleans(), st.floats(-100, 100, width=32), st.integers(0, 5)),
    min_size=1,
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.randoms(use_true_random=False))
def test_pitfall_07_against_plain_python_in_any_order(rows: list[tuple[int, bool, float, int]], random) -> None:
    """Exact fractions per group, whatever the ids, sizes and order of the rows."""
    random.shuffle(rows)
    group = torch.tensor([row[0] for row in rows])
    valid = torch.tensor([row[1] for row in rows])
    values = torch.tensor([row[2] for row in rows], dtype=torch.float64)
    weights = torch.tensor([float(row[3]) for row in rows], dtype=torch.float64)
    got = {
        "mean": group_mean(values, group, valid),
        "weighted": group_mean(values, group, valid, weights),
        "others": leave_one_out_mean(values, group, valid),
        "weighted others": leave_one_out_mean(values, group, valid, weights),
        "std": group_std(values, group, valid),
    }
    for i, row in enumerate(rows):
        members = [j for j, other in enumerate(rows) if other[0] == row[0] and other[1]]
        others = [j for j in members if j != i]
        assert group_count(group, valid)[i] == len(members)
        expected = {
            "mean": _mean(rows, members, False),
            "weighted": _mean(rows, members, True),
            "others": _mean(rows, others, False),
            "weighted others": _mean(rows, others, True),
            "std": statistics.stdev([rows[j][2] for j in members]) if len(members) > 1 else 0.0,
        }
        for name, value in expected.items():
            assert float(got[name][i]) == pytest.approx(float(value), rel=1e-12, abs=1e-10), name


def _mean(rows: list[tuple[int, bool, float, int]], chosen: list[int], weighted: bool) -> Fraction:
    weights = [Fraction(rows[j][3]) if weighted else Fraction(1) for j in chosen]
    if sum(weights) == 0:
        weights = [Fraction(1)] * len(chosen)
    if not chosen:
        return Fraction(0)
    return sum((w * Fraction(rows[j][2]) for w, j in zip(weights, chosen, strict=True)), Fraction(0)) / sum(weights)
