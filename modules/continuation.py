"""Decoding: one new token a row, which sees its prompt, kept once, and its completion so far, kept in place."""

import torch
from torch import Tensor

from .attention import Layer, Prefill, additive, capped, visible

LINE = 4  # completions of one prompt whose keys lie together: few of them waste little, and a long block reads fast
WORTH_MOVING = 0.75  # finished completions are cleared away once the others need at most so much of the place


class Continuation:
    """The attention of decoding passes, in two parts that are merged by their log-sum-exp: to the prompts, and to the
    completions so far.

    The rows of one prompt are one sequence of queries to its keys and values. For the other part, up to `LINE` rows of
    one prompt share a line of keys and values, in which a step writes one block; a mask keeps the rows apart.

    Args:
        prefill: the pass over the P prompts.
        lengths: (P,) long, tokens of each prompt without padding.
        prompt_of: (B,) long, the prompt that each row continues.
        tokens: the most tokens that a row may get.
    """

    def __init__(self, prefill: Prefill, lengths: Tensor, prompt_of: Tensor, tokens: int) -> None:
        self.prefill = prefill
        self.lengths = lengths
        self.tokens = tokens
        self.length = 0  # tokens of every row that a pass was made for, or is being made for
        self._keys: dict[int, Tensor] = {}  # by layer, (lines, H, tokens * width of a line, D)
        self._values: dict[int, Tensor] = {}
        self._masks: dict[tuple[int | None, torch.dtype], tuple[Tensor | None, Tensor | None]] = {}
        self._by_prompt, self._by_line = _beside_prompts(prompt_of, len(lengths)), _in_lines(prompt_of)

    def next_token(self, prompt_of: Tensor) -> Tensor:
        """(n, 1) positions of the rows' next token, which the coming pass is about."""
        self._masks = {}
        self.length += 1
        return (self.lengths[prompt_of] + self.length - 1)[:, None]

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Pattern.attend`; L = 1."""
        if torch.is_autocast_enabled(value.device.type):
            with torch.autocast(value.device.type, enabled=False):
                return self.attend(layer, query.to(value.dtype), key.to(value.dtype), value)  # rotated in fp32
        rows, kv = key.shape[:2]
        queries = query.reshape(rows, kv, -1, query.shape[-1])
        prompt, prompt_size = self._to_prompts(layer, queries)
        own, own_size = self._to_completions(layer, queries, key, value)
        share = torch.sigmoid(prompt_size - own_size).to(own.dtype)[..., None]
        return torch.lerp(own, prompt, share).transpose(1, 2).reshape(rows, 1, query.shape[1], -1)

    def _to_prompts(self, layer: Layer, queries: Tensor) -> tuple[Tensor, Tensor]:
        """See `_Table.rows`, of queries (n, H, G, D)."""
        keys, values = self.prefill.keys[layer.index], self.prefill.values[layer.index]
        mask, unseen = self._prompt_mask(layer.window, queries.dtype)
        output, size = _attend(layer, self._by_prompt.table(queries), keys, values, mask)
        if unseen is not None:
            size = size.masked_fill(unseen, -torch.inf)
        return self._by_prompt.rows(output, size)

    def _to_completions(self, layer: Layer, queries: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `_Table.rows`, of queries (n, H, G, D) and the new token's key and value (n, H, 1, D)."""
        table, width = self._by_line, self._by_line.columns
        start = 0 if layer.window is None else max(0, self.length - layer.window) * width
        length = self.length * width - start
        for kept, new in ((self._keys, key), (self._values, value)):
            if layer.index not in kept:
                kept[layer.index] = new.new_empty(table.lines, new.shape[1], self.tokens * width, new.shape[3])
            place = kept[layer.index].narrow(2, (self.length - 1) * width, width)
            place.copy_(table.lined_up(new.squeeze(2)))
        keys, values = (kept[layer.index].narrow(2, start, length) for kept in (self._keys, self._values))
        mask = table.apart(queries.shape[2], self.tokens, queries.dtype)
        mask = None if mask is None else mask.narrow(3, 0, length)
        return table.rows(*_attend(layer, table.table(queries), keys, values, mask))

    def _prompt_mask(self, window: int | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """(P, 1, 1, Lp) to add to scores of prompt tokens, which is -inf on padding and on what the window leaves
        behind; and (P, 1, 1), which prompts are wholly out of sight. None: nothing is."""
        if (window, dtype) not in self._masks:
            position = torch.arange(next(iter(self.prefill.keys.values())).shape[2], device=self.lengths.device)
            lengths = self.lengths[:, None]
            seen = visible(lengths + self.length - 1, position, window).squeeze(1) & (position < lengths)
            unseen = ~seen.any(1)
            self._masks[window, dtype] = (
                None if seen.all() else additive(seen | unseen[:, None], dtype)[:, None, None],
                unseen[:, None, None] if unseen.any() else None,
            )
        return self._masks[window, dtype]

    def advance(self, alive: Tensor, prompt_of: Tensor) -> Tensor:
        """Close the step and go on with the rows that are `alive` (n,) bool: (m,) long, where each of the m rows of the
        next step was, in their order. What finished rows have kept is cleared away now and then, so that little is
        copied."""
        rows = alive.nonzero().squeeze(1)
        if len(rows) < len(alive) and len(rows):
            before, prompt_of = self._by_line.place[rows], prompt_of[rows]
            self._by_prompt, fresh = _beside_prompts(prompt_of, len(self.lengths)), _in_lines(prompt_of)
            if fresh.lines * fresh.columns <= WORTH_MOVING * self._by_line.lines * self._by_line.columns:
                for kept in (self._keys, self._values):
                    for layer, tensor in kept.items():
                        kept[layer] = self._moved(tensor, before, fresh)
                self._by_line = fresh
            else:
                self._by_line = _Table(before, self._by_line.lines, self._by_line.columns)
        return rows

    def _moved(self, kept: Tensor, before: Tensor, fresh: "_Table") -> Tensor:
        """What the rows at places `before` (m,) have kept, as a table `fresh` has it."""
        columns = self._by_line.columns
        by_row = kept.unflatten(2, (self.tokens, columns))[:, :, : self.length].permute(0, 3, 1, 2, 4)
        source = before[fresh.row_at]
        moved = kept.new_empty(fresh.lines, kept.shape[1], self.tokens, fresh.columns, kept.shape[-1])
        taken = by_row[source // columns, source % columns].unflatten(0, (fresh.lines, fresh.columns))
        moved[:, :, : self.length] = taken.permute(0, 2, 3, 1, 4)
        return moved.flatten(2, 3)


class _Table:
    """Rows in lines of equal length: the row r at place `place[r]`, counted line by line. Places may be empty; what
    stands there is some row's, and is never read."""

    def __init__(self, place: Tensor, lines: int, columns: int) -> None:
        self.place, self.lines, self.columns = place, lines, columns
        rows = torch.arange(len(place), device=place.device)
        self.row_at = torch.zeros(lines * columns, dtype=torch.long, device=place.device)
        self.row_at[place] = rows
        self._full = len(place) == lines * columns and torch.equal(place, rows)
        self._apart: dict[tuple[int, torch.dtype], Tensor] = {}

    def lined_up(self, rows: Tensor) -> Tensor:
        """(lines, H, columns, ...) from (n, H, ...)."""
        rows = rows if self._full else rows.index_select(0, self.row_at)
        return rows.view(self.lines, self.columns, *rows.shape[1:]).transpose(1, 2)

    def table(self, rows: Tensor) -> Tensor:
        """(lines, H, columns * G, X) from (n, H, G, X)."""
        return self.lined_up(rows).flatten(2, 3)

    def rows(self, output: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """(n, G, H, X) and (n, G, H) from (lines, H, columns * G, X) and (lines, H, columns * G)."""
        both = []
        for values in (output, size):
            values = values.transpose(1, 2).unflatten(1, (self.columns, -1)).flatten(0, 1)
            both.append(values if self._full else values.index_select(0, self.place))
        return both[0], both[1]

    def apart(self, grouped: int, tokens: int, dtype: torch.dtype) -> Tensor | None:
        """(1, 1, columns * G, tokens * columns) to add to scores: a row sees what stands in its own column. None: there
        is but one."""
        if self.columns == 1:
            return None
        if (grouped, dtype) not in self._apart:
            column = torch.arange(self.columns, device=self.place.device)
            same = column.repeat_interleave(grouped)[:, None] == column.repeat(tokens)
            self._apart[grouped, dtype] = additive(same, dtype)[None, None]
        return self._apart[grouped, dtype]


def _beside_prompts(prompt_of: Tensor, prompts: int) -> _Table:
    """One line a prompt."""
    counts, among = _counted(prompt_of, prompts)
    columns = int(counts.max())
    return _Table(prompt_of * columns + among, prompts, columns)


def _in_lines(prompt_of: Tensor) -> _Table:
    """As many lines a prompt as it takes, of at most `LINE` rows."""
    counts, among = _counted(prompt_of, 0)
    most = int(counts.max())
    columns = -(-most // -(-most // LINE))
    lines = -(-counts // columns)
    before = lines.cumsum(0) - lines
    return _Table((before[prompt_of] * columns) + among, int(lines.sum()), columns)


def _counted(prompt_of: Tensor, prompts: int) -> tuple[Tensor, Tensor]:
    """(P,) rows of each prompt, and (n,) how many rows of its prompt come before a row."""
    counts = torch.bincount(prompt_of, minlength=prompts)
    order = torch.argsort(prompt_of, stable=True)
    among = torch.empty_like(order)
    among[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[prompt_of[order]]
    return counts, among


def _attend(layer: Layer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(B, H, L, Dv) and the log of the sum of the exponentiated scores (B, H, L), in fp32 at least, from query
    (B, H, L, D), key (B, H, S, D), value (B, H, S, Dv) and a mask to add to scores."""
    if query.device.type == "cpu" and layer.cap is None and query.shape[-1] == value.shape[-1]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=layer.scaling
        )
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = capped((query @ key.transpose(-1, -2)).to(exact) * layer.scaling, layer.cap)
    scores = scores if mask is None else scores + mask
    size = scores.logsumexp(-1)
    return (scores - size[..., None]).exp().to(value.dtype) @ value, size
