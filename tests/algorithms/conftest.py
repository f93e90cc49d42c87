"""A tabular policy whose completions and groups can all be listed, for exact expectations."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from apportion.algorithms import AdvantageContext, AdvantageEstimator, Reinforce, aggregate, denominator
from apportion.data.batch import RolloutBatch


class Enumerated:
    """All completions of at most `steps` tokens, token 0 ending one early; one row of logits per prefix, float64.

    C completions, T = steps. Rewards are drawn once, one per completion.
    """

    def __init__(self, rollouts_of: Callable[..., RolloutBatch], vocabulary: int, steps: int, seed: int = 0) -> None:
        self.rollouts_of = rollouts_of
        prefixes = [p for t in range(steps) for p in itertools.product(range(1, vocabulary), repeat=t)]
        completions = [(*p, 0) for p in prefixes]
        completions += [(*p, v) for p in prefixes if len(p) == steps - 1 for v in range(1, vocabulary)]
        draw = torch.Generator().manual_seed(seed)
        self.theta = torch.randn(len(prefixes), vocabulary, generator=draw, dtype=torch.float64, requires_grad=True)
        self.reference = torch.randn(len(prefixes), vocabulary, generator=draw, dtype=torch.float64).log_softmax(1)
        self.reward = torch.rand(len(completions), generator=draw, dtype=torch.float64)
        self.mask = torch.zeros(len(completions), steps, dtype=torch.bool)
        self.context = torch.zeros(len(completions), steps, dtype=torch.long)
        self.token = torch.zeros(len(completions), steps, dtype=torch.long)
        for c, completion in enumerate(completions):
            for t, token in enumerate(completion):
                self.mask[c, t], self.token[c, t] = True, token
                self.context[c, t] = prefixes.index(completion[:t])
        self.logp_ref = torch.where(self.mask, self.reference[self.context, self.token], 0.0)  # (C, T)
        self.ref_sequence_logp = self.logp_ref.sum(1)  # (C,)

    def logp(self) -> Tensor:
        """(C, T), with gradient to theta."""
        return torch.where(self.mask, self.theta.log_softmax(1)[self.context, self.token], 0.0)

    def sequence_logp(self) -> Tensor:
        return self.logp().sum(1)

    def probability(self) -> Tensor:
        """(C,), adds up to 1."""
        return self.sequence_logp().exp()

    def value(self) -> Tensor:
        """J, the expected reward."""
        return (self.probability() * self.reward).sum()

    def policy_gradient(self) -> Tensor:
        return torch.autograd.grad(self.value(), self.theta)[0]

    def signals(self) -> dict[str, Tensor]:
        """What an estimator may ask for, per completion."""
        squares = self.theta.detach().softmax(1).square().sum(1)[self.context]
        score = torch.autograd.functional.jacobian(
            lambda theta: torch.where(self.mask, theta.log_softmax(1)[self.context, self.token], 0.0).sum(1), self.theta
        )
        return {
            "logp_old": self.logp().detach(),
            "sum_sq_probs": squares,
            "score_norms": torch.as_tensor(score).square().sum((1, 2)),
        }

    def expected_update(
        self,
        estimator: AdvantageEstimator,
        group_size: int,
        token_reward: Tensor | None = None,
        penalty: Tensor | None = None,
    ) -> Tensor:
        """E[-grad of the loss] over all groups: REINFORCE, sequence mean of token sums. Shape of theta.

        Args:
            token_reward: (C, T), in the batch's token rewards.
            penalty: (C, T), off the advantages.
        """
        groups = torch.tensor(list(itertools.product(range(len(self.reward)), repeat=group_size)))
        rows = groups.flatten()  # every group of the enumeration is a group of one large batch
        group = torch.arange(len(groups)).repeat_interleave(group_size)
        mask = self.mask[rows]
        rollouts = self.rollouts_of(
            self.reward[rows], group, mask, token_reward=None if token_reward is None else token_reward[rows]
        )
        signals = {name: value[rows] for name, value in self.signals().items()}
        advantages = estimator(rollouts, signals, AdvantageContext())
        if penalty is not None:
            advantages = advantages - penalty[rows]
        logp = self.logp()[rows]
        loss = Reinforce()(logp, logp.detach(), advantages, mask).loss
        chance = self.probability().detach()[groups].prod(1)[group]  # (rows,): of the row's group
        below = denominator("sequence_sum", mask)
        expected = aggregate(loss * chance[:, None] * len(groups), mask, "sequence_sum", below)
        return -torch.autograd.grad(expected, self.theta)[0]


@pytest.fixture(scope="session")
def enumerated(rollouts_of: Callable[..., RolloutBatch]) -> Callable[..., Enumerated]:
    def build(vocabulary: int, steps: int, seed: int = 0) -> Enumerated:
        return Enumerated(rollouts_of, vocabulary, steps, seed)

    return build
