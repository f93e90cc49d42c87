"""From logits to a token: the distribution that is sampled, and how a random number becomes a token of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.errors import RunError
from ...data.sampler import Limits

BLOCK = 256  # tokens whose probabilities are added up first, so that a cumulative sum is taken of few numbers only
WORKED_ON_AT_ONCE = 2**19  # numbers: what stays in a processor's cache between two operations


@dataclass
class Drawn:
    """One token a row, (N,) each: its log-probability under the distribution that was sampled, and entropy (nats) and
    sum of squared probabilities of the whole one, before top-k and top-p."""

    token: Tensor
    logp: Tensor
    entropy: Tensor
    sum_sq_probs: Tensor


def draw(logits: Tensor, random: Tensor, limits: Limits) -> Drawn:
    """Draw each row's token by inverting the cumulative distribution.

    Args:
        logits: (N, V) float32 or float64, not yet divided by the temperature. They are overwritten.
        random: (N,) float64 in [0, 1).
        limits: a temperature of 0 takes the most probable token; the numbers are then those of temperature 1.

    Raises RunError for logits that are not finite.
    """
    greedy = limits.temperature == 0
    if not greedy and limits.temperature != 1:
        logits /= limits.temperature
    token = logits.argmax(-1) if greedy else None
    sums = []
    for shifted in logits.split(max(1, WORKED_ON_AT_ONCE // logits.shape[-1])):
        shifted -= shifted.amax(-1, keepdim=True)
        weights = shifted.exp()
        mean, square = torch.linalg.vecdot(weights, shifted), torch.linalg.vecdot(weights, weights)
        sums.append((sum_by_block(weights), mean, square))
    blocks, mean, square = (torch.cat(parts) for parts in zip(*sums, strict=True))
    total = blocks[:, -1]
    if not total.isfinite().all():
        raise RunError("the policy's logits are not finite, so no token can be drawn: look for the step they broke at")
    if mean.isnan().any():  # 0 * -inf, which is 0 here
        mean = torch.linalg.vecdot(logits.exp(), logits.clamp(min=-1e30))
    entropy, sum_sq_probs = total.log() - mean.double() / total, square.double() / total**2
    if token is None:
        if 0 < limits.top_k < logits.shape[-1] or limits.top_p < 1:
            logits = truncated_log_probs(logits - total.log()[:, None], limits.top_k, limits.top_p)
            blocks = sum_by_block(logits.exp())
        token = inverse_cdf(logits, blocks, random)
    logp = logits.gather(-1, token[:, None]).squeeze(-1).double() - blocks[:, -1].log()
    return Drawn(token, *(value.to(logits.dtype) for value in (logp, entropy, sum_sq_probs)))


def sum_by_block(weights: Tensor) -> Tensor:
    """(N, B) float64: cumulative sums of the (N, V) weights at the end of every block of tokens; the last is the sum
    of all. A block is added up in the precision of the weights, blocks are in fp64."""
    whole = weights.shape[-1] // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1)
    if whole < weights.shape[-1]:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], -1)
    return sums.double().cumsum(-1)


def inverse_cdf(log_weights: Tensor, blocks: Tensor, random: Tensor) -> Tensor:
    """(N,) tokens from the logs of (N, V) probabilities, not necessarily adding up to 1, and the sums `blocks` (N, B)
    of these: the first whose cumulative probability exceeds `random` (N,) times the whole. A token of probability 0 is
    never drawn."""
    sought = random[:, None].to(blocks) * blocks[:, -1:]
    block = _first_above(blocks, sought)
    before = torch.where(block > 0, blocks.gather(-1, (block - 1).clamp(min=0)), 0.0)
    places = block * BLOCK + torch.arange(BLOCK, device=blocks.device)  # (N, BLOCK)
    inside = log_weights.gather(-1, places.clamp(max=log_weights.shape[-1] - 1)).exp().double()
    inside = inside.masked_fill(places >= log_weights.shape[-1], 0.0).cumsum(-1)
    return (block * BLOCK + _first_above(inside, sought - before)).squeeze(-1)


def _first_above(cumulative: Tensor, sought: Tensor) -> Tensor:
    """(N, 1): the first place where `cumulative` (N, M) exceeds `sought`, and never one that adds nothing."""
    place = torch.searchsorted(cumulative, sought, right=True)
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)  # rounding may carry the product up to the whole
    return torch.minimum(place, last)


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
