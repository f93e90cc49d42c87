"""Prompts and completions as one row of tokens without padding; a prompt stands once for all that continue it."""

import torch
from torch import Tensor

from ..data.batch import RolloutBatch
from .attention import Layer, additive, attend_under, causal, visible
from .packed_attention import PackedAttention, Part, Table
from .split_model import multiplied_in


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

        self.fed_lengths = (lengths - 1).clamp(min=0)
        self.parts = [prompt_tokens, int(self.fed_lengths.sum())]
        self.prompts, self.own = Table(self.prompt_lengths), Table(self.fed_lengths)
        ends = self.prompt_lengths.cumsum(0)
        starts = prompt_tokens + self.fed_lengths.cumsum(0) - self.fed_lengths
        behind = starts[:, None] + column[1:] - 1  # (N, T - 1)
        predicts = torch.cat([(ends - 1)[self.prompt_of][:, None], behind], 1)[:, : len(column)]
        self.predicts = torch.where(completions, predicts, 0)
        self.longest = int((self.prompt_lengths[self.prompt_of] + self.fed_lengths).max())
        self._parted: tuple[Part, tuple[Part, ...]] | None = None
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        simple = layer.cap is None and (layer.window is None or layer.window >= self.longest)
        if simple and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
            dtype = multiplied_in(value)
            query, key, value = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
            return PackedAttention.apply(query, key, value, *self._parts(), layer.scaling)[None]  # type: ignore[index]
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

    def _parts(self) -> tuple[Part, tuple[Part, ...]]:
        """See `PackedAttention`."""
        if self._parted is None:
            prompts, completions = slice(0, self.parts[0]), slice(self.parts[0], None)
            alone = Part(prompts, self.prompts, prompts, self.prompts, causal=True)
            own = Part(completions, self.own, completions, self.own, causal=True)
            before = Part(completions, self._beside_prompts(), prompts, self.prompts, False, self._padding())
            self._parted = alone, (before, own) if self.own.longest else ()
        return self._parted

    def _beside_prompts(self) -> Table:
        """The completions' tokens with one row a prompt."""
        of = self.prompt_of.repeat_interleave(self.fed_lengths)
        order = None if bool((of.diff() >= 0).all()) else of.argsort(stable=True)
        return Table(of.bincount(minlength=len(self.prompt_lengths)), order)

    def _padding(self) -> Tensor | None:
        """(P, 1, 1, Lp) to add to scores of prompt tokens; None: there is no padding."""
        position = torch.arange(self.prompts.longest, device=self.prompt_of.device)
        seen = position < self.prompt_lengths[:, None]
        return None if seen.all() else additive(seen, torch.float32)[:, None, None]

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
