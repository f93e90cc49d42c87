"""What validation averages, as torchmetrics: sums and counts in float64 that are added over batches and processes.

Nothing here averages averages: three right of eight is 0.375 whatever the batches and processes were.
"""

import torch
from torch import Tensor
from torchmetrics import Metric

from ..data.errors import UsageError


class MeanWithError(Metric):
    """The pooled mean of 0/1 or real values, with its standard error clustered by prompt.

    With s_p the sum and n_p the number of prompt p's values, P prompts, m = sum s_p / sum n_p:
    standard error = sqrt(P / (P - 1) * sum (s_p - m n_p)^2) / sum n_p, the cluster-robust one ("sandwich", CR1). With
    one value a prompt it is the usual sample standard deviation / sqrt(P). A prompt's several samples are not
    independent evidence on the task, so they do not make the error shrink as so many prompts would.

    NaN values are missing: they leave the mean, and a prompt without any value is not counted.

    `compute()` gives (mean, standard error), two float64 scalars: NaN for no value at all, and a NaN error for fewer
    than two prompts. Rounding leaves about 1e-8 times the values' size in an error that should be 0.
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = True
    _states = ("prompts", "values", "total", "total_squared", "total_times_count", "count_squared")

    def __init__(self) -> None:
        super().__init__()
        for name in self._states:
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Args:
        values: (prompts, samples), NaN where missing.
        """
        if values.ndim != 2:
            raise ValueError(f"values has shape {tuple(values.shape)}, expected (prompts, samples)")
        values = values.detach().double()
        known = ~values.isnan()
        count = known.sum(1).double()  # (P,)
        total = torch.where(known, values, 0.0).sum(1)  # (P,)
        added = {
            "prompts": count > 0,
            "values": count,
            "total": total,
            "total_squared": total**2,
            "total_times_count": total * count,
            "count_squared": count**2,
        }
        for name, terms in added.items():
            setattr(self, name, getattr(self, name) + terms.sum())

    def compute(self) -> tuple[Tensor, Tensor]:
        """(mean, standard error)."""
        state: dict[str, Tensor] = {name: getattr(self, name) for name in self._states}
        mean = state["total"] / state["values"]  # 0 / 0 is NaN: nothing was measured
        squares = (
            state["total_squared"] - 2 * mean * state["total_times_count"] + mean**2 * state["count_squared"]
        ).clamp(min=0.0)
        prompts = state["prompts"]
        error = (prompts / (prompts - 1) * squares).sqrt() / state["values"]
        return mean, torch.where(prompts > 1, error, torch.nan)


class PassAtK(MeanWithError):
    """Unbiased pass@k (2107.03374): the mean over prompts of 1 - C(n - c, k) / C(n, k), with its standard error.

    n is the number of a prompt's samples, c how many of them are right. A prompt with fewer than k samples that are
    not missing has no unbiased estimate and is left out.

    Args:
        k: how many tries; at least 1.
        threshold: a sample is right when its value is at least this.
    """

    def __init__(self, k: int, threshold: float = 1.0) -> None:
        super().__init__()
        if k < 1:
            raise UsageError(f"pass@k with k = {k}: give a whole number of at least 1")
        self.k = k
        self.threshold = threshold

    def update(self, values: Tensor) -> None:
        """Args:
            values: (prompts, samples), NaN where missing.

        Raises UsageError when there are fewer than k samples a prompt.
        """
        if values.ndim == 2 and values.shape[1] < self.k:
            raise UsageError(
                f"pass@{self.k} needs at least {self.k} samples a prompt, there are {values.shape[1]}: "
                "raise data.validation.samples or lower data.validation.pass_at"
            )
        super().update(pass_at_k(values, self.k, self.threshold)[:, None])


def pass_at_k(values: Tensor, k: int, threshold: float = 1.0) -> Tensor:
    """(prompts,) float64: 1 - C(n - c, k) / C(n, k) of each row of `values` (prompts, samples), NaN where n < k.

    The quotient is the product over i < k of (n - c - i) / (n - i), which is 0 as soon as n - c < k.
    """
    if values.ndim != 2:
        raise ValueError(f"values has shape {tuple(values.shape)}, expected (prompts, samples)")
    n = (~values.isnan()).sum(1, keepdim=True).double()
    c = (values >= threshold).sum(1, keepdim=True).double()  # a comparison with NaN is False
    i = torch.arange(k, dtype=torch.float64, device=values.device)
    all_wrong = ((n - c - i).clamp(min=0.0) / (n - i)).prod(1)
    return torch.where(n.squeeze(1) >= k, 1.0 - all_wrong, torch.nan)
