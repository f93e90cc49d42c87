"""A packed pass through a Llama-like model with gradients, in fewer operations and with less kept than its own modules.

What the backward pass needs is kept once: the residual sums, queries, keys and values, the attention's output, and gate
and up projections. Norms, activations and copies in 16 bits are made again. Which models are known is a list of layer
classes (`unlike_llama`); `shared_prompts` checks the numbers of each model.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers.activations import SiLUActivation

from .attention import Layer, Pattern
from .sharding import own_class
from .split_model import exact_backward, multiplied_in

# Pre-norm layers: rotary positions, grouped-query attention, a gated feed-forward part, plain residual sums.
KNOWN_LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})


def unlike_llama(model: Any) -> str | None:
    """None if `LeanDecoder` and `lean_pass` know what a transformers model's layers do, else the reason why not."""
    body = model.base_model
    layers = getattr(body, "layers", None) or [body]
    unknown = {own_class(layer).__name__ for layer in layers} - KNOWN_LAYERS
    if unknown:
        return f"its layers are of type {', '.join(sorted(unknown))}"
    for name, module in body.named_modules():
        if name.endswith("_proj") and type(module) is not nn.Linear:
            return f"its {name} is a {type(module).__name__}"
        if ".mlp." in name and getattr(module, "bias", None) is not None:
            return f"its {name} has a bias"
        if name.endswith("act_fn") and type(module) not in (nn.SiLU, SiLUActivation):
            return f"its activation is {type(module).__name__}"
        hooks = max(len(module._forward_hooks), len(module._forward_pre_hooks))
        if hooks > isinstance(module, FSDPModule) or "forward" in vars(module):  # that has one of its own
            return f"its {name or 'body'} has hooks"
    return None


def lean_pass(
    model: Any, layers: dict[int, Layer], ids: Tensor, positions: Tensor, pattern: Pattern, recompute: bool
) -> Tensor:
    """(S, d) final hidden states of token ids (S,) at positions (S,) that attend by a pattern.

    Args:
        layers: what each layer says of its attention.
        recompute: keep the residual sums only (gradient checkpointing).
    """
    body = model.base_model
    dtype = multiplied_in(body.embed_tokens.weight)
    with torch.autocast(ids.device.type, enabled=False):
        embedding, tied = body.embed_tokens, model.get_output_embeddings().weight is body.embed_tokens.weight
        # rows of a gradient are added to the one of the output layer, which is dense
        hidden = F.embedding(ids, embedding.weight, embedding.padding_idx, sparse=tied)
        cos, sin = (half[0, :, None] for half in body.rotary_emb(hidden[None], positions[None]))  # (S, 1, D) each
        half = cos.shape[-1] // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        for layer in body.layers:
            arguments = (layer, layers[layer.self_attn.layer_idx], hidden, cos, signed, pattern, dtype)
            hidden = checkpoint(_layer, *arguments, use_reentrant=False) if recompute else _layer(*arguments)
        return _Normed.apply(hidden, body.norm.weight, body.norm.variance_epsilon)


def _layer(
    layer: Any, info: Layer, hidden: Tensor, cos: Tensor, sin: Tensor, pattern: Pattern, dtype: torch.dtype
) -> Tensor:
    attention, mlp = layer.self_attn, layer.mlp
    norm = layer.input_layernorm
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    weights = [tensor for linear in linears for tensor in (linear.weight, linear.bias)]
    projected = _NormedLinears.apply(hidden, norm.weight, norm.variance_epsilon, dtype, *weights)
    query, key, value = (heads.unflatten(-1, (-1, attention.head_dim)) for heads in projected)
    if hasattr(attention, "q_norm"):
        query, key = (
            _Normed.apply(heads, norm.weight, norm.variance_epsilon)
            for heads, norm in ((query, attention.q_norm), (key, attention.k_norm))
        )
    query, key = (_Rotated.apply(heads, cos, sin) for heads in (query, key))
    query, key, value = (heads.transpose(0, 1)[None] for heads in (query, key, value))
    seen = pattern.attend(info, query, key, value)[0].flatten(1)
    hidden = _Onto.apply(hidden, seen, attention.o_proj.weight, attention.o_proj.bias, dtype)
    norm = layer.post_attention_layernorm
    return _GatedOnto.apply(
        hidden,
        norm.weight,
        norm.variance_epsilon,
        dtype,
        mlp.gate_proj.weight,
        mlp.up_proj.weight,
        mlp.down_proj.weight,
    )


class _Normed(torch.autograd.Function):
    """RMS norm of the last dimension: hidden / sqrt(mean(hidden^2) + eps) * scale, (..., d)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scale: Tensor, eps: float) -> Tensor:
        size = _inverse_size(hidden, eps)
        ctx.save_for_backward(hidden, scale, size)
        return _normed(hidden, size, scale)

    @staticmethod
    @exact_backward
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        hidden, scale, size = ctx.saved_tensors
        return *_through_norm(above, hidden, size, scale), None


class _NormedLinears(torch.autograd.Function):
    """Linear layers of the RMS norm of hidden (S, d): (S, o) each, in `dtype`.

    Args:
        weights: weight (o, d) and bias (o,) or None of each layer.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, scale: Tensor, eps: float, dtype: torch.dtype, *weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        size = _inverse_size(hidden, eps)
        inputs = _normed(hidden, size, scale).to(dtype)
        ctx.save_for_backward(hidden, scale, size, *weights)
        ctx.dtype = dtype
        return tuple(_linear(inputs, *pair) for pair in _pairs(weights))

    @staticmethod
    @exact_backward
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        hidden, scale, size, *weights = ctx.saved_tensors
        inputs = _normed(hidden, size, scale).to(ctx.dtype)
        gradients: list[Tensor | None] = []
        to_inputs: Any = None
        for gradient, (weight, bias) in zip(above, _pairs(weights), strict=True):
            to_inputs = _to_inputs(gradient, weight, to_inputs)
            gradients += _to_weights(gradient, inputs, weight, bias)
        return *_through_norm(to_inputs, hidden, size, scale), None, None, *gradients


class _Onto(torch.autograd.Function):
    """hidden (S, d) + the linear layer of inputs (S, e)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight, bias)
        return hidden + _linear(inputs.to(dtype), weight, bias)

    @staticmethod
    @exact_backward
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, bias = ctx.saved_tensors
        gradient = above.to(inputs.dtype)
        return above, _to_inputs(gradient, weight), *_to_weights(gradient, inputs, weight, bias), None


class _GatedOnto(torch.autograd.Function):
    """hidden (S, d) + down(silu(gate(x)) * up(x)) of its RMS norm x."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, scale: Tensor, eps: float, dtype: torch.dtype, gate: Tensor, up: Tensor, down: Tensor
    ) -> Tensor:
        size = _inverse_size(hidden, eps)
        inputs = _normed(hidden, size, scale).to(dtype)
        gated, upped = _linear(inputs, gate), _linear(inputs, up)
        ctx.save_for_backward(hidden, scale, size, gated, upped, gate, up, down)
        return hidden + _linear(F.silu(gated).mul_(upped), down)

    @staticmethod
    @exact_backward
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        hidden, scale, size, gated, upped, gate, up, down = ctx.saved_tensors
        inputs = _normed(hidden, size, scale).to(gated.dtype)
        gradient = above.to(gated.dtype)
        activated = F.silu(gated)
        to_product = _to_inputs(gradient, down)
        to_down = _to_weight(gradient, activated * upped, down)
        to_up = activated.mul_(to_product)
        to_gate = torch.ops.aten.silu_backward(to_product.mul_(upped), gated)
        to_inputs = _to_inputs(to_up, up, _to_inputs(to_gate, gate))
        to_hidden, to_scale = _through_norm(to_inputs, hidden, size, scale)
        return (
            to_hidden.add_(above),
            to_scale,
            None,
            None,
            _to_weight(to_gate, inputs, gate),
            _to_weight(to_up, inputs, up),
            to_down,
        )


class _Rotated(torch.autograd.Function):
    """Heads (S, H, D) turned to their positions, in their own dtype: x cos + (x's halves swapped) sin, the first half's
    sin negated."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, signed_sin)
        return _rotated(heads, cos, signed_sin)

    @staticmethod
    @exact_backward
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        cos, signed_sin = ctx.saved_tensors
        return _rotated(above, cos, -signed_sin), None, None


def _rotated(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cos, swapped, signed_sin).to(heads.dtype)


def _inverse_size(hidden: Tensor, eps: float) -> Tensor:
    """(..., 1), in fp32 at least."""
    exact = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return (torch.linalg.vecdot(exact, exact)[..., None] / hidden.shape[-1]).add_(eps).rsqrt_()


def _normed(hidden: Tensor, size: Tensor, scale: Tensor) -> Tensor:
    return (hidden * size).to(hidden.dtype).mul_(scale)


def _through_norm(above: Tensor, hidden: Tensor, size: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """What hidden (..., d) and scale (d,) get through their norm. With n = hidden * size and g = above * scale: hidden
    gets size * (g - n mean(g n)), scale the sum of above * n."""
    normed = hidden * size
    above = above.to(normed.dtype, copy=True)
    product = above * normed
    to_scale = product.flatten(0, -2).sum(0)
    mean = (product @ scale.to(product.dtype))[..., None].div_(hidden.shape[-1])
    to_hidden = above.mul_(scale).addcmul_(normed, mean, value=-1).mul_(size)
    return to_hidden.to(hidden.dtype), to_scale.to(scale.dtype)


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(inputs, weight.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))


def _to_inputs(gradient: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
    weight = weight.to(gradient.dtype)
    return gradient @ weight if onto is None else onto.addmm_(gradient, weight)


def _to_weight(gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor | None:
    return (gradient.T @ inputs).to(weight.dtype) if weight.requires_grad else None


def _to_weights(
    gradient: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    to_bias = None if bias is None or not bias.requires_grad else gradient.sum(0).to(bias.dtype)
    return _to_weight(gradient, inputs, weight), to_bias


def _pairs(weights: Any) -> list[tuple[Tensor, Tensor | None]]:
    return list(zip(weights[::2], weights[1::2], strict=True))
