"""From hidden states to log-probabilities of tokens, without holding the logits of a whole batch."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 2**25  # numbers: 128 MiB in fp32
WORKED_ON_AT_ONCE = 2**20  # numbers: what stays in a processor's cache between two operations


def token_statistics(
    hidden: Tensor,
    tokens: Tensor,
    head: Callable[[Tensor], Tensor],
    entropy: bool = False,
    sum_sq_probs: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(M,) each: log-probabilities of `tokens`, and entropy (nats) and sum of squared probabilities where asked for.

    The gradient flows through the first two. Where there are more logits than `LOGITS_AT_ONCE` they are made a run of
    tokens at a time, and made again in the backward pass.

    Args:
        hidden: (M, d).
        tokens: (M,) long.
        head: logits (m, V), in fp32 at least, of hidden states (m, d). They are overwritten.
    """

    def of(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _Statistics.apply(head(hidden), tokens, entropy, sum_sq_probs)  # type: ignore[return-value]

    vocabulary = head(hidden[:0]).shape[-1]
    run = max(1, LOGITS_AT_ONCE // vocabulary)
    if len(hidden) <= run:
        found = of(hidden, tokens)
    else:
        parts = [
            checkpoint(of, hidden[i : i + run], tokens[i : i + run], use_reentrant=False, preserve_rng_state=False)
            for i in range(0, len(hidden), run)
        ]
        found = tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return found[0], found[1] if entropy else None, found[2] if sum_sq_probs else None


class _Statistics(torch.autograd.Function):
    """What `token_statistics` gives, from logits l (M, V) that become log p. With y the token and H the entropy:

    d log p_y / d l = onehot_y - p,    d H / d l = -p (log p + H).

    All in the memory of the logits; a second backward pass over the same graph is an error.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, entropy: bool, squares: bool) -> tuple[Tensor, ...]:
        entropies, squared = logits.new_zeros(len(logits)), logits.new_zeros(len(logits))
        for rows in _runs(logits):
            part = logits[rows]
            part -= part.amax(-1, keepdim=True)
            weights = part.exp()
            total = weights.sum(-1, keepdim=True)
            log_total = total.log()
            if entropy:
                entropies[rows] = log_total.squeeze(-1) - torch.linalg.vecdot(weights, part) / total.squeeze(-1)
            if squares:
                squared[rows] = torch.linalg.vecdot(weights, weights) / total.squeeze(-1) ** 2
            part -= log_total
        ctx.entropy = entropy
        logp = logits.gather(-1, tokens[:, None]).squeeze(-1)
        ctx.save_for_backward(logits, tokens, entropies)
        ctx.mark_non_differentiable(*([] if entropy else [entropies]), squared)
        return logp, entropies, squared

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above_logp: Tensor, above_entropy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradient, tokens, entropies = ctx.saved_tensors  # log-probabilities, to be overwritten run by run
        for rows in _runs(gradient):
            part, above = gradient[rows], -above_logp[rows, None]
            if ctx.entropy:
                above = above - above_entropy[rows, None] * (part + entropies[rows, None])
            part.exp_().mul_(above)
        gradient.scatter_add_(-1, tokens[:, None], above_logp[:, None])
        return gradient, None, None, None


def _runs(logits: Tensor) -> Iterator[slice]:
    size = max(1, WORKED_ON_AT_ONCE // logits.shape[-1])
    for start in range(0, len(logits), size):
        yield slice(start, start + size)
