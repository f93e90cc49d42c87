"""The fast engine: a prompt is run once for its whole group, finished completions cost nothing more."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ...data.errors import UsageError
from ...data.sampler import Finished, Limits, Sampler, Samples, uniforms
from ..continuation import Continuation
from ..memory import total_memory
from ..shared_prompts import Step, decoder, prefill
from .drawing import draw
from .generate import GenerateSampler

SHARE_OF_MEMORY = 0.2  # of the machine's, for the keys and values of one wave


class SharedPrefixSampler(Sampler):
    """Samples with a model's own layers, an attention of ours, and keys and values that are never copied.

    A prompt is run once and its keys and values serve its whole group; those of the completions are written in place;
    rows that have ended leave the batch. Logits are in fp32 at least, whatever the weights. Tokens are drawn by
    inverting the cumulative distribution (fp64) at the random numbers of the completion's own seed, so a completion is
    the same whatever else is in the batch, up to rounding of the model itself: in fp32 a draw within about 1e-6 of a
    token's edge may fall on its other side.

    A policy that cannot share prompts (`Policy.shares_prompts`, found out at its start) is sampled by transformers'
    generate.

    Args:
        rows_per_wave: completions sampled at once; more are sampled in several waves of whole groups. As many as a
            fifth of the memory holds unless given.
    """

    def __init__(self, rows_per_wave: int | None = None) -> None:
        super().__init__()
        if rows_per_wave is not None and rows_per_wave < 1:
            raise UsageError(f"data.sampler.rows_per_wave is {rows_per_wave}: give a whole number of at least 1")
        self.rows_per_wave = rows_per_wave
        self._fallback = GenerateSampler()

    def generate(
        self,
        policy: Any,
        prefixes: Sequence[Sequence[int]],
        members: int,
        limits: Limits,
        seeds: Sequence[int],
        finished: Finished | None = None,
    ) -> Samples:
        """See `Sampler.generate`. A temperature of 0 takes the most probable token; log-probabilities, entropies and
        sums of squares are then those of temperature 1.

        Log-probabilities are of the distribution that was sampled, after top-k and top-p; entropy and sum of squared
        probabilities are of the whole one.
        """
        if not all(prefixes):
            raise ValueError("an empty prefix cannot be continued: give every prefix at least one token")
        if not policy.shares_prompts:
            return self._fallback.generate(policy, prefixes, members, limits, seeds)
        random = uniforms(seeds, limits.max_new_tokens)
        order = sorted(range(len(prefixes)), key=lambda prompt: len(prefixes[prompt]))
        size = self.prompts_at_once(policy, prefixes, members, limits)
        samples = _empty(len(prefixes) * members, limits.max_new_tokens, policy, torch.device("cpu"))
        decode, head = decoder(policy.split, min(size, len(prefixes)) * members), policy.split.fp32_head()
        for start in range(0, len(order), size):
            wave = order[start : start + size]
            rows = torch.tensor([prompt * members + member for prompt in wave for member in range(members)])
            _wave(
                policy,
                decode,
                head,
                [prefixes[prompt] for prompt in wave],
                members,
                limits,
                random[rows],
                rows,
                samples,
            )
            if finished is not None:
                finished(wave, Samples(*(getattr(samples, field.name)[rows] for field in fields(Samples))))
        width = int(samples.mask.sum(1).max())
        return Samples(
            samples.ids[:, :width],
            samples.mask[:, :width],
            samples.truncated,
            samples.logp[:, :width],
            samples.entropy[:, :width],
            samples.sum_sq_probs[:, :width],
        )

    def prompts_at_once(self, policy: Any, prefixes: Sequence[Sequence[int]], members: int, limits: Limits) -> int:
        """Prompts in one wave, at least one."""
        return max(1, (self.rows_per_wave or rows_in_memory(policy, prefixes, limits)) // members)


def _wave(
    policy: Any,
    decode: Step,
    head: Tensor | None,
    prefixes: Sequence[Sequence[int]],
    members: int,
    limits: Limits,
    random: Tensor,
    rows: Tensor,
    samples: Samples,
) -> None:
    """Sample the completions of some prompts, and write them to the given rows of `samples`."""
    device = policy.device
    random = random.to(device)
    lengths = torch.tensor([len(prefix) for prefix in prefixes], device=device)
    prompts = torch.full((len(prefixes), int(lengths.max())), policy.pad_token_id)
    for number, prefix in enumerate(prefixes):
        prompts[number, : len(prefix)] = torch.as_tensor(prefix)
    hidden, prefilled = prefill(policy.split, prompts.to(device), lengths)
    prompt_of = torch.arange(len(prefixes), device=device).repeat_interleave(members)
    pattern = Continuation(prefilled, lengths, prompt_of, limits.max_new_tokens)
    hidden = hidden[prompt_of]
    ends = torch.tensor(policy.end_token_ids, device=device)
    own = _empty(len(rows), limits.max_new_tokens, policy, device)
    row = torch.arange(len(rows), device=device)  # the live ones
    for step in range(limits.max_new_tokens):
        drawn = draw(policy.split.logits(hidden, head), random[row, step], limits)
        ended = torch.isin(drawn.token, ends)
        own.ids[row, step] = drawn.token
        own.mask[row, step] = True
        own.logp[row, step] = drawn.logp.to(own.logp)
        own.entropy[row, step] = drawn.entropy.to(own.logp)
        own.sum_sq_probs[row, step] = drawn.sum_sq_probs.to(own.logp)
        own.truncated[row] = ~ended
        if step + 1 == limits.max_new_tokens or bool(ended.all()):
            break
        kept = pattern.advance(~ended, prompt_of[row])
        row, token = row[kept], drawn.token[kept]
        hidden = decode(token, pattern.next_token(prompt_of[row]), pattern)
    for field in fields(Samples):
        getattr(samples, field.name)[rows] = getattr(own, field.name).cpu()


def rows_in_memory(policy: Any, prefixes: Sequence[Sequence[int]], limits: Limits) -> int:
    """Completions whose keys, values and logits fit into a fifth of the memory."""
    config = policy.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = policy.model.dtype.itemsize
    a_token = 2 * config.num_hidden_layers * heads * width * size
    logits = 6 * max(4, size) * policy.model.get_input_embeddings().weight.shape[0]
    longest = max(len(prefix) for prefix in prefixes)
    return max(
        1, int(SHARE_OF_MEMORY * total_memory(policy.device) / (a_token * (limits.max_new_tokens + longest) + logits))
    )


def _empty(rows: int, tokens: int, policy: Any, device: torch.device) -> Samples:
    exact = torch.promote_types(policy.model.dtype, torch.float32)
    logp, entropy, sum_sq_probs = torch.zeros(3, rows, tokens, dtype=exact, device=device)
    ids = torch.full((rows, tokens), policy.pad_token_id, device=device)
    mask = torch.zeros(rows, tokens, dtype=torch.bool, device=device)
    return Samples(ids, mask, torch.zeros_like(mask[:, 0]), logp, entropy, sum_sq_probs)
