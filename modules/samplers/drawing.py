"""From logits to a token: the distribution that is sampled, and how a random number becomes a token of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.errors import RunError
from ...data.sampler import Limits

BLOCK = 256  # tokens whose probabilities are added up first, so that a cumulative sum is taken of few numbers only


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
        logits: (N, V) float32 or float64, not yet divided by the temperature.
        random: (N,) float64 in [0, 1).
        limits: a temperature of 0 takes the most probable token; the numbers are then those of temperature 1.

    Raises RunError for logits that are not finite.
    """
    greedy = limits.temperature == 0
    logits = logits if greedy or limits.temperature == 1 else logits / limits.temperature
    highest, first = logits.max(-1, keepdim=True)
    shifted = logits - highest
    weights = shifted.exp()
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    if not total.isfinite().all():
        raise RunError("the policy's logits are not finite, so no token can be drawn: look for the step they broke at")
    mean = torch.linalg.vecdot(weights, shifted.clamp(min=-1e30)).double() / total.squeeze(-1)  # 0 * -inf is 0 here
    entropy = total.log().squeeze(-1) - mean
    sum_sq_probs = torch.linalg.vecdot(weights, weights).double() / total.squeeze(-1) ** 2
    if greedy:
        token, normaliser = first.squeeze(-1), total
    else:
        if 0 < limits.top_k < logits.shape[-1] or limits.top_p < 1:
            shifted = truncated_log_probs(shifted - total.log(), limits.top_k, limits.top_p)
            weights = shifted.exp()
        token, normaliser = inverse_cdf(weights, random), weights.sum(-1, keepdim=True, dtype=torch.float64)
    logp = shifted.gather(-1, token[:, None]).double() - normaliser.log()
    return Drawn(token, *(value.to(logits.dtype) for value in (logp.squeeze(-1), entropy, sum_sq_probs)))


def inverse_cdf(weights: Tensor, random: Tensor) -> Tensor:
    """(N,) tokens from (N, V) probabilities, not necessarily adding up to 1: the first whose cumulative probability
    exceeds `random` (N,) times the whole, added up in fp64. A token of probability 0 is never drawn."""
    rows, tokens = weights.shape
    blocks = -(-tokens // BLOCK)
    if tokens < blocks * BLOCK:
        weights = torch.nn.functional.pad(weights, (0, blocks * BLOCK - tokens))
    table = weights.view(rows, blocks, BLOCK)
    cumulative = table.sum(-1, dtype=torch.float64).cumsum(-1)  # (N, blocks)
    sought = random[:, None].to(cumulative) * cumulative[:, -1:]
    block = _first_above(cumulative, sought)
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = table.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1).double().cumsum(-1)  # (N, BLOCK)
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
