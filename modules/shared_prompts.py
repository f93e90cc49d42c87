"""Whether a model can be run with prompts that are shared by their completions: tried out, not looked up."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..data.batch import RolloutBatch
from .attention import Pattern, Prefill, UnsupportedError, use_shared_attention
from .continuation import Continuation
from .lean_decoder import LeanDecoder, copy_fits
from .lean_pass import lean_pass, unlike_llama
from .packed import Packed
from .sharding import is_sharded
from .split_model import TOLERANCE, SplitModel

FLOAT32_NORMS = (
    1e-5  # of the largest logit: transformers normalises in float32 even in a float64 model, `lean_pass` not
)
PROMPTS, COMPLETIONS = (5, 3), ((0, 4), (1, 3), (0, 1), (1, 2))  # lengths; (prompt, length)


def run(split: SplitModel, ids: Tensor, positions: Tensor, pattern: Pattern) -> Tensor:
    """(B, L, d) final hidden states of token ids (B, L) at positions (B, L) that attend by a pattern."""
    no_mask = torch.empty(1, 1, 0, 0, device=ids.device)  # a mask of four dimensions is handed through as it is
    return split.model.base_model(
        input_ids=ids, position_ids=positions, attention_mask=no_mask, use_cache=False, pattern=pattern
    ).last_hidden_state


def packed_hidden(split: SplitModel, packed: Packed, recompute: bool = False) -> Tensor:
    """(N, T, d) final hidden states that predict the completions' tokens.

    Args:
        recompute: gradient checkpointing, for a lean pass; a model's own modules know it.
    """
    if split.lean and unlike_llama(split.model) is None and not is_sharded(split.model):
        hidden = lean_pass(split.model, split.layers, packed.ids[0], packed.positions[0], packed, recompute)
    else:
        hidden = run(split, packed.ids, packed.positions, packed)[0]
    return hidden[packed.predicts]


def prefill(split: SplitModel, prompts: Tensor, lengths: Tensor) -> tuple[Tensor, Prefill]:
    """(P, d) final hidden states of the last tokens of prompts (P, Lp), padded on the right, and their keys and
    values."""
    pattern = Prefill()
    positions = torch.arange(prompts.shape[1], device=prompts.device)[None].expand(len(prompts), -1)
    hidden = run(split, prompts, positions, pattern)
    return hidden[torch.arange(len(prompts), device=prompts.device), lengths - 1], pattern


FAILURES = (TypeError, AttributeError, RuntimeError, ValueError, KeyError)  # of a model that is not as was thought

Step = Callable[[Tensor, Tensor, Continuation], Tensor]


def decoder(split: SplitModel, rows: int) -> Step:
    """The pass over one new token of about so many rows: (n, d) final hidden states of tokens (n,) at positions (n, 1).
    To be made anew when weights or precision change."""
    if split.lean and unlike_llama(split.model) is None and copy_fits(split.model):
        return LeanDecoder(split.model, rows).step
    return lambda token, positions, pattern: run(split, token[:, None], positions, pattern)[:, 0]


@torch.no_grad()
def why_not_shared(split: SplitModel) -> str | None:
    """None if packing and decoding with shared prompts give the logits of the model's own pass, else the reason why
    the model cannot be run so."""
    try:
        if not split.has_positions:
            raise UnsupportedError("it takes no position ids")
        use_shared_attention(split.model)
        split.model.eval()
        batch = _any_batch(split)
        own = _own_hidden(split, batch)
        theirs = split.logits(own).float()
        largest = TOLERANCE[split.model.dtype] * float(theirs.abs().max())

        def gap(hidden: Tensor) -> float:
            difference = (split.logits(hidden).float() - theirs).abs()
            return float(difference.masked_fill(~batch.completion_mask[..., None], 0.0).max())

        packed = Packed(batch)
        split.lean = False
        try:
            ways = [packed_hidden(split, packed), _decoded(split, batch)]
        except FAILURES as error:
            raise UnsupportedError(f"a pass with an attention of ours fails ({error})") from error
        for way in ways:
            if not gap(way) <= largest:
                raise UnsupportedError(f"its logits come out different, by {gap(way):.2g} (at most {largest:.2g})")
        try:
            split.lean = True
            split.lean = max(gap(packed_hidden(split, packed)), gap(_decoded(split, batch))) <= max(
                largest, FLOAT32_NORMS * float(theirs.abs().max())
            )
        except FAILURES:
            split.lean = False
    except UnsupportedError as reason:
        return str(reason)
    return None


def _any_batch(split: SplitModel) -> RolloutBatch:
    """Four completions of two prompts, of some tokens."""
    weight = split.model.get_input_embeddings().weight
    n, lp, t = len(COMPLETIONS), max(PROMPTS), max(length for _, length in COMPLETIONS)
    tokens = torch.arange(1, 1 + (len(PROMPTS) * lp + n * t)) * 7919 % weight.shape[0]
    prompt_mask = torch.arange(lp) >= lp - torch.tensor(PROMPTS)[:, None]
    completion_mask = torch.arange(t) < torch.tensor([length for _, length in COMPLETIONS])[:, None]
    of = torch.tensor([prompt for prompt, _ in COMPLETIONS])
    yes, number = torch.ones(n, dtype=torch.bool), torch.arange(n)
    return RolloutBatch(
        prompt_ids=tokens[: len(PROMPTS) * lp].view(-1, lp),
        prompt_mask=prompt_mask,
        prompt_id=torch.arange(len(PROMPTS)),
        prompt_index=of,
        group=of,
        completion_ids=tokens[len(PROMPTS) * lp :].view(n, t),
        completion_mask=completion_mask,
        action_mask=completion_mask,
        reward=torch.zeros(n),
        reward_valid=yes,
        truncated=~yes,
        in_loss=yes,
        policy_version=number,
    ).to(weight.device)


def _own_hidden(split: SplitModel, batch: RolloutBatch) -> Tensor:
    """(N, T, d): each completion alone behind its prompt, without padding, by the model's own attention."""
    rows = []
    for row in range(len(batch)):
        prompt = batch.prompt_index[row]
        mask = batch.completion_mask[row]
        ids = torch.cat([batch.prompt_ids[prompt][batch.prompt_mask[prompt]], batch.completion_ids[row][mask]])[None]
        hidden = split.hidden(torch.ones_like(ids), input_ids=ids)[0]
        rows.append(torch.nn.functional.pad(hidden[-int(mask.sum()) - 1 : -1], (0, 0, 0, int((~mask).sum()))))
    return torch.stack(rows)


def _decoded(split: SplitModel, batch: RolloutBatch) -> Tensor:
    """(N, T, d): token by token, and rows leave when their completion ends."""
    lengths = batch.prompt_mask.sum(1)
    prompts = torch.stack([row.roll(int(n)) for row, n in zip(batch.prompt_ids, lengths, strict=True)])
    last, prefilled = prefill(split, prompts, lengths)
    split.layers = prefilled.layers
    row = torch.arange(len(batch), device=lengths.device)
    steps = batch.completion_ids.shape[1]
    pattern = Continuation(prefilled, lengths, batch.prompt_index, steps)
    decode = decoder(split, len(batch))
    hidden = last.new_zeros(len(batch), steps, last.shape[-1])
    hidden[:, 0] = last[batch.prompt_index]
    for step in range(1, steps):
        row = row[pattern.advance(batch.completion_mask[row, step], batch.prompt_index[row])]
        positions = pattern.next_token(batch.prompt_index[row])
        hidden[row, step] = decode(batch.completion_ids[row, step - 1], positions, pattern)
    return hidden
