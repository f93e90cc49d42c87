"""Packed scoring: the same log-probabilities and the same gradient as padded rows, for every kind of model."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from apportion.algorithms import Clipped, KLPenalty, LeaveOneOut, Reinforce, TruncatedImportance
from apportion.algorithms.aggregation import AGGREGATIONS
from apportion.data.errors import UsageError
from apportion.modules import log_probs
from apportion.modules.fresh import FreshModel
from apportion.modules.policy import Policy
from apportion.modules.reporting import Totals
from tests.modules.tiny_models import CONFIGS, batch_of, exact_norms, tiny_policy
from tests.modules.whole_step import build_module

PROMPTS = [[5, 9, 30, 12, 44, 7], [7, 8], [61]]
PROMPT_OF = [0, 0, 1, 1, 2, 1, 2]
LENGTHS = [5, 1, 9, 0, 7, 3, 2]


def random_batch(seed=0):
    """Completions of random tokens: unlikely ones, with large gradients."""
    generator = torch.Generator().manual_seed(seed)
    completions = [torch.randint(2, 99, (length,), generator=generator).tolist() for length in LENGTHS]
    batch = batch_of(PROMPTS, completions, PROMPT_OF)
    return batch, torch.randn(batch.completion_ids.shape, generator=generator, dtype=torch.float64)


def scores_and_gradient(policy, layout, batch, weights):
    policy.scoring = layout
    policy.zero_grad()
    scores = policy.score(batch, entropy=True, sum_sq_probs=True)
    ((scores.logp + 0.3 * scores.entropy) * weights.to(scores.logp)).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    return [getattr(scores, name).detach() for name in ("logp", "entropy", "sum_sq_probs")], gradient


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_is_padded(tmp_path, kind, dtype, tolerance, checkpointing):
    policy = tiny_policy(kind, tmp_path, dtype, temperature=0.8, gradient_checkpointing=checkpointing)
    assert policy.scoring == "packed"
    batch, weights = random_batch()
    padded, expected = scores_and_gradient(policy, "padded", batch, weights)
    packed, gradient = scores_and_gradient(policy, "packed", batch, weights)
    for ours, theirs in zip(packed, padded, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=10 * tolerance)
        assert not ours[~batch.completion_mask].any()
    if kind == "cohere" and dtype == "float64":
        tolerance = 1e-7  # turns queries and keys to their positions in float32
    assert float((gradient - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_run_of_tokens_at_a_time_changes_nothing(layout, monkeypatch):
    policy = Policy(fresh=FreshModel(width=16), dtype="float64")
    batch, weights = random_batch()
    whole, expected = scores_and_gradient(policy, layout, batch, weights)
    for logits in (1, 5 * 99, 26 * 99):
        monkeypatch.setattr(log_probs, "LOGITS_AT_ONCE", logits)
        parts, gradient = scores_and_gradient(policy, layout, batch, weights)
        for ours, theirs in zip(parts, whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_under_autocast_and_in_bf16():
    """To the precision of bf16 hidden states; log-probabilities are fp32 either way."""
    batch, _ = random_batch()
    for policy in (Policy(fresh=FreshModel(width=16), dtype="bfloat16"), Policy(fresh=FreshModel(width=16))):
        with torch.autocast("cpu", torch.bfloat16, enabled=policy.model.dtype == torch.float32):
            found = {}
            for layout in ("padded", "packed"):
                policy.scoring = layout
                found[layout] = policy.score(batch).logp
        assert found["packed"].dtype == torch.float32
        torch.testing.assert_close(found["packed"], found["padded"], rtol=0, atol=0.1)


@pytest.mark.parametrize("lengths", [[0], [1], [1, 0, 1], [3]])
def test_short_completions(lengths):
    policy = Policy(fresh=FreshModel(width=16), dtype="float64")
    exact_norms(policy.model)
    completions = [[20 + i for i in range(length)] for length in lengths]
    batch = batch_of([[5, 6]], completions, [0] * len(lengths))
    found = {}
    for layout in ("padded", "packed"):
        policy.scoring = layout
        found[layout] = policy.score(batch).logp.detach()
    torch.testing.assert_close(found["packed"], found["padded"], rtol=0, atol=1e-10)


def test_embeddings_need_rows():
    policy = Policy(fresh=FreshModel(width=16))
    batch, _ = random_batch()
    with pytest.raises(ValueError, match="padded layout"):
        policy.hidden(batch, "packed", embeddings=policy.embed(batch))


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=20),
    budget=st.integers(1, 60),
)
def test_micro_batches_hold_each_row_once_and_each_prompt_once(prompts, rows, budget):
    batch = batch_of([[3] * n for n in prompts], [[4] * n for _, n in rows], [p % len(prompts) for p, _ in rows])
    runs = [run.tolist() for run in batch.rows_by_token_budget(budget, shared_prompts=True)]
    assert sorted(row for run in runs for row in run) == list(range(len(rows)))
    sizes = []
    for run in runs:
        used = {int(batch.prompt_index[row]) for row in run}
        sizes.append(sum(prompts[p] for p in used) + sum(rows[row][1] for row in run))
        assert sizes[-1] <= budget or len(run) == 1
    for size, following in zip(sizes, runs[1:], strict=False):  # no run could have taken the next one's first row
        row = following[0]
        assert size + rows[row][1] + prompts[int(batch.prompt_index[row])] > budget or size + rows[row][1] > budget


def test_unknown_layouts_are_refused():
    with pytest.raises((UsageError, ValueError), match="scoring"):
        Policy(fresh=FreshModel(width=16), scoring="tight")  # type: ignore[arg-type]


def update_gradient(kind, folder, layout, checkpointing, objective, form, aggregation):
    """The gradient of an optimizer step whose old log-probabilities are not the current ones, in micro-batches that cut
    groups, with an entropy bonus and importance weights for the sampler's precision."""
    policy = tiny_policy(kind, folder, temperature=0.8, gradient_checkpointing=checkpointing)
    policy.scoring = layout
    kl = KLPenalty(form, 0.3) if form else None
    module = build_module(policy, LeaveOneOut(), objective, kl, aggregation, entropy=0.05)
    module.mismatch = TruncatedImportance("token", 1.5)
    batch, noise = random_batch()
    reward = torch.arange(len(batch), dtype=torch.float64) % 3
    old = torch.where(batch.completion_mask, -4.0 + 0.3 * noise, 0.0)
    batch = batch.replace(reward=reward, logp_old=old, logp_sampler=old + 0.1 * noise * batch.completion_mask)
    batch = module.assign_credit(batch)
    module.policy.version = 1
    assert module.accumulate_gradients(batch, Totals())
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("objective", [Reinforce(), Clipped()], ids=["reinforce", "clipped"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_a_whole_step_is_the_same_in_both_layouts(tmp_path, kind, objective, aggregation):
    for checkpointing, form in ((False, "k3_loss"), (True, "k1_reward"), (False, "k2_loss"), (True, None)):
        rest = (checkpointing, objective, form, aggregation)
        expected = update_gradient(kind, tmp_path, "padded", *rest)
        gradient = update_gradient(kind, tmp_path, "packed", *rest)
        assert float(expected.norm()) > 1e-3
        assert float((gradient - expected).norm() / expected.norm()) < 1e-10
