"""How many tokens fit into one forward and backward pass. Resolved once, at the start of a run."""

import os
from typing import Any

import torch

LARGEST = 32_768
SHARE_OF_MEMORY = 0.1  # of the machine's; small micro-batches are faster on a CPU anyway, and others live here too


def resolve_micro_batch_tokens(policy: Any) -> int:
    """Tokens in one micro-batch: from a tenth of the memory and an estimate of the bytes that a token costs.

    The estimate [ours]: about 40 activations of the model's width a layer (two, the layer's in- and output, with
    gradient checkpointing). Logits are made a run of tokens at a time and cost the same whatever the micro-batch.
    """
    config = policy.model.config
    layers, width = config.num_hidden_layers, config.hidden_size
    activations = 2 if policy.gradient_checkpointing else 40
    bytes_per_token = 4 * activations * layers * width
    return int(max(1, min(LARGEST, SHARE_OF_MEMORY * total_memory(policy.device) // bytes_per_token)))


def total_memory(device: torch.device) -> int:
    """Bytes of the machine, or of the GPU that `device` is."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
