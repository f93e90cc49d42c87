"""A small batch with everything that is awkward in it, and a PolicyGradient around it without a fit.

The batch has unequal lengths, groups of unequal sizes, left-padded prompts, an empty completion, a truncated one, and
one whose reward is missing.
"""

import math

import lightning as L
import torch

from apportion.data.batch import RolloutBatch
from apportion.modules.policy import FreshModel, Policy
from apportion.modules.policy_gradient import PolicyGradient
from tests.modules.tiny_models import exact_norms

PROMPTS = [[5, 9, 30, 12], [7, 8]]
COMPLETIONS = [[11, 12, 13, 14, 15], [21, 22], [31, 32, 33], [], [41, 42, 43, 44], [51, 52, 53], [61]]
PROMPT_OF = [0, 0, 0, 0, 1, 1, 1]
REWARDS = [1.0, 0.0, 0.25, 0.5, 1.0, 0.0, math.nan]  # the last one is missing
ANSWERS = [(3, 5), (1, 2), None, None, (2, 4), (1, 3), None]
STEPS = [[0, 0, 1, 1, 1], [0, 0], [0, 1, 1], [], [0, 1, 2, 2], [0, 0, 1], [0]]
STEP_REWARDS = [[1.0, 0.0], [0.0], [1.0, 1.0], [], [1.0, 0.0, 1.0], [0.0, 1.0], [1.0]]
LENGTH = 9  # of the constant-length aggregation
BETA = 0.3
ENTROPY = 0.05


def build_batch(dtype=torch.float64) -> RolloutBatch:
    n, width, lp = len(COMPLETIONS), 6, 5  # one column more than needed, everywhere
    ids = torch.zeros(n, width, dtype=torch.long)
    mask = torch.zeros(n, width, dtype=torch.bool)
    step_index = torch.full((n, width), -1)
    step_reward, step_mask = torch.zeros(n, 3, dtype=dtype), torch.zeros(n, 3, dtype=torch.bool)
    for i, completion in enumerate(COMPLETIONS):
        ids[i, : len(completion)] = torch.tensor(completion, dtype=torch.long)
        mask[i, : len(completion)] = True
        step_index[i, : len(completion)] = torch.tensor(STEPS[i], dtype=torch.long)
        step_reward[i, : len(STEP_REWARDS[i])] = torch.tensor(STEP_REWARDS[i])
        step_mask[i, : len(STEP_REWARDS[i])] = True
    prompt_ids, prompt_mask = torch.zeros(2, lp, dtype=torch.long), torch.zeros(2, lp, dtype=torch.bool)
    for p, prompt in enumerate(PROMPTS):
        prompt_ids[p, lp - len(prompt) :] = torch.tensor(prompt)
        prompt_mask[p, lp - len(prompt) :] = True
    reward = torch.tensor(REWARDS, dtype=dtype)
    truncated = torch.zeros(n, dtype=torch.bool)
    truncated[4] = True
    return RolloutBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        prompt_id=torch.tensor([40, 41]),
        prompt_index=torch.tensor(PROMPT_OF),
        group=torch.tensor(PROMPT_OF) + 3,
        completion_ids=ids,
        completion_mask=mask,
        action_mask=mask,
        reward=torch.nan_to_num(reward),
        reward_valid=~reward.isnan(),
        truncated=truncated,
        in_loss=~reward.isnan(),
        policy_version=torch.zeros(n, dtype=torch.long),
        member=torch.tensor([0, 1, 2, 3, 0, 1, 2]),
        step_index=step_index,
        step_reward=step_reward,
        step_mask=step_mask,
        answer_span=torch.tensor([a or (-1, -1) for a in ANSWERS]),
    )


def build_policy(dtype: str) -> Policy:
    policy = Policy(fresh=FreshModel(layers=2, width=16, heads=2), dtype=dtype, temperature=0.7)
    if dtype == "float64":
        exact_norms(policy.model)
    with torch.no_grad():
        for k, p in enumerate(policy.parameters()):  # larger weights than a fresh model's: gradients that differ
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64).to(p))
    return policy


class Source(L.LightningDataModule):
    """Just what `assign_credit` asks of a datamodule."""

    sampler = task = budget = None
    seed = 17


def build_module(policy: Policy, estimator, objective, kl, aggregation: str, entropy=0.0) -> PolicyGradient:
    module = PolicyGradient(
        policy,
        estimator,
        objective,
        kl,
        aggregation,
        constant_length=LENGTH if aggregation == "constant_length" else None,
        micro_batch_tokens=20,  # several micro-batches, which cut groups
        entropy=entropy,
    )
    if module.reference is not None:
        with torch.no_grad():
            for k, p in enumerate(module.reference.parameters()):
                p.add_(
                    0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64).to(p)
                )
    trainer = L.Trainer(barebones=True, accelerator="cpu")
    trainer.strategy.connect(module)
    trainer.datamodule = Source()  # type: ignore[attr-defined]
    module.trainer = trainer
    return module
