"""The validation metrics against numbers by hand and brute-force references."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from apportion.data.errors import UsageError
from apportion.modules.metrics import MeanWithError, PassAtK, pass_at_k

NAN = math.nan


def computed(metric, *batches):
    for batch in batches:
        metric.update(torch.as_tensor(batch))
    mean, error = metric.compute()
    return float(mean), float(error)


def test_pitfall_29_three_of_eight_is_0_375_for_any_batches():
    """1 of 1 and 2 of 7: the mean of the two means would be 0.64."""
    ones = [[1.0]], [[1.0], [0.0], [0.0], [1.0], [0.0], [0.0], [0.0]]
    assert computed(MeanWithError(), *ones)[0] == 0.375
    halves = [[1.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]
    assert computed(MeanWithError(), *halves)[0] == 0.375


def test_pitfall_29_processes_pool_sums_and_counts():
    """Two processes with uneven shares, put together as torchmetrics does it: every state summed."""
    shares = [torch.tensor([[1.0]]), torch.tensor([[1.0], [0.0], [0.0], [1.0], [0.0], [0.0], [0.0]])]
    metrics = [MeanWithError() for _ in shares]
    for metric, share in zip(metrics, shares, strict=True):
        metric.update(share)
    assert all(reduction is not None for reduction in metrics[0]._reductions.values())
    pooled = MeanWithError()
    pooled.update(torch.zeros(1, 1))
    for name, reduction in pooled._reductions.items():
        assert callable(reduction)
        setattr(pooled, name, reduction(torch.stack([getattr(metric, name) for metric in metrics])))
    together = computed(MeanWithError(), torch.cat(shares))
    assert tuple(map(float, pooled.compute())) == together
    assert together[0] == 0.375


def test_standard_error_of_one_sample_a_prompt_is_the_usual_one():
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    mean, error = computed(MeanWithError(), [[v] for v in values])
    assert mean == 0.6
    assert error == pytest.approx(math.sqrt(0.3 / 5))  # unbiased variance 0.3


def test_standard_error_clusters_by_prompt():
    """Four prompts, each with four equal samples, are four observations and not sixteen."""
    values = torch.tensor([1.0, 0.0, 0.0, 1.0])
    once = computed(MeanWithError(), values[:, None])
    repeated = computed(MeanWithError(), values[:, None].expand(4, 4))
    assert repeated == pytest.approx(once)
    mixed = computed(MeanWithError(), [[1.0, 0.0, 1.0, 0.0]] * 4)
    assert mixed == (0.5, 0.0)  # every prompt alike: nothing varies between prompts


def test_missing_values_leave_the_mean():
    values = [[1.0, NAN], [0.0, 0.0], [NAN, NAN]]
    mean, error = computed(MeanWithError(), values)
    assert mean == pytest.approx(1 / 3)
    # s = (1, 0), n = (1, 2): residuals 2/3 and -2/3; sqrt(2 * 8/9) / 3
    assert error == pytest.approx(math.sqrt(2 * 8 / 9) / 3)


def test_too_little_to_say():
    mean, error = computed(MeanWithError(), [[1.0, 0.0]])
    assert mean == 0.5
    assert math.isnan(error)
    assert all(math.isnan(x) for x in computed(MeanWithError(), [[NAN]]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, 0.25, -3.5, NAN]), min_size=3, max_size=3), min_size=2, max_size=9),
    st.integers(1, 8),
)
def test_mean_and_error_equal_plain_loops(rows, cut):
    known = [[v for v in row if not math.isnan(v)] for row in rows]
    known = [row for row in known if row]
    metric = MeanWithError()
    for part in (rows[:cut], rows[cut:]):
        if part:
            metric.update(torch.tensor(part))
    mean, error = map(float, metric.compute())
    if not known:
        assert math.isnan(mean)
        return
    count = sum(map(len, known))
    expected = sum(map(sum, known)) / count
    assert mean == pytest.approx(expected)
    if len(known) < 2:
        assert math.isnan(error)
        return
    squares = sum((sum(row) - expected * len(row)) ** 2 for row in known)
    assert error == pytest.approx(math.sqrt(len(known) / (len(known) - 1) * squares) / count, abs=1e-7)


def test_states_stay_float64_under_half_precision_modules():
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.metric = MeanWithError()

    holder = Holder().to(torch.bfloat16)
    assert computed(holder.metric, torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.bfloat16))[0] == 1 / 3


def test_pass_at_k_equals_the_share_of_subsets_with_a_right_one():
    for n in range(1, 7):
        for right in range(n + 1):
            row = torch.tensor([[1.0] * right + [0.0] * (n - right)])
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(range(n), k))
                share = sum(any(i < right for i in subset) for subset in subsets) / len(subsets)
                assert float(pass_at_k(row, k)) == pytest.approx(share, abs=1e-15)


def test_pass_at_k_mean_and_error_over_prompts():
    values = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    per_prompt = [1 / 2, 5 / 6, 0.0]  # 1 - C(3,2)/6, 1 - C(2,2)/6, 0
    mean, error = computed(PassAtK(2), values)
    assert mean == pytest.approx(sum(per_prompt) / 3)
    assert error == pytest.approx(torch.tensor(per_prompt, dtype=torch.float64).std().item() / math.sqrt(3))
    assert computed(PassAtK(1), values)[0] == pytest.approx(computed(MeanWithError(), values)[0])


def test_pass_at_k_is_right_from_its_threshold_on():
    assert computed(PassAtK(1), [[0.9, 0.2], [1.0, 1.0]])[0] == 0.5
    assert computed(PassAtK(1, threshold=0.9), [[0.9, 0.2], [1.0, 1.0]])[0] == 0.75


def test_pass_at_k_leaves_out_prompts_with_too_few_known_samples():
    assert computed(PassAtK(2), [[1.0, NAN], [0.0, 1.0], [0.0, 0.0]])[0] == 0.5


def test_pass_at_k_refuses_what_it_cannot_estimate():
    with pytest.raises(UsageError, match="pass@4 needs at least 4 samples a prompt, there are 2"):
        PassAtK(4).update(torch.zeros(3, 2))
    with pytest.raises(UsageError, match="k = 0"):
        PassAtK(0)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="expected \\(prompts, samples\\)"):
        MeanWithError().update(torch.zeros(3))
    with pytest.raises(ValueError, match="expected \\(prompts, samples\\)"):
        PassAtK(1).update(torch.zeros(3))


def test_reset_forgets():
    metric = MeanWithError()
    metric.update(torch.ones(2, 2))
    metric.reset()
    assert computed(metric, [[0.0], [1.0]])[0] == 0.5
