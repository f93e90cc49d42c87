"""How many tokens fit into one forward and backward pass. Resolved once, at the start of a run."""

import os
from typing import Any

import torch

from .lean_pass import unlike_llama

LARGEST = 32_768
SHARE_OF_MEMORY = 0.1  # of the machine's: others live here too
SMALL = 2**29  # bytes; on a CPU more activations than this, or than the weights take, make nothing faster


def resolve_micro_batch_tokens(policy: Any, device: torch.device) -> int:
    """Tokens in one micro-batch: as many as have their activations in a tenth of the device's memory, and on a CPU in
    `SMALL` or the size of the weights. Logits are made a run of tokens at a time and cost the same whatever the
    micro-batch."""
    budget = SHARE_OF_MEMORY * total_memory(device)
    if device.type == "cpu":
        budget = min(budget, max(SMALL, sum(p.numel() * p.element_size() for p in policy.parameters())))
    return int(max(1, min(LARGEST, budget // activation_bytes(policy))))


def activation_bytes(policy: Any) -> int:
    """What the backward pass of one token needs of its forward pass [ours], logits left out.

    Numbers a layer: with gradient checkpointing what goes into it; else, in a lean pass, what `lean_pass` keeps; else
    about 40 times the model's width, an estimate from models of several kinds.
    """
    config = policy.model.config.get_text_config()
    width = config.hidden_size
    if policy.gradient_checkpointing:
        numbers = 2 * width
    elif policy.scoring == "packed" and policy.split.lean and unlike_llama(policy.model) is None:
        attention, mlp = policy.model.base_model.layers[0].self_attn, policy.model.base_model.layers[0].mlp
        queries, keys = attention.q_proj.out_features, attention.k_proj.out_features
        numbers = 2 * width + 2 * queries + 2 * keys + 2 * mlp.gate_proj.out_features
    else:
        numbers = 40 * width
    return policy.model.dtype.itemsize * config.num_hidden_layers * numbers


def total_memory(device: torch.device) -> int:
    """Bytes of the machine, or of the GPU that `device` is."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
