"""RolloutBatch: selecting, moving, splitting. Selecting never changes what belongs to a row."""

import dataclasses

import pytest
import torch
from hypothesis import given, strategies as st

from apportion.data.batch import PER_TOKEN, RolloutBatch


def a_batch(prompt_lengths=(3, 5), prompt_of=(0, 0, 1, 1, 1), lengths=(4, 2, 0, 6, 1)) -> RolloutBatch:
    p, n, lp, t = len(prompt_lengths), len(lengths), max(prompt_lengths) + 1, max(lengths) + 2
    prompt_mask = torch.arange(lp)[None] >= lp - torch.tensor(prompt_lengths)[:, None]
    mask = torch.arange(t)[None] < torch.tensor(lengths)[:, None]
    return RolloutBatch(
        prompt_ids=torch.arange(p * lp).view(p, lp) * prompt_mask,
        prompt_mask=prompt_mask,
        prompt_id=torch.arange(p) + 100,
        prompt_index=torch.tensor(prompt_of),
        group=torch.tensor(prompt_of) + 7,
        completion_ids=torch.arange(n * t).view(n, t) * mask,
        completion_mask=mask,
        action_mask=mask,
        reward=torch.arange(n, dtype=torch.float32),
        reward_valid=torch.ones(n, dtype=torch.bool),
        truncated=torch.zeros(n, dtype=torch.bool),
        in_loss=torch.tensor([i % 2 == 0 for i in range(n)]),
        policy_version=torch.zeros(n, dtype=torch.long),
        reward_terms={"accuracy": torch.arange(n, dtype=torch.float32)},
        logp_old=torch.arange(n * t, dtype=torch.float32).view(n, t),
        prompt_texts=[f"prompt {i}" for i in range(p)],
        completion_texts=[f"completion {i}" for i in range(n)],
        examples=[{"prompt_id": 100 + i} for i in range(p)],
    )


def row_of(batch: RolloutBatch, row: int) -> tuple:
    """Everything that belongs to a completion, without padding."""
    prompt = int(batch.prompt_index[row])
    mask = batch.completion_mask[row]
    assert batch.logp_old is not None
    return (
        batch.prompt_ids[prompt, batch.prompt_mask[prompt]].tolist(),
        int(batch.prompt_id[prompt]),
        batch.prompt_texts[prompt],
        batch.examples[prompt],
        int(batch.group[row]),
        batch.completion_ids[row, mask].tolist(),
        batch.logp_old[row, mask].tolist(),
        float(batch.reward[row]),
        float(batch.reward_terms["accuracy"][row]),
        bool(batch.in_loss[row]),
        batch.completion_texts[row],
    )


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_indexing_keeps_every_row_whole(rows):
    batch = a_batch()
    chosen = batch[rows]
    assert [row_of(chosen, i) for i in range(len(rows))] == [row_of(batch, i) for i in rows]


def test_indexing_drops_unused_prompts_and_padding():
    chosen = a_batch()[torch.tensor([True, True, False, False, False])]
    assert chosen.prompt_ids.shape == (1, 3)
    assert chosen.completion_ids.shape == (2, 4)
    assert chosen[:1].completion_ids.shape == (1, 4)
    assert a_batch()[[2]].completion_ids.shape == (1, 0)  # an empty completion alone


def test_loss_mask_is_the_action_mask_of_rows_in_the_loss():
    batch = a_batch()
    assert batch.loss_mask.sum(1).tolist() == [4, 0, 0, 0, 1]
    assert batch.lengths.tolist() == [4, 2, 0, 6, 1]


def test_rows_by_group_is_by_id_not_by_position():
    batch = a_batch(prompt_of=(1, 0, 1, 0, 0))
    assert [rows.tolist() for rows in batch.rows_by_group()] == [[0, 2], [1, 3, 4]]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 60))
def test_token_budget_covers_every_row_once_and_is_kept(lengths, budget):
    batch = a_batch(prompt_of=[i % 2 for i in range(len(lengths))], lengths=lengths)
    runs = list(batch.rows_by_token_budget(budget))
    assert sorted(torch.cat(runs).tolist()) == list(range(len(lengths)))
    for rows in runs:
        cut = batch[rows]
        size = len(rows) * (cut.prompt_mask.sum(1).max() + cut.completion_mask.sum(1).max())
        assert size <= budget or len(rows) == 1


def test_a_wrong_shape_is_named():
    batch = a_batch()
    for name in ("logp_old", "reward", "prompt_mask"):
        wrong = getattr(batch, name)[:-1]
        with pytest.raises(ValueError, match=name):
            batch.replace(**{name: wrong})


def test_to_moves_every_tensor():
    moved = a_batch().to("meta")
    for f in dataclasses.fields(moved):
        value = getattr(moved, f.name)
        assert not isinstance(value, torch.Tensor) or value.device.type == "meta", f.name
    assert moved.reward_terms["accuracy"].device.type == "meta"


def test_per_token_fields_exist():
    assert set(PER_TOKEN) <= {f.name for f in dataclasses.fields(RolloutBatch)}
