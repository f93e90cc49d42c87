"""Both samplers: the scorer's log-probabilities, the distribution's frequencies, rows that are independent."""

import logging

import pytest
import torch
from scipy.stats import chisquare
from transformers import GenerationConfig

from apportion.data.errors import RunError, UsageError
from apportion.data.sampler import Limits, uniforms
from apportion.modules.fresh import FreshModel
from apportion.modules.policy import Policy
from apportion.modules.samplers import GenerateSampler, SharedPrefixSampler
from apportion.modules.samplers.drawing import inverse_cdf, sum_by_block, truncated_log_probs
from apportion.modules.samplers.generate import until_end
from tests.modules.tiny_models import CONFIGS, batch_of, tiny_policy

PREFIXES = [[5, 9, 30, 12, 44, 7], [7, 8], [61]]
TOLERANCE = {"float64": 1e-10, "float32": 1e-4}


ENGINES = {"generate": GenerateSampler, "shared_prefix": SharedPrefixSampler}
engine = GenerateSampler


@pytest.fixture(params=ENGINES, autouse=True)
def _each_engine(request, monkeypatch):
    monkeypatch.setitem(globals(), "engine", ENGINES[request.param])


def sampled(policy, prefixes=PREFIXES, members=3, rows_at_once=64, step=0, prompt_ids=None, **limits):
    return engine(rows_at_once).sample(
        policy,
        prefixes,
        members,
        "rollout",
        Limits(**{"max_new_tokens": 9, "temperature": 0.8, **limits}),
        prompt_ids=range(len(prefixes)) if prompt_ids is None else prompt_ids,
        step=step,
    )


def completions(samples):
    return [ids[mask].tolist() for ids, mask in zip(samples.ids, samples.mask, strict=True)]


def rescored(policy, samples, prefixes=PREFIXES):
    members = len(samples.ids) // len(prefixes)
    batch = batch_of(prefixes, completions(samples), [p for p in range(len(prefixes)) for _ in range(members)])
    scores = policy.score(batch, entropy=True, sum_sq_probs=True)
    width = samples.ids.shape[1]
    return [getattr(scores, name).detach()[:, :width] for name in ("logp", "entropy", "sum_sq_probs")]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_pitfalls_15_19_23_the_sampler_agrees_with_the_scorer(tmp_path, kind, dtype):
    """Left padding, the shift by one and the temperature are the same on both sides."""
    policy = tiny_policy(kind, tmp_path, dtype, temperature=0.8)
    samples = sampled(policy)
    exact = kind != "cohere"  # turns queries and keys to their positions in float32
    for ours, theirs in zip(
        (samples.logp, samples.entropy, samples.sum_sq_probs), rescored(policy, samples), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE[dtype] if exact else 1e-4)
        assert ours[samples.mask].abs().min() > 0
        assert not ours[~samples.mask].any()
    assert len({tuple(c) for c in completions(samples)}) > 6


def test_pitfall_24_members_of_a_group_differ_and_seeds_decide(tmp_path):
    policy = tiny_policy("llama", tmp_path)
    first = completions(sampled(policy, members=8))
    assert all(len({tuple(c) for c in first[group * 8 : group * 8 + 8]}) > 4 for group in range(3))
    assert completions(sampled(policy, members=8)) == first
    assert completions(sampled(policy, members=8, step=1)) != first
    fewer = completions(sampled(policy, members=4))
    assert fewer == [*first[:4], *first[8:12], *first[16:20]]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_completion_does_not_depend_on_its_company(tmp_path, kind):
    policy = tiny_policy(kind, tmp_path)
    together = sampled(policy)
    for rows_at_once in (1, 2, 5):
        apart = sampled(policy, rows_at_once=rows_at_once)
        assert completions(apart) == completions(together)
        torch.testing.assert_close(apart.logp, together.logp, rtol=0, atol=1e-10)
        assert torch.equal(apart.ids, together.ids)
    for number, prefix in enumerate(PREFIXES):
        alone = sampled(policy, [prefix], prompt_ids=[number])
        assert completions(alone) == completions(together)[3 * number : 3 * number + 3]


def test_frequencies_are_the_policys(tmp_path):
    """4000 draws of one token against the scorer's probabilities; rare tokens are pooled."""
    policy = tiny_policy("llama", tmp_path, dtype="float32")
    draws = 4000
    samples = sampled(policy, [[7, 8]], draws, rows_at_once=draws, max_new_tokens=1, temperature=1.0)
    with policy.inference():
        probs = policy.model(input_ids=torch.tensor([[7, 8]])).logits[0, -1].double().softmax(0)
    observed = torch.bincount(samples.ids[:, 0], minlength=99).double()
    often = probs * draws >= 5
    assert often.sum() > 20
    pooled = [torch.cat([x[often], x[~often].sum()[None]]) for x in (observed, probs * draws)]
    assert chisquare(*(x.numpy() for x in pooled)).pvalue > 1e-3
    assert chisquare(pooled[0].numpy(), torch.full_like(pooled[0], draws / len(pooled[0])).numpy()).pvalue < 1e-6


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 6, "top_p": 0.6}])
def test_pitfall_19_top_k_and_top_p(tmp_path, limits):
    """Log-probabilities are of the truncated distribution; entropy and sum of squares of the whole one."""
    policy = tiny_policy("llama", tmp_path, temperature=0.8)
    samples = sampled(policy, members=20, **limits)
    logp, entropy, sum_sq_probs = rescored(policy, samples)
    torch.testing.assert_close(samples.entropy, entropy, rtol=0, atol=1e-10)
    torch.testing.assert_close(samples.sum_sq_probs, sum_sq_probs, rtol=0, atol=1e-10)
    batch = batch_of(PREFIXES, completions(samples), [p for p in range(3) for _ in range(20)])
    with policy.inference():
        whole = policy.head(policy.hidden(batch)[:, : samples.ids.shape[1]]).log_softmax(-1)
    for row, token in samples.mask.nonzero().tolist():
        expected = kept_by_hand(whole[row, token].exp().tolist(), **limits)
        chosen = int(samples.ids[row, token])
        assert chosen in expected
        assert samples.logp[row, token].exp().item() == pytest.approx(expected[chosen], abs=1e-9)
    assert (samples.logp > logp + 0.1)[samples.mask].any()


def kept_by_hand(probs, top_k=0, top_p=1.0):
    ordered = sorted(range(len(probs)), key=lambda v: -probs[v])[: top_k or None]
    total = sum(probs[v] for v in ordered)
    kept, reached = [], 0.0
    for v in ordered:
        if reached >= top_p:
            break
        kept.append(v)
        reached += probs[v] / total
    total = sum(probs[v] for v in kept)
    return {v: probs[v] / total for v in kept}


def test_greedy_takes_the_most_probable_token_at_temperature_1(tmp_path):
    policy = tiny_policy("llama", tmp_path, temperature=0.8)
    samples = sampled(policy, members=2, temperature=0.0)
    found = completions(samples)
    assert found[0::2] == found[1::2]
    for prefix, completion, logp in zip(PREFIXES, found[0::2], samples.logp[0::2], strict=True):
        logits = policy.model(input_ids=torch.tensor([prefix + completion])).logits[0, len(prefix) - 1 : -1].detach()
        assert logits.argmax(-1).tolist() == completion
        torch.testing.assert_close(logp[: len(completion)], logits.log_softmax(-1).max(-1).values, rtol=0, atol=1e-10)


def with_bias_to(policy, tokens):
    """Make some tokens likely: the output layer's rows of these grow along the hidden states."""
    with torch.no_grad():
        hidden = policy.hidden(batch_of(PREFIXES, [[20, 21, 22]] * 3, range(3)))[:, :3].mean((0, 1))
        for token in tokens:
            policy.model.lm_head.weight[token] = 3 * hidden / hidden.norm()
    return policy


def test_pitfalls_14_16_end_tokens_end_and_the_rest_is_truncated(tmp_path):
    policy = tiny_policy("llama", tmp_path, end_tokens=["<eos>", "A", "B"], temperature=0.8)
    policy = with_bias_to(policy, policy.end_token_ids)
    samples = sampled(policy, members=30)
    ended_by = set()
    for completion, truncated, mask in zip(completions(samples), samples.truncated.tolist(), samples.mask, strict=True):
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)
        assert not set(completion[:-1]) & set(policy.end_token_ids)
        assert truncated == (completion[-1] not in policy.end_token_ids)
        assert len(completion) == 9 if truncated else len(completion) <= 9
        if not truncated:
            ended_by.add(completion[-1])
    assert ended_by == set(policy.end_token_ids)
    assert 0 < samples.truncated.sum() < 90
    assert (samples.ids[~samples.mask] == policy.pad_token_id).all()
    for ours, theirs in zip((samples.logp, samples.entropy), rescored(policy, samples), strict=False):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_pitfall_14_pad_may_be_an_end_token(tmp_path):
    plain = tiny_policy("llama", tmp_path, end_tokens=["<eos>", "A"])
    expected = sampled(with_bias_to(plain, plain.end_token_ids), members=10)
    policy = tiny_policy("llama", tmp_path, end_tokens=["<eos>", "A"])
    policy.pad_token_id = policy.end_token_ids[0]
    samples = sampled(with_bias_to(policy, policy.end_token_ids), members=10)
    assert completions(samples) == completions(expected)
    assert torch.equal(samples.mask, expected.mask)


def test_the_batch_stops_when_every_row_has_ended(tmp_path):
    policy = tiny_policy("llama", tmp_path)
    with torch.no_grad():
        policy.model.lm_head.weight.zero_()
        policy.model.lm_head.weight[1] = 100 * policy.hidden(batch_of([[7]], [[1]], [0]))[0, 0]
    calls = []
    policy.model.base_model.register_forward_hook(lambda *_: calls.append(1))
    samples = sampled(policy, [[7]], max_new_tokens=50)
    assert completions(samples) == [[1]] * 3
    assert samples.ids.shape == (3, 1)
    assert len(calls) == 1


def test_the_models_own_generation_settings_are_not_used(tmp_path, caplog):
    policy = tiny_policy("llama", tmp_path)
    expected = sampled(policy)
    own = GenerationConfig(
        do_sample=True,
        temperature=0.1,
        top_k=1,
        repetition_penalty=5.0,
        num_beams=2,
        min_new_tokens=8,
        max_length=3,
        no_repeat_ngram_size=1,
        suppress_tokens=[5],
        eos_token_id=[30],
    )
    policy.model.generation_config = own
    with caplog.at_level(logging.WARNING, logger="transformers"):
        samples = sampled(policy)
    assert not caplog.records
    assert torch.equal(samples.ids, expected.ids)
    torch.testing.assert_close(samples.logp, expected.logp)
    assert policy.model.generation_config is own
    assert not policy.model._forward_hooks


def test_in_training_mode_with_gradient_checkpointing():
    plain = Policy(fresh=FreshModel(width=16), dtype="float64")
    policy = Policy(fresh=FreshModel(width=16), dtype="float64", gradient_checkpointing=True).train()
    samples = sampled(policy)
    assert completions(samples) == completions(sampled(plain))
    assert policy.training
    assert policy.model.training
    assert not samples.logp.requires_grad


def test_in_bf16_and_under_autocast():
    """Sampling is in fp32 there; the scorer agrees to the precision of bf16 hidden states."""
    for policy in (Policy(fresh=FreshModel(width=16), dtype="bfloat16"), Policy(fresh=FreshModel(width=16))):
        with torch.autocast("cpu", torch.bfloat16, enabled=policy.model.dtype == torch.float32):
            samples = sampled(policy, temperature=1.0)
            assert samples.logp.dtype == samples.entropy.dtype == samples.sum_sq_probs.dtype == torch.float32
            logp = rescored(policy, samples)[0]
        torch.testing.assert_close(samples.logp, logp, rtol=0, atol=0.05)


def test_pitfall_30_logits_that_are_not_finite_are_an_error():
    policy = Policy(fresh=FreshModel(width=16))
    with torch.no_grad():
        policy.model.lm_head.weight[3] = torch.nan
    with pytest.raises(RunError, match="not finite"):
        sampled(policy)


def test_budget_counts_and_bad_requests():
    policy = Policy(fresh=FreshModel(width=16))
    sampler = engine()
    limits = Limits(5)
    samples = sampler.sample(policy, PREFIXES, 2, "rollout", limits, prompt_ids=[0, 1, 2], step=0)
    sampler.sample(policy, PREFIXES, 2, "validation", limits, prompt_ids=[0, 1, 2], step=0)
    assert sampler.budget.state_dict() == {"prompts": 3, "completions": 6, "tokens": int(samples.mask.sum())}
    with pytest.raises(ValueError, match="empty prefix"):
        sampled(policy, [[5], []])
    with pytest.raises(UsageError, match=r"rows_per_(call|wave) is 0"):
        engine(0)


def test_inverse_cdf_never_draws_the_impossible():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for u, token in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.75, 3), (1 - 2**-53, 3)):
        assert inverse_cdf(probs.log(), sum_by_block(probs), torch.tensor([u], dtype=torch.float64)).tolist() == [token]
    rows = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).masked_fill(
        torch.arange(40) >= 7, -torch.inf
    )
    probs = rows.softmax(-1)
    assert (inverse_cdf(probs.log(), sum_by_block(probs), torch.full((50,), 1 - 2**-53, dtype=torch.float64)) < 7).all()


def test_truncation_by_hand():
    log_probs = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()
    for top_k, top_p, expected in (
        (0, 1.0, [0.4, 0.1, 0.3, 0.2]),
        (2, 1.0, [4 / 7, 0, 3 / 7, 0]),
        (9, 1.0, [0.4, 0.1, 0.3, 0.2]),
        (0, 0.39, [1, 0, 0, 0]),
        (0, 0.5, [4 / 7, 0, 3 / 7, 0]),
        (3, 0.5, [4 / 7, 0, 3 / 7, 0]),
        (3, 0.4, [1, 0, 0, 0]),
    ):
        kept = truncated_log_probs(log_probs, top_k, top_p).exp()[0]
        torch.testing.assert_close(kept, torch.tensor(expected, dtype=torch.float32))


def test_until_end():
    mask, truncated = until_end(torch.tensor([[5, 1, 1, 0], [2, 5, 5, 1], [5, 5, 5, 5]]), (1, 2))
    assert mask.tolist() == [[True, True, False, False], [True, False, False, False], [True] * 4]
    assert truncated.tolist() == [False, False, True]


def test_a_rows_random_numbers_do_not_depend_on_the_length():
    assert torch.equal(uniforms([3, 4], 40)[:, :7], uniforms([3, 4], 7))
