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

    keys, values: by layer, (P, H, D, Lp) and (P, H, Lp, Dv), as precise as `kept_dtype` says. layers: what each said of
    its attention.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = query.to(value.dtype), key.to(value.dtype)  # rotary positions leave fp32 under autocast
        self.layers[layer.index] = layer
        kept = kept_dtype(value.dtype, value.device)
        self.keys[layer.index] = key.to(kept).transpose(2, 3).contiguous()
        self.values[layer.index] = value.to(kept).contiguous()
        return causal(layer, query, key, value).transpose(1, 2)


def kept_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of the keys and values that a decoding pass reads: fp32 in place of 16 bits on a CPU, where many small products
    of 16-bit numbers take about twice as long."""
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


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


class Continuation:
    """Decoding: one new token a row, which sees its prompt, kept once, and its completion so far, kept in place.

    Args:
        prefill: the pass over the P prompts.
        lengths: (P,) long, tokens of each prompt without padding.
        prompt_of: (B,) long, the prompt that each row continues.
        tokens: the most tokens that a row may get.
    """

    def __init__(self, prefill: Prefill, lengths: Tensor, prompt_of: Tensor, tokens: int) -> None:
        self.prefill = prefill
        self.dtype = next(iter(prefill.keys.values())).dtype
        self.lengths = lengths
        self.tokens = tokens
        self.length = 0  # tokens of every row that a pass was made for, or is being made for
        self._rows = len(prompt_of)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._masks: dict[int | None, Tensor] = {}
        self._arrange(prompt_of)

    def next_token(self, prompt_of: Tensor) -> Tensor:
        """(n, 1) positions of the rows' next token, which the coming pass is about."""
        self._masks = {}
        self.length += 1
        return (self.lengths[prompt_of] + self.length - 1)[:, None]

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast(value.device.type, enabled=False):
            return self._attend(layer, query, key, value)

    def _attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, _, width = query.shape
        kv, grouped = key.shape[1], heads // key.shape[1]
        prompt_keys, prompt_values = self.prefill.keys[layer.index], self.prefill.values[layer.index]
        prompts, longest, deep = len(prompt_keys), prompt_keys.shape[-1], value.shape[-1]
        own_keys, own_values = self._append(layer.index, key, value)
        if layer.window is not None:
            start = max(0, own_values.shape[2] - layer.window)
            own_keys, own_values = own_keys[:, :, start:], own_values[:, :, start:]

        queries = query.to(prompt_keys.dtype).reshape(rows, kv, grouped, width)
        scores = self._scores(layer, self._by_prompt(queries), prompt_keys.flatten(0, 1), self._mask(layer))
        scores = self._by_row(scores, kv, grouped)  # (n, H, G, Lp)
        own = self._scores(layer, queries.flatten(0, 1), own_keys.flatten(0, 1).transpose(1, 2), None)
        weights = torch.cat([scores, own.view(rows, kv, grouped, -1)], -1).softmax(-1)

        output = self._by_prompt(weights[..., :longest]) @ prompt_values.view(prompts * kv, longest, deep)
        output = self._by_row(output, kv, grouped).reshape(rows * kv, grouped, deep)
        output = torch.baddbmm(output, weights[..., longest:].flatten(0, 1), own_values.flatten(0, 1))
        return output.view(rows, 1, heads, deep).to(value.dtype)

    @staticmethod
    def _scores(layer: Layer, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """(B, L, S) from query (B, L, D), key (B, D, S) and a mask (B, 1, S) to add."""
        if layer.cap is None and mask is not None:
            return torch.baddbmm(mask, query, key, alpha=layer.scaling)
        scores = capped(query * layer.scaling @ key, layer.cap)
        return scores if mask is None else scores + mask

    def advance(self, alive: Tensor, prompt_of: Tensor) -> Tensor:
        """Close the step and go on with the rows that are `alive` (n,) bool: (m,) long, where each of the m rows of the
        next step was. The places of finished rows are taken by the last ones, so that little is copied."""
        rows = torch.arange(len(alive), device=alive.device)
        count = int(alive.sum())
        if count < len(alive):
            holes, movers = rows[:count][~alive[:count]], rows[count:][alive[count:]]
            for kept in (*self._keys.values(), *self._values.values()):
                kept[holes, :, : self.length] = kept[movers, :, : self.length]
            rows = rows[:count].clone()
            rows[holes] = movers
            self._arrange(prompt_of[rows])
        return rows

    # ---- keys and values of the completions ----------------------------------------------------------------------

    def _append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(n, H, t + 1, D) each: those of all tokens of the completions, the new one included."""
        rows, at = len(key), self.length - 1
        if layer not in self._keys:
            for kept, new in ((self._keys, key), (self._values, value)):
                kept[layer] = new.new_empty(self._rows, new.shape[1], self.tokens, new.shape[3], dtype=self.dtype)
        self._keys[layer][:rows, :, at] = key[:, :, 0]
        self._values[layer][:rows, :, at] = value[:, :, 0]
        return self._keys[layer][:rows, :, : at + 1], self._values[layer][:rows, :, : at + 1]

    def _mask(self, layer: Layer) -> Tensor:
        """(P H, 1, Lp) to add to scores of prompt tokens: -inf on padding, and on what the window leaves behind."""
        if layer.window not in self._masks:
            keys = self.prefill.keys[layer.index]
            position = torch.arange(keys.shape[3], device=keys.device)
            lengths = self.lengths[:, None]
            seen = visible(lengths + self.length - 1, position, layer.window).squeeze(1) & (position < lengths)
            self._masks[layer.window] = additive(seen, keys.dtype).repeat_interleave(keys.shape[1], 0)[:, None]
        return self._masks[layer.window]

    # ---- rows beside their prompts -------------------------------------------------------------------------------

    def _arrange(self, prompt_of: Tensor) -> None:
        """Where the rows lie in a grid with one line a prompt, as long as the longest."""
        prompts = len(self.lengths)
        order = torch.argsort(prompt_of, stable=True)
        counts = torch.bincount(prompt_of, minlength=prompts)
        self._columns = int(counts.max())
        column = torch.empty_like(order)
        column[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[prompt_of[order]]
        self._place = prompt_of * self._columns + column  # (n,)
        self._row_at = torch.zeros(prompts * self._columns, dtype=torch.long, device=order.device)
        self._row_at[self._place] = torch.arange(len(order), device=order.device)
        self._full = torch.equal(self._place, torch.arange(len(self._row_at), device=order.device))

    def _by_prompt(self, values: Tensor) -> Tensor:
        """(P H, R G, X) from (n, H, G, X); what stands where a prompt has fewer rows is never read."""
        _, kv, grouped, size = values.shape
        if not self._full:
            values = values[self._row_at]
        return (
            values.view(-1, self._columns, kv, grouped, size).transpose(1, 2).reshape(-1, self._columns * grouped, size)
        )

    def _by_row(self, values: Tensor, kv: int, grouped: int) -> Tensor:
        """(n, H, G, X) from (P H, R G, X)."""
        values = values.view(-1, kv, self._columns, grouped, values.shape[-1]).transpose(1, 2).flatten(0, 1)
        return values if self._full else values[self._place]
