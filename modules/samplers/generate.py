"""Sampling by transformers' own `generate`: slow, and works for every model that transformers can generate with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from ...data.errors import RunError, UsageError
from ...data.sampler import Limits, Sampler, Samples, uniforms


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
        self, policy: Any, prefixes: Sequence[Sequence[int]], members: int, limits: Limits, seeds: Sequence[int]
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
        greedy = self.limits.temperature == 0
        logits = self.logits if greedy else self.logits / self.limits.temperature
        log_probs = logits.log_softmax(-1)  # (N, V)
        if log_probs[:, 0].isnan().any():
            raise RunError(
                "the policy's logits are not finite, so no token can be drawn: look for the step they broke at"
            )
        probs = log_probs.exp()
        entropy, sum_sq_probs = torch.special.entr(probs).sum(-1), probs.square().sum(-1)
        if greedy:
            token = log_probs.argmax(-1)
        else:
            log_probs = truncated_log_probs(log_probs, self.limits.top_k, self.limits.top_p)
            token = inverse_cdf(log_probs, self.random[:, len(self.steps)].to(log_probs.device))
        self.steps.append((log_probs.gather(-1, token[:, None]).squeeze(-1), entropy, sum_sq_probs))
        return torch.full_like(scores, -torch.inf).scatter_(-1, token[:, None], 0.0)

    def recorded(self, mask: Tensor) -> list[Tensor]:
        """Log-probabilities, entropies and sums of squared probabilities, (N, T) each, 0 where `mask` is False."""
        return [
            torch.where(mask, torch.stack(values, dim=1)[:, : mask.shape[1]].cpu(), 0.0)
            for values in zip(*self.steps, strict=True)
        ]


def inverse_cdf(log_probs: Tensor, random: Tensor) -> Tensor:
    """(N,) tokens: the first whose cumulative probability exceeds `random` (N,) times the whole, in fp64. A token of
    probability 0 is never drawn."""
    cumulative = log_probs.double().exp().cumsum(-1)  # (N, V)
    whole = cumulative[:, -1:]
    token = torch.searchsorted(cumulative, random[:, None] * whole, right=True)
    last = (cumulative < whole).sum(-1, keepdim=True)  # rounding may carry the product up to the whole
    return torch.minimum(token, last).squeeze(-1)


def truncated_log_probs(log_probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """(N, V) log-probabilities of the k most probable tokens, then of the smallest set of these that holds at least
    `top_p` of their probability; renormalised, -inf elsewhere. 0 and 1 turn them off."""
    if 0 < top_k < log_probs.shape[-1]:
        smallest = log_probs.topk(top_k).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < smallest, -torch.inf).log_softmax(-1)
    if top_p < 1:
        ordered, index = log_probs.sort(dim=-1, descending=True)
        probs = ordered.exp()
        before = probs.cumsum(-1) - probs  # the probability of all tokens before one
        outside = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before >= top_p)
        log_probs = log_probs.masked_fill(outside, -torch.inf).log_softmax(-1)
    return log_probs


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
