"""From hidden states to log-probabilities of tokens, without holding the logits of a whole batch."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 2**24  # numbers: 64 MiB in fp32, and a few times that while they are worked on


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
        head: logits (m, V), in fp32 at least, of hidden states (m, d).
    """

    def of(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        log_probs = head(hidden).log_softmax(-1)
        found = [log_probs.gather(-1, tokens[:, None]).squeeze(-1)]
        if entropy:
            found.append(-(log_probs.exp() * log_probs).sum(-1))
        if sum_sq_probs:
            found.append((2 * log_probs.detach()).exp().sum(-1))
        return tuple(found)

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
    return found[0], found[1] if entropy else None, found[-1] if sum_sq_probs else None
