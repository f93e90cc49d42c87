"""The rollout datamodule: which prompts come when, what is skipped, what is counted, and how a batch is assembled."""

import pytest
import torch
from datasets import Dataset

from apportion.data.assemble import assemble
from apportion.data.datamodule import PromptBatches, RolloutDataModule, Validation
from apportion.data.errors import UsageError
from apportion.data.rewards import RewardResult
from apportion.data.sampler import Limits, Sampler, Samples, seed_of, uniforms
from apportion.data.tasks.base import Task, Verdict


class Letters(Task):
    def prompts(self, split):
        words = ["aa", "bbbb", "c", "dd", "e"] if split == "train" else ["xx", "yyyyyy"]
        return Dataset.from_list([{"prompt": word, "colour": f"colour of {word}"} for word in words])

    def verify(self, completion, example):
        return Verdict({"accuracy": float(completion.startswith(example["prompt"][0]))})


class OneCharacter:
    """A policy whose tokens are characters; 0 is its end token."""

    max_prompt_tokens = 3
    version = 5

    def encode_prompt(self, prompt):
        return [ord(c) for c in prompt]

    def decode(self, ids):
        return "".join(chr(i) for i in ids if i)

    def token_char_ends(self, ids):
        return [len(self.decode(ids[: k + 1])) for k in range(len(ids))]

    def limits(self, purpose):
        return Limits(4)

    def inference(self):
        return torch.no_grad()


class Repeat(Sampler):
    """Member m writes the prompt's first letter m times, then the end token."""

    def generate(self, policy, prefixes, members, limits, seeds, finished=None):
        rows = [[prefix[0]] * m + [0] for prefix in prefixes for m in range(members)]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.arange(width)[None] < torch.tensor([len(row) for row in rows])[:, None]
        zeros = torch.zeros(ids.shape)
        return Samples(ids, mask, torch.zeros(len(ids), dtype=torch.bool), zeros, zeros, zeros)


def a_datamodule(**options) -> RolloutDataModule:
    options = {"group_size": 3, "prompts_per_step": 2, "validation": Validation(prompts=5), **options}
    return RolloutDataModule(Letters(), Repeat(), **options)


def test_prompt_batches_cover_an_epoch_once_and_shuffle_each_epoch_anew():
    order = PromptBatches(prompts=7, batch_size=2, seed=1)
    first, second = [list(order), list(order)]
    assert len(order) == len(first) == len(second) == 3
    for epoch in (first, second):
        assert len({i for batch in epoch for i in batch}) == 6
    assert first != second


def test_prompt_batches_go_on_where_they_were():
    order = PromptBatches(prompts=9, batch_size=2, seed=3)
    whole = [*order, *order, *order]
    for stop in range(len(whole)):
        again = PromptBatches(prompts=9, batch_size=2, seed=3)
        again.position = stop
        rest = []
        while len(rest) < len(whole) - stop:
            rest += list(again)
        assert rest == whole[stop:]


def test_the_position_is_counted_before_the_last_batch_is_given_out():
    order = PromptBatches(prompts=4, batch_size=2, seed=0)
    batches = iter(order)
    next(batches)
    next(batches)
    assert order.position == 2  # a sized loader never asks for more


def test_over_long_prompts_are_skipped_and_counted(caplog):
    data = a_datamodule()
    rows = data.load_prompts(data.task, "train", OneCharacter())
    assert [row["prompt"] for row in rows] == ["aa", "c", "dd", "e"]
    assert [row["prompt_id"] for row in rows] == [0, 2, 3, 4]
    assert data.skipped_prompts == 1
    assert "1 train prompts of Letters are empty or longer than 3 tokens" in caplog.text


def test_no_prompt_within_the_limit_is_an_error():
    policy = OneCharacter()
    policy.max_prompt_tokens = 0
    data = a_datamodule()
    with pytest.raises(UsageError, match="no train prompt of Letters is within the limit of 0 tokens"):
        data.load_prompts(data.task, "train", policy)


def test_collect_gives_whole_groups_and_counts_the_budget():
    data, policy = a_datamodule(), OneCharacter()
    rows = data.load_prompts(data.task, "train", policy)
    batch = data.collect(rows[:2], policy, step=0)
    assert batch.completion_texts == ["", "a", "aa", "", "c", "cc"]
    assert batch.reward.tolist() == [0, 1, 1, 0, 1, 1]
    assert batch.group.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.prompt_id.tolist() == [0, 2]
    assert batch.prompt_ids.tolist() == [[97, 97], [0, 99]]
    assert batch.member.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.policy_version.tolist() == [5] * 6
    assert (data.budget.prompts, data.budget.completions, data.budget.tokens) == (2, 6, 12)
    data.evaluate(rows, policy)
    data.collect(rows[:1], policy, step=0, purpose="validation")
    assert data.budget.completions == 6


def test_pitfall_08_a_row_without_a_reward_is_in_no_loss_and_no_denominator():
    data, policy = a_datamodule(), OneCharacter()
    data.task.verify = lambda completion, example: (
        Verdict(missing="too short") if completion == "a" else Verdict({"accuracy": 1.0})
    )
    batch = data.collect(data.load_prompts(data.task, "train", policy)[:1], policy, step=0)
    assert batch.reward_valid.tolist() == batch.in_loss.tolist() == [True, False, True]
    assert batch.loss_mask.sum(1).tolist() == [1, 0, 3]
    assert data.reward_failures == {"accuracy: too short": 1}


def test_a_callable_gets_the_columns_of_the_data_set():
    from apportion.data.rewards import CallableReward

    data = a_datamodule(reward=CallableReward("tests.data.a_reward.colours"))
    policy = OneCharacter()
    batch = data.collect(data.load_prompts(data.task, "train", policy)[:1], policy, step=0)
    assert batch.reward.tolist() == [len("colour of aa")] * 3


def test_spans_of_text_become_spans_of_tokens():
    policy = OneCharacter()
    texts = ["ab;cd;e", "xy", ""]
    rows = [[ord(c) for c in text] + [0] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.arange(width)[None] < torch.tensor([len(row) for row in rows])[:, None]
    zeros = torch.zeros(ids.shape)
    batch = assemble(
        Samples(ids, mask, torch.zeros(3, dtype=torch.bool), zeros, zeros, zeros),
        [[1]],
        ["p"],
        [{"prompt_id": 0}],
        texts,
        [
            Verdict({"accuracy": 1.0}, answer_span=(4, 5), steps=[(0, 3), (3, 6)], step_rewards=[1.0, 0.5]),
            Verdict({"accuracy": 0.0}, steps=[(0, 2)], step_rewards=[0.25]),
            Verdict({"accuracy": 0.0}),
        ],
        RewardResult([1.0, 0.0, 0.0], [True, True, True], {}, {}),
        policy,
    )
    assert batch.step_index.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0] + [-1] * 5, [-1] * 8]
    assert batch.step_reward.tolist() == [[1.0, 0.5], [0.25, 0.0], [0.0, 0.0]]
    assert batch.step_mask.tolist() == [[True, True], [True, False], [False, False]]
    assert batch.answer_span.tolist() == [[4, 5], [-1, -1], [-1, -1]]


def test_pitfall_24_seeds_differ_in_every_part():
    seeds = {
        seed_of(run, step, prompt, purpose, attempt, member)
        for run in (0, 1)
        for step in (0, 1)
        for prompt in (0, 1)
        for purpose in ("rollout", "validation")
        for attempt in (0, 1)
        for member in (0, 1)
    }
    assert len(seeds) == 64
    draws = uniforms(sorted(seeds), 50)
    assert draws.unique().numel() == 64 * 50
    assert 0.45 < float(draws.mean()) < 0.55


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "data.group_size is 0"),
        ({"truncation_penalty": 0.5}, "data.truncated is 'keep'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        a_datamodule(**options)


def test_validation_options_are_checked():
    with pytest.raises(UsageError, match="greedy decoding"):
        Validation(samples=4)
    with pytest.raises(UsageError, match=r"1 <= k <= data.validation.samples"):
        Validation(samples=4, temperature=1.0, pass_at=[8])


def test_state_goes_on_with_the_next_batch():
    data = a_datamodule()
    data._order = PromptBatches(8, 2, seed=0)
    batches = iter(data._order)
    next(batches)
    data.budget.add(2, 6, 12)
    again = a_datamodule()
    again.load_state_dict(data.state_dict())
    assert again.state_dict() == {"position": 1, "budget": {"prompts": 2, "completions": 6, "tokens": 12}}
