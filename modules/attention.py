"""Attention of completions that share a prompt: a prompt is run once, whoever continues it.

transformers calls `attention` for every layer of a model that `use_shared_attention` prepared. A pass with a `pattern`
among its arguments attends as the pattern says; every other pass is transformers' own, unchanged.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PREFIX = "shared_prefix_"  # of the names under which transformers knows the wrapped implementations
# What a layer may hand over beside queries, keys and values. Anything else would change its result in ways not known
# here (attention sinks, biases, …): a pass with it is refused, never approximated.
KNOWN = frozenset({"scaling", "dropout", "sliding_window", "softcap", "position_ids", "use_cache", "is_causal"})
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class UnsupportedError(Exception):
    """A model does something in its attention that is not known here; the message says what."""


class Layer(NamedTuple):
    """What a layer says of its attention.

    index: of the layer. scaling: multiplies scores. window: a token sees so many positions, its own included; None =
    all before it. cap: scores are cap * tanh(score / cap); None = as they are.
    """

    index: int
    scaling: float
    window: int | None
    cap: float | None


class Pattern(Protocol):
    """Who attends to whom in one pass."""

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(B, L, Hq, Dv) from query (B, Hq, L, D), key (B, H, L, D) and value (B, H, L, Dv) of the pass's tokens."""
        ...


def use_shared_attention(model: Any) -> None:
    """Prepare a model whose attention is one of transformers' registered implementations (not "eager").

    Raises UnsupportedError where a pattern could not be right.
    """
    config = model.config.get_text_config()
    own = config._attn_implementation
    if own.startswith(PREFIX):
        return
    if own not in ALL_ATTENTION_FUNCTIONS:
        raise UnsupportedError(f"attention '{own}' is the model's own code")
    unknown = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if unknown:
        raise UnsupportedError(f"it has layers of type {', '.join(sorted(unknown))}")
    name = PREFIX + own
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _dispatching(ALL_ATTENTION_FUNCTIONS[own]))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
    model.set_attn_implementation(name)


def _dispatching(own: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        pattern: Pattern | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if pattern is None:
            return own(module, query, key, value, attention_mask, **options)
        unknown = {name for name, option in options.items() if option is not None} - KNOWN
        if unknown:
            raise UnsupportedError(f"its attention uses {', '.join(sorted(unknown))}")
        window = options.get("sliding_window")
        types = getattr(module.config, "layer_types", None)
        if types and types[module.layer_idx] == "sliding_attention" and window is None:
            raise UnsupportedError("its sliding layers do not say how long their window is")
        scaling = options.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer = Layer(module.layer_idx, scaling, window, options.get("softcap"))
        return pattern.attend(layer, query, key, value), None

    return attention


class Prefill:
    """The prompts' own pass: causal, and keys and values are kept. Prompts are padded on the right, where padding
    changes nothing that comes before it.

    keys, values: by layer, (P, H, Lp, D) and (P, H, Lp, Dv). layers: what each said of its attention.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = query.to(value.dtype), key.to(value.dtype)  # rotary positions leave fp32 under autocast
        self.layers[layer.index] = layer
        self.keys[layer.index], self.values[layer.index] = key.contiguous(), value.contiguous()
        return causal(layer, query, key, value).transpose(1, 2)


def causal(layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(B, Hq, L, Dv): attention of a sequence to itself, without padding on the left."""
    length, grouped = query.shape[2], query.shape[1] != key.shape[1]
    if layer.cap is None and (layer.window is None or layer.window >= length):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=layer.scaling, enable_gqa=grouped
        )
    position = torch.arange(length, device=query.device)
    mask = additive(visible(position, position, layer.window), query.dtype)
    return attend_under(mask[None], layer, query, key, value)


def attend_under(mask: Tensor, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(B, Hq, L, Dv): query (B, Hq, L, D), key (B, H, S, D), value (B, H, S, Dv), mask (B or 1, L, S) to add to scores.

    The query heads that share a key head lie one behind the other in the length, so that no key is repeated.
    """
    batch, heads, length, width = query.shape
    kv = key.shape[1]
    query = query.reshape(batch, kv, heads // kv * length, width)
    mask = mask.repeat(1, heads // kv, 1)[:, None]
    if layer.cap is None:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=layer.scaling)
    else:
        scores = capped(query @ key.transpose(-1, -2) * layer.scaling, layer.cap)
        output = (scores + mask).softmax(-1) @ value
    return output.reshape(batch, heads, length, value.shape[-1])


def visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """(..., L, S) bool: whether the token at position query (..., L) sees the one at position key (..., S)."""
    distance = query[..., :, None] - key[..., None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores: 0 where `seen`, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)


def capped(scores: Tensor, cap: float | None) -> Tensor:
    return scores if cap is None else torch.tanh(scores / cap) * cap
