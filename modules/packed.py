"""Prompts and completions as one row of tokens without padding; a prompt stands once for all that continue it."""

import torch
from torch import Tensor

from ..data.batch import RolloutBatch
from .attention import Layer, additive, attend_under, causal, visible


class Packed:
    """[all prompts | all completions], and who attends to whom in it: a prompt to itself, a completion to its prompt
    and to itself. S = number of tokens; a completion's last one is left out, since nothing is predicted from it.

    ids, positions: (1, S) long. predicts: (N, T) long, the place in the row whose hidden state predicts a completion's
    token; 0 outside the completions.
    """

    def __init__(self, rollouts: RolloutBatch) -> None:
        device = rollouts.group.device
        prompts, completions = rollouts.prompt_mask, rollouts.completion_mask
        self.prompt_of = rollouts.prompt_index
        self.prompt_lengths, lengths = prompts.sum(1), completions.sum(1)
        column = torch.arange(completions.shape[1], device=device)
        fed = column < lengths[:, None] - 1  # (N, T)
        prompt_tokens = int(self.prompt_lengths.sum())
        self.ids = torch.cat([rollouts.prompt_ids[prompts], rollouts.completion_ids[fed]])[None]
        prompt_positions = (prompts.cumsum(1) - 1)[prompts]
        own_positions = (self.prompt_lengths[self.prompt_of][:, None] + column)[fed]
        self.positions = torch.cat([prompt_positions, own_positions])[None]

        fed_lengths = (lengths - 1).clamp(min=0)
        self.parts = [prompt_tokens, int(fed_lengths.sum())]
        self.prompts, self.own = _Table(self.prompt_lengths), _Table(fed_lengths)
        ends = self.prompt_lengths.cumsum(0)
        starts = prompt_tokens + fed_lengths.cumsum(0) - fed_lengths
        behind = starts[:, None] + column[1:] - 1  # (N, T - 1)
        predicts = torch.cat([(ends - 1)[self.prompt_of][:, None], behind], 1)[:, : len(column)]
        self.predicts = torch.where(completions, predicts, 0)
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = [tensor[0].transpose(0, 1).split(self.parts) for tensor in (query, key, value)]  # (S, heads, D) each
        prompts = [self.prompts.rows(part).transpose(1, 2) for part, _ in parts]
        outputs = [self.prompts.tokens(causal(layer, *prompts).transpose(1, 2))]
        if self.own.longest:
            own = [self.own.rows(part).transpose(1, 2) for _, part in parts]
            before = [
                tensor.expand(len(own[0]), -1, -1, -1) if len(tensor) == 1 else tensor[self.prompt_of]
                for tensor in prompts[1:]
            ]
            keys, values = (torch.cat(pair, 2) for pair in zip(before, own[1:], strict=True))
            mask = self._mask(layer.window, query.dtype)
            outputs.append(self.own.tokens(attend_under(mask, layer, own[0], keys, values).transpose(1, 2)))
        return torch.cat(outputs)[None]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """(N, T', Lp + T') to add to the scores of completion tokens."""
        if (window, dtype) not in self._masks:
            device = self.prompt_of.device
            lengths = self.prompt_lengths[self.prompt_of][:, None]  # (N, 1)
            prompt = torch.arange(self.prompts.longest, device=device)
            own = lengths + torch.arange(self.own.longest, device=device)  # (N, T') positions
            seen = torch.cat(
                [
                    visible(own, prompt.expand(len(lengths), -1), window) & (prompt < lengths)[:, None],
                    visible(own, own, window),
                ],
                -1,
            )
            self._masks[window, dtype] = additive(seen, dtype)
        return self._masks[window, dtype]


class _Table:
    """Sequences that lie one behind the other, as rows padded to the longest, and back."""

    def __init__(self, lengths: Tensor) -> None:
        self.longest = int(lengths.max()) if len(lengths) else 0
        self.shape = (len(lengths), self.longest)
        column = torch.arange(self.longest, device=lengths.device)
        used = column < lengths[:, None]
        self.ragged = not bool(used.all())
        places = (lengths.cumsum(0) - lengths)[:, None] + column
        self.places = torch.where(used, places, 0).flatten()  # an existing token stands on padding
        self.back = used.flatten().nonzero().squeeze(1)

    def rows(self, tokens: Tensor) -> Tensor:
        """(K, longest, ...) from (sum of lengths, ...)."""
        return (tokens.index_select(0, self.places) if self.ragged else tokens).unflatten(0, self.shape)

    def tokens(self, rows: Tensor) -> Tensor:
        """The reverse."""
        flat = rows.flatten(0, 1)
        return flat.index_select(0, self.back) if self.ragged else flat
