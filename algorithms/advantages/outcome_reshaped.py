"""The outcome's advantage, redistributed over the reasoning tokens by a score: OAR's bi-level reshaping."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ...data.batch import RolloutBatch
from ..groups import constant_groups
from ..options import check_choice, check_range
from ..returns import total_return
from .base import AdvantageContext, Scale
from .group_mean import GroupMean

FLOOR = 0.1  # the least weight of a token before the weights are normalised, as in the paper's code


class OutcomeReshaped(GroupMean):
    """Group-mean advantage times a weight per token: A_{i,t} = A_i w_{i,t} (OAR).

    Tokens before the answer (reasoning) get weights from a score s_t >= 0: u = minmax(log1p(s)), tau = quantile(u);
    w = max(u / tau, 0.1) below tau, and 1 + beta (u - tau) / (1 - tau) from tau on; then scaled to mean 1 over the
    reasoning tokens, which keeps a completion's total credit (exactly so without token rewards). All other tokens
    have weight 1. So has everything in a completion without answer, without reasoning tokens or with a constant score,
    and in a group whose returns are all equal.

    Args:
        quantile: the share of a completion's reasoning tokens that is turned down.
        beta: how much the highest-scored token is turned up.
        signal: answer_influence (OAR-G) or entropy (of the policy at the token).
        scale: none, or std to divide by the group's unbiased standard deviation.
        epsilon: added to the standard deviation; unused with scale=none.
    """

    paper = "OAR: arXiv 2601.07408 (signal=answer_influence is OAR-G; signal=entropy is ours)"

    def __init__(
        self,
        quantile: float = 0.25,
        beta: float = 1.0,
        signal: Literal["answer_influence", "entropy"] = "answer_influence",
        scale: Scale = "none",
        epsilon: float = 1e-6,
    ) -> None:
        super().__init__(scale, epsilon)
        check_range("OutcomeReshaped.quantile", quantile, 0.0, 1.0)
        check_range("OutcomeReshaped.beta", beta, 0.0)
        check_choice("OutcomeReshaped.signal", signal, ("answer_influence", "entropy"))
        self.quantile = quantile
        self.beta = beta
        self.signal = signal

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.signal})

    @torch.no_grad()
    def __call__(self, rollouts: RolloutBatch, signals: Mapping[str, Tensor], context: AdvantageContext) -> Tensor:
        advantages = super().__call__(rollouts, signals, context)
        constant = constant_groups(total_return(rollouts), rollouts.group, rollouts.reward_valid)
        reshaped = reasoning_tokens(rollouts) & ~constant[:, None]
        weights = reshaping_weights(signals[self.signal].to(advantages.dtype), reshaped, self.quantile, self.beta)
        return advantages * weights


def reasoning_tokens(rollouts: RolloutBatch) -> Tensor:
    """(N, T) bool: action tokens before the answer; none in a completion without one."""
    if rollouts.answer_span is None:
        return torch.zeros_like(rollouts.action_mask)
    position = torch.arange(rollouts.action_mask.shape[1], device=rollouts.action_mask.device)
    return rollouts.action_mask & (position < rollouts.answer_span[:, :1])


def reshaping_weights(score: Tensor, reasoning: Tensor, quantile: float, beta: float) -> Tensor:
    """Bi-level reshaping of arXiv 2601.07408, per row over its reasoning tokens (formula in `OutcomeReshaped`).

    Args:
        score: (N, T) floating point; negative scores count as 0, and what is outside `reasoning` is ignored.
        reasoning: (N, T) bool, L tokens in a row.
        quantile: in [0, 1], linearly interpolated between tokens.
        beta: at least 0.

    Returns: (N, T), 1 outside `reasoning`; the weights of a row's reasoning tokens add up to L.
    """
    if score.ndim != 2 or score.shape != reasoning.shape or reasoning.dtype != torch.bool:
        raise ValueError(
            f"score and reasoning must be (N, T) and reasoning bool; got {tuple(score.shape)}, "
            f"{tuple(reasoning.shape)} {reasoning.dtype}"
        )
    if score.shape[1] == 0:
        return torch.ones_like(score)
    x = torch.where(reasoning, score, 0.0).clamp(min=0.0).log1p()
    length = reasoning.sum(1, keepdim=True)  # (N, 1)
    low = torch.where(reasoning, x, torch.inf).amin(1, keepdim=True)
    high = torch.where(reasoning, x, -torch.inf).amax(1, keepdim=True)
    uneven = high > low  # (N, 1): False for constant scores and without reasoning tokens
    u = torch.where(uneven & reasoning, (x - low) / (high - low), 0.0)

    ascending = torch.where(reasoning, u, torch.inf).sort(1).values
    place = quantile * (length - 1).clamp(min=0).to(u.dtype)
    below, above = ascending.gather(1, place.floor().long()), ascending.gather(1, place.ceil().long())
    tau = torch.where(uneven, below + (above - below) * (place - place.floor()), 1.0)

    turned_down = (u / torch.where(tau > 0, tau, 1.0)).clamp(min=FLOOR)
    turned_up = torch.where(tau < 1, 1.0 + beta * (u - tau) / (1.0 - tau), 1.0)
    weights = torch.where(u < tau, turned_down, turned_up)
    total = torch.where(reasoning, weights, 0.0).sum(1, keepdim=True)
    return torch.where(uneven & reasoning, weights * length / total, 1.0)
