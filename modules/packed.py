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

        ends = self.prompt_lengths.cumsum(0)
        self.prompt_places, prompt_back = _places(self.prompt_lengths, 0)
        fed_lengths = (lengths - 1).clamp(min=0)
        self.own_places, own_back = _places(fed_lengths, prompt_tokens)
        self.back = torch.cat([prompt_back, own_back + self.prompt_places.numel()])
        before = self.own_places if self.own_places.shape[1] else self.own_places.new_zeros(len(lengths), 1)
        behind = before[:, (column[1:] - 1).clamp(max=before.shape[1] - 1)]  # (N, T - 1)
        predicts = torch.cat([(ends - 1)[self.prompt_of][:, None], behind], 1)[:, : len(column)]
        self.predicts = torch.where(completions, predicts, 0)
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (S, heads, D)
        prompts = [tensor[self.prompt_places].transpose(1, 2) for tensor in (queries, keys, values)]
        outputs = [causal(layer, prompts[0], prompts[1], prompts[2])]  # (P, Hq, Lp, Dv)
        if self.own_places.shape[1]:
            own = [tensor[self.own_places].transpose(1, 2) for tensor in (queries, keys, values)]
            seen = [torch.cat([prompts[i][self.prompt_of], own[i]], 2) for i in (1, 2)]  # keys and values
            mask = self._mask(layer.window, query.dtype)
            outputs.append(attend_under(mask, layer, own[0], seen[0], seen[1]))  # (N, Hq, T', Dv)
        flat = torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs])
        return flat[self.back][None]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """(N, T', Lp + T') to add to the scores of completion tokens."""
        if (window, dtype) not in self._masks:
            device = self.back.device
            lengths = self.prompt_lengths[self.prompt_of][:, None]  # (N, 1)
            prompt = torch.arange(self.prompt_places.shape[1], device=device)
            own = lengths + torch.arange(self.own_places.shape[1], device=device)  # (N, T') positions
            seen = torch.cat(
                [
                    visible(own, prompt.expand(len(lengths), -1), window) & (prompt < lengths)[:, None],
                    visible(own, own, window),
                ],
                -1,
            )
            self._masks[window, dtype] = additive(seen, dtype)
        return self._masks[window, dtype]


def _places(lengths: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Where sequences of these lengths, one behind the other from `start` on, lie: (K, longest) places, some existing
    place on padding; and (sum of lengths,) the reverse, places in the padded table flattened."""
    longest = int(lengths.max()) if len(lengths) else 0
    column = torch.arange(longest, device=lengths.device)
    used = column < lengths[:, None]
    places = start + (lengths.cumsum(0) - lengths)[:, None] + column
    return torch.where(used, places, 0), used.flatten().nonzero().squeeze(1)
