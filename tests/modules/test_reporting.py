"""The scalars of one training step, by hand."""

import math

import pytest
import torch

from apportion.modules.reporting import Totals, rollout_metrics
from tests.modules.tiny_models import batch_of


def identity(value):
    return value


@pytest.fixture
def rollouts():
    """Two groups of three: rewards 1, 0, 0 and 1, 1, missing; the first completion has three tokens, the others one."""
    batch = batch_of([[5], [6, 7]], [[1, 2, 3], [4], [5], [6], [7], [8]], [0, 0, 0, 1, 1, 1])
    advantage = torch.tensor([2 / 3, -1 / 3, -1 / 3, 0.0, 0.0, 0.0])
    valid = torch.tensor([True] * 5 + [False])
    return batch.replace(
        reward=torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 7.0]),
        reward_valid=valid,
        in_loss=valid,
        truncated=torch.tensor([True, False, False, False, False, True]),
        advantages=advantage[:, None] * batch.action_mask,
        reward_terms={"accuracy": torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, math.nan])},
        entropy=torch.arange(24.0).view(6, 4) * batch.action_mask,
    )


def test_scalars_by_hand(rollouts):
    values = rollout_metrics(rollouts, Totals(), identity)
    assert values["train/reward"] == pytest.approx(3 / 5)
    assert values["train/reward_std"] == pytest.approx(math.sqrt((3 * 0.4**2 + 2 * 0.6**2) / 4))
    assert values["train/missing_rewards"] == 1
    assert values["train/completion_length"] == pytest.approx(8 / 6)
    assert values["train/truncated"] == pytest.approx(2 / 6)
    assert values["credit/zero_variance_groups"] == pytest.approx(1 / 2)
    assert values["credit/effective_rollouts"] == pytest.approx(3 / 6)
    assert values["train/reward_terms/accuracy"] == pytest.approx(3 / 5)
    assert values["train/entropy"] == pytest.approx((0 + 1 + 2 + 4 + 8 + 12 + 16) / 7)  # the missing row is not counted


def test_one_token_with_credit_makes_a_rollout_effective(rollouts):
    advantages = torch.zeros(6, 4)
    advantages[0, 2] = -0.5
    advantages[5, 0] = 1.0  # of a row that no loss sees
    values = rollout_metrics(rollouts.replace(advantages=advantages), Totals(), identity)
    assert values["credit/effective_rollouts"] == pytest.approx(1 / 6)


def test_pitfall_29_two_processes_pool_sums_and_counts(rollouts):
    """Each process has one group of its own, of two and of four rows: neither a mean of means nor the own mean."""
    rollouts = rollouts.replace(group=torch.tensor([0, 0, 1, 1, 1, 1]), prompt_index=torch.tensor([0, 0, 1, 1, 1, 1]))
    whole = rollout_metrics(rollouts, Totals(), identity)
    theirs: list[torch.Tensor] = []
    rollout_metrics(rollouts[2:], Totals(), lambda value: theirs.append(value) or value)  # type: ignore[func-returns-value]
    sums = iter(theirs)
    pooled = rollout_metrics(rollouts[:2], Totals(), lambda value: value + next(sums))
    for tag in whole.keys() - {"train/reward_std"}:  # its sum needs the mean of both first
        assert pooled[tag] == pytest.approx(whole[tag]), tag
    assert rollout_metrics(rollouts[:2], Totals(), identity)["train/reward"] != whole["train/reward"]


def test_the_spread_of_two_equal_processes(rollouts):
    double = rollout_metrics(rollouts, Totals(), lambda value: 2 * value)
    assert double["train/reward_std"] == pytest.approx(math.sqrt(2 * (3 * 0.4**2 + 2 * 0.6**2) / 9))


def test_totals_weigh_by_what_was_counted(rollouts):
    totals = Totals()
    totals.add("kl", torch.tensor([1.0, 2.0, 3.0]), 3)
    totals.add("kl", torch.tensor(10.0), 1)
    totals.add("grad_norm", torch.tensor(2.0), 1)
    totals.add("grad_norm", torch.tensor(4.0), 1)
    totals.add("loss", torch.tensor(0.5), 0)
    totals.add("loss", torch.tensor(0.25), 0)
    values = rollout_metrics(rollouts, totals, identity)
    assert values["train/kl"] == pytest.approx(16 / 4)
    assert values["train/grad_norm"] == pytest.approx(3.0)
    assert values["train/loss"] == pytest.approx(0.75 / 2)  # shares of a step add up; steps are averaged
