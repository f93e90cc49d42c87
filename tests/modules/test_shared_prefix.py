"""The shared-prefix sampler against transformers' generate, and how a token is drawn."""

import logging

import pytest
import torch

from apportion.data.sampler import Limits
from apportion.modules.samplers import GenerateSampler, SharedPrefixSampler
from apportion.modules.samplers.drawing import draw
from tests.modules.tiny_models import CONFIGS, tiny_policy

PREFIXES = [[5, 9, 30, 12, 44, 7], [7, 8], [61]]


def completions(samples):
    return [ids[mask].tolist() for ids, mask in zip(samples.ids, samples.mask, strict=True)]


def test_a_draw_is_the_plain_inverse_of_the_cumulative_distribution():
    """Against a float64 loop; 700 tokens are more than two blocks, and one of them whole is impossible."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(200, 700, generator=generator, dtype=torch.float64)
    logits[:, 256:512] = -torch.inf
    random = torch.rand(200, generator=generator, dtype=torch.float64)
    drawn = draw(logits.clone(), random, Limits(1, temperature=0.7))
    for row in range(200):
        probs = (logits[row] / 0.7).softmax(0)
        total, token = 0.0, -1
        while total <= random[row]:
            token += 1
            total += float(probs[token])
        assert int(drawn.token[row]) == token
        possible = probs[probs > 0]
        expected = (probs[token].log(), -(possible * possible.log()).sum(), (probs**2).sum())
        for ours, theirs in zip((drawn.logp, drawn.entropy, drawn.sum_sq_probs), expected, strict=True):
            assert float(ours[row]) == pytest.approx(float(theirs), rel=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_both_engines_draw_the_same_completions(tmp_path, kind, dtype):
    """Rows end at different times, prompts have different lengths, and a wave holds one or two of the groups."""
    policy = tiny_policy(kind, tmp_path, dtype, temperature=0.8, end_tokens=["<eos>", *"ABCDEFGHIJKLMNOP"])
    assert policy.shares_prompts
    arguments = (policy, PREFIXES, 5, "rollout", Limits(11, 0.8))
    expected = GenerateSampler().sample(*arguments, prompt_ids=range(3), step=0)
    assert len(set(expected.mask.sum(1).tolist())) > 3
    for rows_per_wave in (5, 10, None):
        found = SharedPrefixSampler(rows_per_wave).sample(*arguments, prompt_ids=range(3), step=0)
        assert torch.equal(found.ids, expected.ids)
        assert torch.equal(found.mask, expected.mask)
        assert torch.equal(found.truncated, expected.truncated)
        for name in ("logp", "entropy", "sum_sq_probs"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10 if dtype == "float64" else 1e-4)


def test_each_wave_is_told_when_it_is_finished(tmp_path):
    policy = tiny_policy("llama", tmp_path, "float32")
    told = []

    def finished(prompts, samples):
        told.append((list(prompts), samples))

    samples = SharedPrefixSampler(rows_per_wave=4).sample(
        policy, PREFIXES, 2, "rollout", Limits(5), prompt_ids=range(3), step=0, finished=finished
    )
    assert [prompts for prompts, _ in told] == [[2, 1], [0]]  # from the shortest prompt to the longest
    for prompts, wave in told:
        rows = [2 * prompt + member for prompt in prompts for member in range(2)]
        assert completions(wave) == [completions(samples)[row] for row in rows]


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_tokens_are_generates_on_many_prompts(tmp_path, kind):
    policy = tiny_policy(kind, tmp_path, "float32")
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 20, (64,), generator=generator).tolist()
    prefixes = [torch.randint(2, 99, (length,), generator=generator).tolist() for length in lengths]
    samples = SharedPrefixSampler().sample(
        policy, prefixes, 1, "validation", Limits(16, 0.0), prompt_ids=range(64), step=0
    )
    for prefix, completion in zip(prefixes, completions(samples), strict=True):
        whole = policy.model.generate(
            torch.tensor([prefix]), attention_mask=torch.ones(1, len(prefix)), do_sample=False, max_new_tokens=16
        )[0, len(prefix) :].tolist()
        assert completion == whole[: len(completion)]


def gemma2(folder):
    return tiny_policy("gemma2", folder, "float32")


def eager_llama(folder):
    return tiny_policy("llama", folder, "float32", attention="eager")


@pytest.mark.parametrize("make", [eager_llama, gemma2])
def test_a_model_of_unknown_attention_is_sampled_by_generate(tmp_path, caplog, make):
    with caplog.at_level(logging.WARNING):
        policy = make(tmp_path)
    assert "cannot share a prompt between its completions (attention 'eager' is the model's own code)" in caplog.text
    assert not policy.shares_prompts
    assert policy.scoring == "padded"
    arguments = (policy, PREFIXES, 2, "rollout", Limits(6))
    found = SharedPrefixSampler().sample(*arguments, prompt_ids=range(3), step=0)
    assert torch.equal(found.ids, GenerateSampler().sample(*arguments, prompt_ids=range(3), step=0).ids)
