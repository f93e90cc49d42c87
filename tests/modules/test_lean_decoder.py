"""The lean decoder: who gets one, and that its numbers are the model's own."""

import pytest
import torch
from torch import nn

from apportion.data.sampler import Limits
from apportion.modules.lean_decoder import _Linear
from apportion.modules.lean_pass import unlike_llama
from apportion.modules.samplers import SharedPrefixSampler
from tests.modules.tiny_models import CONFIGS, tiny_policy

LEAN = {"llama", "llama_tied", "qwen2", "qwen2_window", "qwen3", "mistral", "mistral_window"}
PREFIXES = [[5, 9, 30, 12, 44, 7], [7, 8], [61]]


def sampled(policy, lean: bool):
    policy.split.lean = lean
    return SharedPrefixSampler().sample(policy, PREFIXES, 5, "rollout", Limits(11), prompt_ids=range(3), step=0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_llama_like_models_are_decoded_leanly(tmp_path, kind):
    split = tiny_policy(kind, tmp_path).split
    assert split.lean
    assert (unlike_llama(split.model) is None) == (kind in LEAN)


@pytest.mark.parametrize("kind", sorted(LEAN))
def test_both_ways_give_the_same_completions(tmp_path, kind):
    policy = tiny_policy(kind, tmp_path, "float64", end_tokens=["<eos>", *"ABCDEFGHIJKLMNOP"])
    ours, theirs = sampled(policy, True), sampled(policy, False)
    assert torch.equal(ours.ids, theirs.ids)
    torch.testing.assert_close(ours.logp, theirs.logp, rtol=0, atol=1e-6)  # its norms are in float32


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral_window"])
@pytest.mark.parametrize("mixed", [False, True])
def test_in_16_bits_its_numbers_are_those_of_16_bits(tmp_path, kind, mixed):
    """What 16 bits change against fp32 bounds what the lean decoder may change against the model's own steps."""
    policy = tiny_policy(kind, tmp_path, "float32" if mixed else "bfloat16")
    exact = tiny_policy(kind, tmp_path, "float32")
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed), policy.inference():
        samples = sampled(policy, True)
    rollouts = samples.mask
    with exact.inference():
        reference = SharedPrefixSampler().sample(exact, PREFIXES, 5, "rollout", Limits(11), prompt_ids=range(3), step=0)
    same = (samples.ids == reference.ids).long().cumprod(1).bool()[:, : rollouts.shape[1]]
    gap = (samples.logp - reference.logp)[same & rollouts]
    assert len(gap) > 40
    assert 0 < float(gap.abs().mean()) < 0.02


def test_a_model_with_hooks_runs_its_own_layers(tmp_path):
    policy = tiny_policy("llama", tmp_path)
    assert unlike_llama(policy.model) is None
    seen = []
    handle = policy.model.base_model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    assert "has hooks" in str(unlike_llama(policy.model))
    sampled(policy, True)
    assert len(seen) == 11  # the prompts, and ten tokens
    handle.remove()
    assert unlike_llama(policy.model) is None


def test_a_layer_that_was_replaced_is_not_lean(tmp_path):
    class Scaled(nn.Linear):
        pass

    policy = tiny_policy("llama", tmp_path)
    policy.model.base_model.layers[1].mlp.down_proj.__class__ = Scaled
    assert "down_proj is a Scaled" in str(unlike_llama(policy.model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_input_as_one(dtype, bias):
    torch.manual_seed(0)
    layers = [nn.Linear(24, size, bias).to(dtype) for size in (16, 8)]
    inputs = torch.randn(7, 24, dtype=dtype)
    with torch.no_grad():
        expected = torch.cat([layer(inputs) for layer in layers], -1)
        for rows in (1, 7, 64):
            found = _Linear(layers, dtype, rows)(inputs)
            torch.testing.assert_close(found, expected, rtol=0, atol=0.02 if dtype == torch.bfloat16 else 1e-6)
