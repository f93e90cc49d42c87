"""Random models of several kinds, as folders that a policy loads like any other; and batches of given token ids."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from apportion.data.batch import RolloutBatch
from apportion.modules.fresh import character_tokenizer
from apportion.modules.policy import Policy

SHAPE = {
    "vocab_size": 99,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
GEMMA = {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "llama_tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen2_window": lambda: Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=12),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None),
    "mistral_window": lambda: MistralConfig(**SHAPE, sliding_window=4),
    "phi3": lambda: Phi3Config(**SHAPE),
    "olmo2": lambda: Olmo2Config(**SHAPE),
    "gpt2": lambda: GPT2Config(
        vocab_size=99, n_embd=16, n_layer=2, n_head=2, n_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=1
    ),
    "neox": lambda: GPTNeoXConfig(**SHAPE),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, **GEMMA, final_logit_softcapping=1.5),
    "granite": lambda: GraniteConfig(**SHAPE, logits_scaling=0.25),
    "cohere": lambda: CohereConfig(**SHAPE, logit_scale=3.0),
}
EXPERTS = {"head_dim": 8, "num_experts_per_tok": 1}
CANNOT_SHARE: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma2": lambda: Gemma2Config(**SHAPE, **GEMMA, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
    "gpt_oss": lambda: GptOssConfig(**SHAPE, **EXPERTS, num_local_experts=2, sliding_window=4),
    "qwen3_next": lambda: Qwen3NextConfig(**SHAPE, **EXPERTS, num_experts=2, moe_intermediate_size=24),
    "falcon_h1": lambda: FalconH1Config(**SHAPE, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4),
}
ONLY_EAGER = {"gemma2", "gpt_oss"}  # transformers has only its own code for their attention


def save(config: PreTrainedConfig, folder: Path) -> str:
    """A model with larger weights than a fresh one's, so that its distributions differ from the uniform one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.3 * torch.randn(weight.shape))
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)


def tiny_policy(kind: str, folder: Path, dtype: str = "float64", **options) -> Policy:
    options = {"attention": "eager"} | options if kind in ONLY_EAGER else options
    place = save((CONFIGS | CANNOT_SHARE)[kind](), folder)
    policy = Policy(place, dtype=dtype, max_completion_tokens=12, **options)
    if dtype == "float64":
        exact_norms(policy.model)
    return policy


def batch_of(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], prompt_of, pad=0) -> RolloutBatch:
    """Completions (token ids) of prompts, padded, with one more column than is needed on each side."""
    n, lp, t = len(completions), max(map(len, prompts)) + 1, max(map(len, completions)) + 1
    prompt_ids, prompt_mask = torch.full((len(prompts), lp), pad), torch.zeros(len(prompts), lp, dtype=torch.bool)
    ids, mask = torch.full((n, t), pad), torch.zeros(n, t, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        prompt_ids[row, lp - len(prompt) :] = torch.tensor(prompt)
        prompt_mask[row, lp - len(prompt) :] = True
    for row, completion in enumerate(completions):
        ids[row, : len(completion)] = torch.tensor(completion, dtype=torch.long)
        mask[row, : len(completion)] = True
    return RolloutBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        prompt_id=torch.arange(len(prompts)),
        prompt_index=torch.tensor(prompt_of),
        group=torch.tensor(prompt_of),
        completion_ids=ids,
        completion_mask=mask,
        action_mask=mask,
        reward=torch.zeros(n),
        reward_valid=torch.ones(n, dtype=torch.bool),
        truncated=torch.zeros(n, dtype=torch.bool),
        in_loss=torch.ones(n, dtype=torch.bool),
        policy_version=torch.zeros(n, dtype=torch.long),
    )


class ExactRMSNorm(nn.Module):
    weight: nn.Parameter
    offset: float
    epsilon: float

    def forward(self, x):
        return (self.offset + self.weight) * x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()


class ExactLayerNorm(nn.Module):
    weight: nn.Parameter
    epsilon: float

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return self.weight * centred * (centred.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()


def exact_norms(model) -> None:
    """transformers normalises in float32 whatever the dtype, and its backward pass rounds there. For comparisons in
    float64 the same norms, in float64."""
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") or kind == "CohereLayerNorm":
            module.offset = 1.0 if kind.startswith("Gemma") else 0.0
            module.epsilon = getattr(module, "variance_epsilon", None) or getattr(module, "eps", 0.0)
            module.__class__ = ExactRMSNorm if kind.endswith("RMSNorm") else ExactLayerNorm
