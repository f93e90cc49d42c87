"""One token a row through a Llama-like model, in as few operations as its numbers need.

The model's own modules say the same in three times as many steps, whose start costs more than what they compute when a
step has few rows. Which models are known is a list of layer classes; `shared_prompts` checks the numbers of each model.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .continuation import Continuation
from .memory import total_memory
from .sharding import own_class

# Pre-norm layers: rotary positions, grouped-query attention, a gated feed-forward part, plain residual sums.
KNOWN_LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
SHARE_OF_MEMORY = 0.2  # the most of the machine's that the copy of the weights may take


def why_not_lean(model: Any) -> str | None:
    """None if a `LeanDecoder` can be made of a transformers model, else the reason why not."""
    body = model.base_model
    layers = getattr(body, "layers", None) or [body]
    unknown = {own_class(layer).__name__ for layer in layers} - KNOWN_LAYERS
    if unknown:
        return f"its layers are of type {', '.join(sorted(unknown))}"
    for name, module in body.named_modules():
        if name.endswith("_proj") and type(module) is not nn.Linear:
            return f"its {name} is a {type(module).__name__}"
        hooks = max(len(module._forward_hooks), len(module._forward_pre_hooks))
        if hooks > isinstance(module, FSDPModule) or "forward" in vars(module):  # that has one of its own
            return f"its {name or 'body'} has hooks"
    weights = [weight for layer in layers for weight in layer.parameters()]
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    if size > SHARE_OF_MEMORY * total_memory(weights[0].device):
        return f"a copy of its weights takes {size / 2**30:.1f} GiB, too much of the memory"
    return None


class LeanDecoder:
    """The decoding pass of a model's body, for as long as its weights do not change.

    Weights that are applied to the same input are copied to lie in one matrix, in the precision of the pass (autocast's
    where that is on). The copy takes as much memory as the gradients, which are not there while a policy samples.

    Args:
        rows: how many rows most passes will have.
    """

    def __init__(self, model: Any, rows: int) -> None:
        body = model.base_model
        self.device = next(body.parameters()).device.type
        mixed = torch.is_autocast_enabled(self.device)
        dtype = torch.get_autocast_dtype(self.device) if mixed else model.dtype
        self.embed, self.rotary, self.norm = body.embed_tokens, body.rotary_emb, body.norm
        self.layers = [_LeanLayer(layer, dtype, rows) for layer in body.layers]

    def step(self, token: Tensor, positions: Tensor, pattern: Continuation) -> Tensor:
        """(n, d) final hidden states of tokens (n,) at positions (n, 1)."""
        with torch.autocast(self.device, enabled=False):
            hidden = self.embed(token)
            cos, sin = self.rotary(hidden[:, None], positions)  # (n, 1, D) each
            half = cos.shape[-1] // 2
            signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
            for layer in self.layers:
                hidden = layer.step(hidden, cos, signed, pattern)
            return self.norm(hidden)


class _LeanLayer:
    def __init__(self, layer: Any, dtype: torch.dtype, rows: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before_attention, self.before_mlp = layer.input_layernorm, layer.post_attention_layernorm
        self.query_norm, self.key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.index, self.width, self.activation = attention.layer_idx, attention.head_dim, mlp.act_fn
        self.heads = attention.q_proj.out_features // self.width
        self.turned = self.heads + attention.k_proj.out_features // self.width
        self.inputs = _Linear([attention.q_proj, attention.k_proj, attention.v_proj], dtype, rows)
        self.output = _Linear([attention.o_proj], dtype, rows)
        self.gates = _Linear([mlp.gate_proj, mlp.up_proj], dtype, rows)
        self.down = _Linear([mlp.down_proj], dtype, rows)

    def step(self, hidden: Tensor, cos: Tensor, sin: Tensor, pattern: Continuation) -> Tensor:
        heads = self.inputs(self.before_attention(hidden)).view(len(hidden), -1, self.width)
        turned, value = heads[:, : self.turned], heads[:, self.turned :]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = turned[:, : self.heads], turned[:, self.heads :]
            turned = torch.cat([self.query_norm(query), self.key_norm(key)], 1)
        turned = _rotated(turned, cos, sin).to(value.dtype)[:, :, None]
        layer = pattern.prefill.layers[self.index]
        seen = pattern.attend(layer, turned[:, : self.heads], turned[:, self.heads :], value[:, :, None])
        hidden = hidden + self.output(seen.flatten(1))
        gate, up = self.gates(self.before_mlp(hidden)).chunk(2, -1)
        return hidden + self.down(self.activation(gate).mul_(up))


class _Linear:
    """Linear layers of one input, as one; on a CPU with its weights laid out as oneDNN reads them, once and not in
    every pass."""

    def __init__(self, linears: list[nn.Linear], dtype: torch.dtype, rows: int) -> None:
        self.dtype = dtype
        self.weight = torch.cat([linear.weight.to(dtype) for linear in linears])
        self.bias = None if linears[0].bias is None else torch.cat([linear.bias.to(dtype) for linear in linears])
        self.laid_out = self.weight.device.type == "cpu" and dtype in _laid_out_dtypes()
        if self.laid_out:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, rows)

    def __call__(self, inputs: Tensor) -> Tensor:
        inputs = inputs.to(self.dtype)
        if self.laid_out:
            return torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        return F.linear(inputs, self.weight, self.bias)


def _laid_out_dtypes() -> list[torch.dtype]:
    """Those that this machine's oneDNN multiplies; the operations are those that torch.compile uses."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return []
    return [torch.float32] + [torch.bfloat16] * torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _rotated(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """(n, H, D) turned to their positions: x cos + (x's halves swapped) sin, the first half's sin negated."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), signed_sin)
