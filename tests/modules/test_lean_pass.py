"""The lean packed pass: its numbers and gradients are those of the model's own modules."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from apportion.modules.fresh import FreshModel
from apportion.modules.memory import SMALL, activation_bytes, resolve_micro_batch_tokens
from apportion.modules.packed import Packed
from apportion.modules.packed_attention import Table
from apportion.modules.policy import Policy
from apportion.modules.shared_prompts import packed_hidden
from tests.modules.tiny_models import CONFIGS, batch_of, tiny_policy

LEAN = ("llama", "llama_tied", "qwen2", "qwen2_window", "qwen3", "mistral", "mistral_window")
PROMPTS = [[5, 9, 30, 12, 44, 7], [7, 8], [61, 3, 4]]
COMPLETIONS = [[1, 2, 3, 4], [9], [30, 31, 32, 33, 34, 35, 36], [40, 41], [50, 51, 52], [60, 61, 62, 63, 64]]
PROMPT_OF = [0, 2, 1, 0, 2, 0]  # not in order


def trained(policy, lean, batch, frozen=()) -> tuple[torch.Tensor, dict]:
    """Log-probabilities, and gradients by name."""
    policy.split.lean = lean
    policy.zero_grad()
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    scores = policy.score(batch, entropy=True)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(scores.logp.shape, generator=generator, dtype=torch.float64).to(scores.logp)
    ((scores.logp + 0.3 * scores.entropy) * weights).sum().backward()
    return scores.logp.detach(), {name: p.grad for name, p in policy.named_parameters()}


@pytest.mark.parametrize("kind", LEAN)
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["kept", "made_again"])
@pytest.mark.parametrize("frozen", [(), ("q_proj", "layernorm", "up_proj", "layers.0.mlp"), ("embed",)])
def test_gradients_are_those_of_the_models_own_modules(tmp_path, kind, options, frozen):
    policy = tiny_policy(kind, tmp_path, **options)
    assert policy.split.lean
    batch = batch_of(PROMPTS, COMPLETIONS, PROMPT_OF)
    expected, own = trained(policy, False, batch, frozen)
    found, ours = trained(policy, True, batch, frozen)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    for name, gradient in own.items():
        assert (gradient is None) == (ours[name] is None), name
        if gradient is not None:
            assert ours[name].layout == torch.strided
            torch.testing.assert_close(ours[name], gradient, rtol=1e-10, atol=1e-10 * float(gradient.abs().max()))


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3", "mistral_window"])
@pytest.mark.parametrize("mixed", [True, False])
def test_in_16_bits_its_error_is_that_of_the_models_own_modules(tmp_path, kind, mixed):
    batch = batch_of(PROMPTS, COMPLETIONS, PROMPT_OF)
    _, exact = trained(tiny_policy(kind, tmp_path, "float32"), True, batch)
    policy = tiny_policy(kind, tmp_path, "float32" if mixed else "bfloat16")
    errors = {}
    for lean in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            _, gradients = trained(policy, lean, batch)
        errors[lean] = float(torch.cat([(gradients[name] - exact[name]).flatten() for name in exact]).norm())
    size = float(torch.cat([gradient.flatten() for gradient in exact.values()]).norm())
    assert 0 < errors[True] < max(1.5 * errors[False], 0.01 * size)


def test_the_pass_is_lean_only_where_it_is_known_to_be_right(tmp_path):
    policy = tiny_policy("llama", tmp_path)
    packed, seen = Packed(batch_of(PROMPTS, COMPLETIONS, PROMPT_OF)), []
    handle = policy.model.base_model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    own = packed_hidden(policy.split, packed)
    handle.remove()
    assert seen == [1]
    packed_hidden(policy.split, packed)
    assert seen == [1]
    policy.model.base_model.layers[0].mlp.act_fn = torch.nn.GELU()
    assert not torch.allclose(packed_hidden(policy.split, packed), own)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_estimate_of_a_tokens_memory(mixed):
    policy = Policy(fresh=FreshModel(layers=4, width=256))
    batch = batch_of([[5] * 40], [[7] * 60] * 6, [0] * 6)
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    packed = Packed(batch)
    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        hidden = packed_hidden(policy.split, packed)
    assert hidden.requires_grad
    share = sum(kept.values()) / packed.ids.numel() / activation_bytes(policy)
    assert (0.5 if mixed else 0.7) < share < 1.3  # an upper bound for mixed precision


def test_micro_batches_of_a_cpu_are_bounded_by_the_size_of_the_weights(monkeypatch):
    policy = Policy(fresh=FreshModel())
    monkeypatch.setattr("apportion.modules.memory.total_memory", lambda device: 2**50)
    monkeypatch.setattr("apportion.modules.memory.LARGEST", 2**40)
    cpu = resolve_micro_batch_tokens(policy, torch.device("cpu"))
    gpu = resolve_micro_batch_tokens(policy, torch.device("cuda"))
    assert cpu == SMALL // activation_bytes(policy)
    assert gpu == int(0.1 * 2**50 // activation_bytes(policy))
    policy.gradient_checkpointing = True
    assert resolve_micro_batch_tokens(policy, torch.device("cpu")) > 2 * cpu


def test_the_estimate_for_other_models(tmp_path):
    policy = tiny_policy("gpt2", tmp_path)
    width, layers = policy.model.config.hidden_size, policy.model.config.num_hidden_layers
    assert activation_bytes(policy) == 8 * 40 * width * layers


def test_a_table_and_back():
    tokens = torch.arange(7.0)[:, None, None]
    table = Table(torch.tensor([2, 0, 4, 1]), torch.tensor([3, 1, 0, 2, 6, 5, 4]))
    rows = table.rows(tokens, zeros=True)
    assert rows.flatten(1).tolist() == [[3, 1, 0, 0], [0, 0, 0, 0], [0, 2, 6, 5], [4, 0, 0, 0]]
    assert torch.equal(table.tokens(rows), tokens)
    assert CONFIGS.keys() >= set(LEAN)


def test_autocast_around_the_backward_pass_changes_nothing(tmp_path):
    policy = tiny_policy("qwen3", tmp_path, "float32")
    batch = batch_of(PROMPTS, COMPLETIONS, PROMPT_OF)
    found = []
    for around in (False, True):
        policy.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = policy.score(batch).logp.sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    assert torch.equal(*found)
