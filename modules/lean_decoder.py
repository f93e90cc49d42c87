"""One token a row through a Llama-like model, in as few operations as its numbers need.

The model's own modules say the same in three times as many steps, whose start costs more than what they compute when a
step has few rows. Which models are known is a list of layer classes; `shared_prompts` checks the numbers of each model.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Continuation

# Pre-norm layers: rotary positions, grouped-query attention, a gated feed-forward part, plain residual sums.
KNOWN_LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})


def why_not_lean(model: Any) -> str | None:
    """None if a `LeanDecoder` can be made of a transformers model, else the reason why not."""
    body = model.base_model
    layers = getattr(body, "layers", None) or [body]
    unknown = {type(layer).__name__ for layer in layers} - KNOWN_LAYERS
    if unknown:
        return f"its layers are of type {', '.join(sorted(unknown))}"
    for name, module in body.named_modules():
        if name.endswith("_proj") and type(module) is not nn.Linear:
            return f"its {name} is a {type(module).__name__}"
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"its {name or 'body'} has hooks"
    return None


class LeanDecoder:
    """The decoding pass of a model's body, for as long as its weights do not change.

    Under autocast the weights of the projections are cast once, here, and not in every pass; otherwise they are the
    model's own.
    """

    def __init__(self, model: Any) -> None:
        body = model.base_model
        device = next(body.parameters()).device.type
        self.autocast_device = device
        mixed = torch.is_autocast_enabled(device)
        self.embed, self.rotary, self.norm = body.embed_tokens, body.rotary_emb, body.norm
        self.layers = [_LeanLayer(layer, torch.get_autocast_dtype(device) if mixed else None) for layer in body.layers]

    def step(self, token: Tensor, positions: Tensor, pattern: Continuation) -> Tensor:
        """(n, d) final hidden states of tokens (n,) at positions (n, 1)."""
        with torch.autocast(self.autocast_device, enabled=False):
            hidden = self.embed(token)
            cos, sin = self.rotary(hidden[:, None], positions)  # (n, 1, D) each
            half = cos.shape[-1] // 2
            signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
            for layer in self.layers:
                hidden = layer.step(hidden, cos, signed, pattern)
            return self.norm(hidden)


class _LeanLayer:
    def __init__(self, layer: Any, cast_to: torch.dtype | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before_attention, self.before_mlp = layer.input_layernorm, layer.post_attention_layernorm
        self.query_norm, self.key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.width, self.activation = attention.head_dim, mlp.act_fn
        self.index = attention.layer_idx
        self.dtype = cast_to or attention.q_proj.weight.dtype
        self.inputs = _projections([attention.q_proj, attention.k_proj, attention.v_proj], cast_to)
        self.output = _projections([attention.o_proj], cast_to)[0]
        self.gates = _projections([mlp.gate_proj, mlp.up_proj], cast_to)
        self.down = _projections([mlp.down_proj], cast_to)[0]
        self.heads = attention.q_proj.out_features // self.width
        self.sizes = [linear.out_features for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]

    def step(self, hidden: Tensor, cos: Tensor, sin: Tensor, pattern: Continuation) -> Tensor:
        rows = len(hidden)
        query, key, value = _applied(self.inputs, self.before_attention(hidden).to(self.dtype), self.sizes)
        query, key, value = (part.view(rows, -1, self.width) for part in (query, key, value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        heads = (_rotated(query, cos, sin), _rotated(key, cos, sin), value)
        seen = pattern.attend(pattern.prefill.layers[self.index], *(part[:, :, None] for part in heads))
        hidden = _added(hidden, seen.view(rows, -1), self.output)
        gate, up = _applied(self.gates, self.before_mlp(hidden).to(self.dtype), None)
        return _added(hidden, self.activation(gate).mul_(up), self.down)


Projection = tuple[Tensor, Tensor | None]


def _projections(linears: list[nn.Linear], cast_to: torch.dtype | None) -> list[Projection]:
    """(weight, bias) of each; of all together where they are copied anyway."""
    if cast_to is None:
        return [(linear.weight, linear.bias) for linear in linears]
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears]).to(cast_to)
    return [(torch.cat([linear.weight.to(cast_to) for linear in linears]), bias)]


def _applied(projections: list[Projection], inputs: Tensor, sizes: list[int] | None) -> Any:
    outputs = [F.linear(inputs, weight, bias) for weight, bias in projections]
    if len(outputs) > 1:
        return outputs
    return outputs[0].split(sizes, -1) if sizes else outputs[0].chunk(2, -1)


def _added(hidden: Tensor, inputs: Tensor, projection: Projection) -> Tensor:
    weight, bias = projection
    if bias is None and inputs.dtype == hidden.dtype:
        return torch.addmm(hidden, inputs, weight.t())
    return hidden + F.linear(inputs, weight, bias)


def _rotated(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """(n, H, D) turned to their positions: x cos + (x's halves swapped) sin, the first half's sin negated."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), signed_sin)
