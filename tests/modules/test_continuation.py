"""Attention of decoding passes against a plain loop in float64, while rows come to their end."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from apportion.modules.attention import Layer, Prefill
from apportion.modules.continuation import Continuation


def attention(layer: Layer, query, keys, values, query_position: int, positions) -> torch.Tensor:
    """(Hq, Dv) of one query (Hq, D) over keys (S, H, D) and values (S, H, Dv), one head after the other."""
    grouped = query.shape[0] // keys.shape[1]
    outputs = []
    for head, q in enumerate(query):
        scores = layer.scaling * (keys[:, head // grouped] @ q)
        scores = scores if layer.cap is None else layer.cap * torch.tanh(scores / layer.cap)
        if layer.window is not None:
            scores[query_position - positions >= layer.window] = -torch.inf
        outputs.append(scores.softmax(0) @ values[:, head // grouped])
    return torch.stack(outputs)


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 11), min_size=1, max_size=4),
    windows=st.lists(st.sampled_from([None, 1, 3, 6]), min_size=1, max_size=2),
    cap=st.sampled_from([None, 1.5]),
    deep=st.sampled_from([4, 6]),
    ending=st.sampled_from([0.0, 0.1, 0.4]),
    shuffled=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_every_row_sees_its_prompt_and_itself(counts, windows, cap, deep, ending, shuffled, dtype, seed):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    heads, kv, width, steps = 6, 3, 4, 9
    layers = [Layer(index, 0.7, window, cap) for index, window in enumerate(windows)]
    lengths = torch.randint(1, 8, (len(counts),), generator=generator)
    longest = int(lengths.max())
    prompt_of = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    if shuffled:
        prompt_of = prompt_of[torch.randperm(len(prompt_of), generator=generator)]
    prefill = Prefill()
    for layer in layers:
        prompt = random(len(counts), heads, longest, width), random(len(counts), kv, longest, width)
        prefill.attend(layer, *prompt, random(len(counts), kv, longest, deep))
    pattern = Continuation(prefill, lengths, prompt_of, steps)
    own = {(layer.index, row): ([], []) for layer in layers for row in range(len(prompt_of))}
    row = torch.arange(len(prompt_of))
    for step in range(steps):
        position = pattern.next_token(prompt_of[row])
        assert position.squeeze(1).tolist() == (lengths[prompt_of[row]] + step).tolist()
        for layer in layers:
            query, key = random(len(row), heads, 1, width), random(len(row), kv, 1, width)
            value = random(len(row), kv, 1, deep)
            found = pattern.attend(layer, query, key, value)
            assert found.shape == (len(row), 1, heads, deep)
            assert found.dtype == dtype
            for place, number in enumerate(row.tolist()):
                keys, values = own[layer.index, number]
                keys.append(key[place, :, 0])
                values.append(value[place, :, 0])
                prompt, length = prompt_of[number], int(lengths[prompt_of[number]])
                seen = [
                    torch.cat([kept[layer.index][prompt, :, :length].transpose(0, 1), torch.stack(new)]).double()
                    for kept, new in ((prefill.keys, keys), (prefill.values, values))
                ]
                expected = attention(
                    layer, query[place, :, 0].double(), *seen, length + step, torch.arange(99)[: length + step + 1]
                )
                torch.testing.assert_close(
                    found[place, 0].double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-6
                )
        alive = torch.rand(len(row), generator=generator) >= ending
        alive[0] = True
        kept = pattern.advance(alive, prompt_of[row])
        assert kept.tolist() == alive.nonzero().squeeze(1).tolist()
        row = row[kept]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_added_up_in_fp32(dtype):
    """Against float64 attention to the same 16-bit numbers: what is left is the rounding of weights and result."""
    generator = torch.Generator().manual_seed(0)
    prefill, layer = Prefill(), Layer(0, 0.25, None, None)
    prompt = [torch.randn(2, heads, 40, 16, generator=generator).to(dtype) for heads in (6, 3, 3)]
    prefill.attend(layer, *prompt)
    prompt_of = torch.tensor([0, 0, 0, 1, 1, 1])
    pattern = Continuation(prefill, torch.tensor([40, 40]), prompt_of, 30)
    keys, values = [], []
    for _ in range(30):
        pattern.next_token(prompt_of)
        query, key, value = (torch.randn(6, heads, 1, 16, generator=generator).to(dtype) for heads in (6, 3, 3))
        found = pattern.attend(layer, query, key, value)
        keys.append(key)
        values.append(value)
        pattern.advance(torch.ones(6, dtype=torch.bool), prompt_of)
    for row in range(6):
        seen = [
            torch.cat([kept[0][prompt_of[row]], *(new[row] for new in own)], 1).transpose(0, 1).double()
            for kept, own in ((prefill.keys, keys), (prefill.values, values))
        ]
        expected = attention(layer, query[row, :, 0].double(), *seen, 69, torch.arange(70))
        torch.testing.assert_close(found[row, 0].double(), expected, rtol=0, atol=0.01)
