"""The attention of a packed pass on a CPU: nothing is copied for a completion that its prompt has already."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
SHORT = 128  # keys; over so few the backward pass in bf16 takes up to five times as long as in fp32


class Table:
    """Tokens in rows that are padded to the longest, and back.

    Args:
        lengths: (K,) long, tokens of each row.
        order: (n,) long, the tokens row by row; as they are unless given. n = the sum of lengths.
    """

    def __init__(self, lengths: Tensor, order: Tensor | None = None) -> None:
        self.longest = int(lengths.max()) if len(lengths) else 0
        self.shape = (len(lengths), self.longest)
        column = torch.arange(self.longest, device=lengths.device)
        used = column < lengths[:, None]
        self.plain = bool(used.all()) and order is None
        places = ((lengths.cumsum(0) - lengths)[:, None] + column).where(used, 0).flatten()  # padding: any token
        self.unused = None if self.plain else ~used[..., None, None]
        self.places = places if order is None or not len(order) else order[places]
        back = used.flatten().nonzero().squeeze(1)
        self.back = back if order is None else back[order.argsort()]

    def rows(self, tokens: Tensor, zeros: bool = False) -> Tensor:
        """(K, L, H, X) from (n, H, X). Padding is 0, or, unless `zeros`, any token's."""
        rows = (tokens if self.plain else tokens.index_select(0, self.places)).unflatten(0, self.shape)
        return rows.masked_fill_(self.unused, 0.0) if zeros and self.unused is not None else rows

    def tokens(self, rows: Tensor) -> Tensor:
        """The reverse."""
        flat = rows.flatten(0, 1)
        return flat if self.plain else flat.index_select(0, self.back)


@dataclass
class Part:
    """Queries and the keys that they see: all of their own row of keys, or, if `causal`, of a row that is theirs too
    those up to themselves. A token is a row of S; heads of queries are Hq = H * G, of keys H.

    queries, keys: which of the pass's tokens (a slice of S), and how they stand in rows.
    mask: (K, 1, 1, L) to add to scores; None: no key is padding that a query could see.
    """

    queries: slice
    query_table: Table
    keys: slice
    key_table: Table
    causal: bool
    mask: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """(n, Hq, D), and log-sum-exp of the scores (n, Hq), of the part's n queries."""
        group = query.shape[1] // key.shape[1]
        keys, values = self._keys(key, group), self._keys(value, group)
        output, size = FLASH(
            self._queries(query, group), keys, values, is_causal=self.causal, attn_mask=self._mask(keys), scale=scaling
        )
        return self._tokens(output, group), self._tokens(size[..., None], group).squeeze(-1)

    def backward(
        self, above: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, size: Tensor, scaling: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What queries (n, Hq, D), and keys and values (m, H, D) get through this part, from output and log-sum-exp of
        all parts together: a share of a softmax has the same derivative, whoever has the other shares."""
        group = query.shape[1] // key.shape[1]
        exact = size.dtype if self.key_table.longest <= SHORT else query.dtype
        above = self._queries(above, group, zeros=True).to(exact)
        query, output = (self._queries(tensor, group).to(exact) for tensor in (query, output))
        key, value = (self._keys(tensor, group).to(exact) for tensor in (key, value))
        size = self._queries(size[..., None], group).squeeze(-1).contiguous()
        to_query, *to_keys = FLASH_BACKWARD(
            above, query, key, value, output, size, 0.0, self.causal, attn_mask=self._mask(key), scale=scaling
        )
        to_key, to_value = (self._key_tokens(gradient, group) for gradient in to_keys)
        return self._tokens(to_query, group), to_key, to_value

    def _queries(self, tokens: Tensor, group: int, zeros: bool = False) -> Tensor:
        """(K, Hq, L, X), or (K, H, L * G, X) where keys are not the queries' own, from (S, Hq, X)."""
        rows = self.query_table.rows(tokens[self.queries], zeros)
        if self.causal or group == 1:
            return rows.transpose(1, 2)
        return rows.unflatten(2, (-1, group)).transpose(1, 2).flatten(2, 3)

    def _tokens(self, rows: Tensor, group: int) -> Tensor:
        """The reverse."""
        if self.causal or group == 1:
            return self.query_table.tokens(rows.transpose(1, 2))
        return self.query_table.tokens(rows.unflatten(2, (-1, group)).transpose(1, 2).flatten(2, 3))

    def _keys(self, tokens: Tensor, group: int) -> Tensor:
        rows = self.key_table.rows(tokens[self.keys])
        return (rows.repeat_interleave(group, 2) if self.causal and group > 1 else rows).transpose(1, 2)

    def _key_tokens(self, rows: Tensor, group: int) -> Tensor:
        rows = rows.transpose(1, 2)
        return self.key_table.tokens(rows.unflatten(2, (-1, group)).sum(3) if self.causal and group > 1 else rows)

    def _mask(self, keys: Tensor) -> Tensor | None:
        return None if self.mask is None else self.mask.to(keys.dtype)


class PackedAttention(torch.autograd.Function):
    """(S, Hq, D) from query (S, Hq, D), key and value (S, H, D) of the tokens [prompts | completions]. What is kept for
    the backward pass is the tokens' own, without padding and without copies of prompts.

    Args:
        prompts: the part of the prompts, which see themselves.
        completions: the parts of the completions, which see their prompts and themselves: merged by log-sum-exp. Empty
            where no completion has a token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        prompts: Part,
        completions: tuple[Part, ...],
        scaling: float,
    ) -> Tensor:
        outputs, sizes = zip(prompts.forward(query, key, value, scaling), strict=True)
        if completions:
            before, own = (part.forward(query, key, value, scaling) for part in completions)
            share = torch.sigmoid(own[1] - before[1]).to(query.dtype)[..., None]
            outputs += (torch.lerp(before[0], own[0], share),)
            sizes += (torch.logaddexp(before[1], own[1]),)
        output, size = torch.cat(outputs), torch.cat(sizes)
        ctx.save_for_backward(query, key, value, output, size)
        ctx.parts, ctx.scaling = (prompts, *completions), scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        found = [part.backward(above, *saved, ctx.scaling) for part in ctx.parts]
        to_query, to_key, to_value = found[0]
        if len(found) > 1:
            before, own = found[1:]
            to_query = torch.cat([to_query, before[0].add_(own[0])])
            to_key, to_value = (torch.cat([found[0][i].add_(before[i]), own[i]]) for i in (1, 2))
        dtype = saved[0].dtype
        return to_query.to(dtype), to_key.to(dtype), to_value.to(dtype), None, None, None
