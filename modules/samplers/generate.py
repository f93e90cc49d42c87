"""Sampling by transformers' own `generate`: slow, and works for every model that transformers can generate with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from ...data.errors import UsageError
from ...data.sampler import Finished, Limits, Sampler, Samples, uniforms
from .drawing import draw


class GenerateSampler(Sampler):
    """The reference engine: `transformers`' generate with its key-value cache, one row a completion.

    Tokens are drawn by inverting the cumulative distribution (fp64) at the random numbers of the completion's own seed,
    so a completion is the same whatever else is in the batch, up to rounding of the model itself. Settings that a model
    brings for generation (its temperature, repetition penalty, ...) are not used: only the policy's are.

    Args:
        rows_per_call: completions that are sampled at once; more are sampled in several calls.
    """

    def __init__(self, rows_per_call: int = 64) -> None:
        super().__init__()
        if rows_per_call < 1:
            raise UsageError(f"data.sampler.rows_per_call is {rows_per_call}: give a whole number of at least 1")
        self.rows_per_call = rows_per_call

    def generate(
        self,
        policy: Any,
        prefixes: Sequence[Sequence[int]],
        members: int,
        limits: Limits,
        seeds: Sequence[int],
        finished: Finished | None = None,
    ) -> Samples:
        """See `Sampler.generate`. Prefixes of similar length share a call. A temperature of 0 takes the most probable
        token; log-probabilities, entropies and sums of squares are then those of temperature 1.

        Log-probabilities are of the distribution that was sampled, after top-k and top-p; entropy and sum of squared
        probabilities are of the whole one.
        """
        if not all(prefixes):
            raise ValueError("an empty prefix cannot be continued: give every prefix at least one token")
        rows = [prefix for prefix in prefixes for _ in range(members)]
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        calls = [order[i : i + self.rows_per_call] for i in range(0, len(order), self.rows_per_call)]
        parts = [self._one_call(policy, [rows[r] for r in call], [seeds[r] for r in call], limits) for call in calls]
        samples = _joined(parts, order)
        samples.ids.masked_fill_(~samples.mask, policy.pad_token_id)
        return samples

    def _one_call(self, policy: Any, rows: list[Sequence[int]], seeds: list[int], limits: Limits) -> Samples:
        model, device = policy.model, policy.device
        width = max(len(row) for row in rows)
        ids = torch.full((len(rows), width), policy.pad_token_id)
        attention = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = torch.as_tensor(row)
            attention[i, width - len(row) :] = 1
        drawer = TokenDrawer(uniforms(seeds, limits.max_new_tokens), limits)
        with _own_settings_only(model), drawer.listening_to(model):
            sequences = model.generate(
                input_ids=ids.to(device),
                attention_mask=attention.to(device),
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=limits.max_new_tokens,
                    eos_token_id=list(policy.end_token_ids),
                    pad_token_id=policy.pad_token_id,
                    use_cache=True,
                ),
                logits_processor=LogitsProcessorList([drawer]),
            )
        completions = sequences[:, width:].cpu()
        mask, truncated = until_end(completions, policy.end_token_ids)
        logp, entropy, sum_sq_probs = drawer.recorded(mask)
        return Samples(completions, mask, truncated, logp, entropy, sum_sq_probs)


class TokenDrawer(LogitsProcessor):
    """Draws each row's next token itself and leaves `generate`, which takes the largest logit, no other choice.

    `generate` hands logits over in fp32; `listening_to` a model takes them in the precision they were made in.

    Args:
        random: (N, T) float64 in [0, 1), one row a completion.
    """

    def __init__(self, random: Tensor, limits: Limits) -> None:
        self.random = random
        self.limits = limits
        self.logits: Tensor | None = None
        self.steps: list[tuple[Tensor, Tensor, Tensor]] = []

    @contextmanager
    def listening_to(self, model: Any) -> Iterator[None]:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            logits = output.logits[:, -1].detach()
            self.logits = logits if logits.dtype == torch.float64 else logits.float()

        handle = model.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        assert self.logits is not None
        drawn = draw(self.logits, self.random[:, len(self.steps)].to(scores.device), self.limits)
        self.steps.append((drawn.logp, drawn.entropy, drawn.sum_sq_probs))
        return torch.full_like(scores, -torch.inf).scatter_(-1, drawn.token[:, None], 0.0)

    def recorded(self, mask: Tensor) -> list[Tensor]:
        """Log-probabilities, entropies and sums of squared probabilities, (N, T) each, 0 where `mask` is False."""
        return [
            torch.where(mask, torch.stack(values, dim=1)[:, : mask.shape[1]].cpu(), 0.0)
            for values in zip(*self.steps, strict=True)
        ]


def until_end(ids: Tensor, end_token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(N, T) mask up to and including each row's first end token, and (N,) whether a row has none."""
    is_end = torch.isin(ids, torch.tensor(list(end_token_ids)))
    ended_before = is_end.long().cumsum(1) - is_end.long() > 0
    return ~ended_before, ~is_end.any(1)


@contextmanager
def _own_settings_only(model: Any) -> Iterator[None]:
    """`generate` fills what a configuration leaves open from the model's own; lend it an empty one."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _joined(parts: list[Samples], order: list[int]) -> Samples:
    """The calls' results one below the other, as wide as the longest completion, row `i` put back to `order[i]`."""
    back = torch.tensor(order).argsort()
    width = max(part.ids.shape[1] for part in parts)

    def joined(name: str) -> Tensor:
        pieces = [getattr(part, name) for part in parts]
        if pieces[0].ndim == 2:
            pieces = [torch.nn.functional.pad(piece, (0, width - piece.shape[1])) for piece in pieces]
        return torch.cat(pieces)[back]

    return Samples(**{name: joined(name) for name in Samples.__dataclass_fields__})
