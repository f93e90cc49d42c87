"""What validation counts: every term of the verdicts, pass@k, and missing verdicts, by validation set."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..data.tasks.base import Verdict
from .metrics import MeanWithError, PassAtK


class ValidationMetrics(nn.Module):
    """Pooled means with standard errors, a set at a time.

    Args:
        sets: names of the validation sets; "" for the only one, whose tags carry no name.
        pass_at: values of k for pass@k.
    """

    def __init__(self, sets: Sequence[str], pass_at: Sequence[int]) -> None:
        super().__init__()
        self.sets = list(sets)
        self.terms: dict[str, MeanWithError] = nn.ModuleDict()  # type: ignore[assignment]
        passes = {f"{i}/{k}": PassAtK(k) for i in range(len(sets)) for k in pass_at}
        self.passes: dict[str, PassAtK] = nn.ModuleDict(passes)  # type: ignore[assignment]
        self.missing = [0] * len(sets)

    def update(self, dataset: int, verdicts: list[list[Verdict]]) -> None:
        """verdicts: (P, samples) of one batch. A prompt with a missing verdict is counted and left out."""
        whole = [row for row in verdicts if all(v.missing is None for v in row)]
        self.missing[dataset] += len(verdicts) - len(whole)
        if not whole:
            return
        device = next(iter(self.passes.values())).device if len(self.passes) else None
        for term in whole[0][0].terms:
            key = f"{dataset}/{term}"
            if key not in self.terms:
                self.terms[key] = MeanWithError().to(device) if device is not None else MeanWithError()
            values = torch.tensor([[v.terms[term] for v in row] for row in whole], dtype=torch.float64)
            self.terms[key].update(values)
            if term == "accuracy":
                for name, metric in self.passes.items():
                    if name.startswith(f"{dataset}/"):
                        metric.update(values)

    def compute(self, prefix: str) -> dict[str, float | Tensor]:
        """Scalars by tag: <prefix>/[<set>/]accuracy, …/accuracy_stderr, …/pass_at_<k>, …"""
        values: dict[str, float | Tensor] = {}
        named: list[tuple[str, str, MeanWithError]] = [
            (key, key.split("/", 1)[1], metric) for key, metric in self.terms.items()
        ]
        named += [(key, f"pass_at_{metric.k}", metric) for key, metric in self.passes.items()]
        for key, term, metric in named:
            name = self.sets[int(key.split("/", 1)[0])]
            tag = "/".join(part for part in (prefix, name, term) if part)
            values[tag], values[f"{tag}_stderr"] = metric.compute()
        for name, missing in zip(self.sets, self.missing, strict=True):
            if missing:
                values["/".join(part for part in (prefix, name, "missing_verdicts") if part)] = float(missing)
        return values

    def reset(self) -> None:
        for metric in (*self.terms.values(), *self.passes.values()):
            metric.reset()
        self.missing = [0] * len(self.sets)
