"""How much each reasoning token moves the model's belief in its own answer, from one backward pass (OAR-G)."""

from typing import Any

import torch
from torch import Tensor

from ...algorithms.groups import is_constant
from ...data.batch import RolloutBatch
from ...data.sampler import seed_of
from ..sharding import gathered
from .base import SignalContext, SignalProvider


class AnswerInfluence(SignalProvider):
    """Influence of each reasoning token on the answer, OAR-G of arXiv 2601.07408.

    With E the embeddings of the reasoning tokens (those before the answer), p the softmax of the mean logits at the
    positions that predict the answer, and J = KL(sg(p at E) || p at E + noise): s_t = |<dJ/dE_t, E_t>|. The noise keeps
    J away from its minimum, where the gradient vanishes; it is drawn per (run, step, prompt, member).
    Being a difference of two nearly equal beliefs, a score in float32 is good to about a tenth of the largest; 16 bits
    would drown it, so it is always computed with fp32 weights.

    Shape (N, T); exactly 0 outside the reasoning tokens, where there is no answer, and in groups whose rewards are all
    equal (nothing to reshape there, so they are not scored).

    Args:
        noise: standard deviation of the noise on the embeddings.
    """

    provides = frozenset({"answer_influence"})
    cost = "two forward passes and one backward pass, on groups with unequal rewards"

    def __init__(self, noise: float = 1e-3) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, rollouts: RolloutBatch, context: SignalContext) -> dict[str, Tensor]:
        influence = torch.zeros(rollouts.completion_ids.shape, device=rollouts.reward.device, dtype=torch.float32)
        chosen = self._worth_scoring(rollouts)
        with gathered(context.policy), context.policy.full_precision():
            if len(chosen):
                subset = rollouts[chosen]
                for rows in subset.rows_by_token_budget(context.micro_batch_tokens):
                    score = self._score(subset[rows], context)
                    influence = influence.to(score.dtype)
                    influence[chosen[rows], : score.shape[1]] = score
        return {"answer_influence": influence}

    @staticmethod
    def _worth_scoring(rollouts: RolloutBatch) -> Tensor:
        if rollouts.answer_span is None:
            return torch.zeros(0, dtype=torch.long, device=rollouts.group.device)
        scored = (rollouts.answer_span[:, 0] > 0) & rollouts.reward_valid
        for rows in rollouts.rows_by_group():
            if is_constant(rollouts.reward[rows], rollouts.reward_valid[rows]) and rollouts.token_reward is None:
                scored[rows] = False
        return scored.nonzero().squeeze(1)

    def _score(self, rollouts: RolloutBatch, context: SignalContext) -> Tensor:
        policy, span = context.policy, rollouts.answer_span
        assert span is not None
        position = torch.arange(rollouts.completion_ids.shape[1], device=span.device)
        answer = (position >= span[:, :1]) & (position < span[:, 1:])  # (n, T)
        reasoning = (position < span[:, :1]) & rollouts.action_mask
        with policy.inference():
            embeddings = policy.embed(rollouts)  # (n, Lp + T, d)
            clean = answer_log_probs(policy, rollouts, embeddings, answer)
        embeddings = embeddings.detach().clone()
        width = position.shape[0]
        noisy = embeddings.clone()
        noisy[:, -width:] += self._noise_of(rollouts, context, embeddings.shape[-1]).to(noisy) * reasoning[..., None]
        with torch.enable_grad():
            noisy.requires_grad_()
            belief = answer_log_probs(policy, rollouts, noisy, answer)
            divergence = (clean.exp() * (clean - belief)).sum()
            (gradient,) = torch.autograd.grad(divergence, noisy)
        product = (gradient[:, -width:].to(clean.dtype) * embeddings[:, -width:].to(clean.dtype)).sum(-1)
        return product.abs() * reasoning

    def _noise_of(self, rollouts: RolloutBatch, context: SignalContext, width: int) -> Tensor:
        """(n, T, d): a completion's noise depends on its own seed only."""
        members = rollouts.member if rollouts.member is not None else torch.arange(len(rollouts))
        prompts = rollouts.prompt_id[rollouts.prompt_index]
        lengths = rollouts.completion_mask.sum(1)
        noise = torch.zeros(*rollouts.completion_ids.shape, width)
        for row, (prompt, member, length) in enumerate(
            zip(prompts.tolist(), members.tolist(), lengths.tolist(), strict=True)
        ):
            seed = seed_of(context.run_seed, context.step, prompt, "answer_influence", 0, member)
            noise[row, :length] = torch.randn(length, width, generator=torch.Generator().manual_seed(seed))
        return self.noise * noise


def answer_log_probs(policy: Any, rollouts: RolloutBatch, embeddings: Tensor, answer: Tensor) -> Tensor:
    """(n, V): log-softmax of the mean logits over the positions that predict the answer's tokens."""
    hidden = policy.hidden(rollouts, embeddings=embeddings)  # (n, T, d), position t predicts token t
    weights = answer.to(hidden.dtype)
    mean = (policy.head(hidden) * weights.to(hidden.dtype)[..., None]).sum(1) / weights.sum(1, keepdim=True)
    return torch.log_softmax(mean.double(), dim=-1)  # the caller subtracts two nearly equal ones
