"""Scoring against a plain forward pass of one completion at a time, and everything else that a policy promises."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from apportion.data.configurable import describe
from apportion.data.errors import UsageError
from apportion.modules.fresh import FreshModel, character_tokenizer
from apportion.modules.policy import Policy
from apportion.modules.text import TextCodec
from tests.modules.tiny_models import CONFIGS, batch_of, save, tiny_policy

PROMPTS = [[5, 9, 30, 12, 44, 7], [7, 8], [61]]
COMPLETIONS = [[11, 12, 13, 14, 15, 16, 17], [21, 1], [], [41, 42, 43, 44], [51, 0, 53]]
PROMPT_OF = [0, 0, 1, 1, 2]


def batch():
    return batch_of(PROMPTS, COMPLETIONS, PROMPT_OF)


def reference(policy, temperature):
    """For each completion, a list of (logp, entropy, sum of squares) tensors: plain forward passes, no padding."""
    rows = []
    for prompt, completion in zip([PROMPTS[p] for p in PROMPT_OF], COMPLETIONS, strict=True):
        logits = policy.model(input_ids=torch.tensor([prompt + completion])).logits[0].double() / temperature
        row = []
        for t, token in enumerate(completion):
            log_probs = torch.log_softmax(logits[len(prompt) + t - 1], 0)  # the position before predicts the token
            probs = log_probs.exp()
            row.append((log_probs[token], -(probs * log_probs).sum(), (probs**2).sum()))
        rows.append(row)
    return rows


CASES = [(kind, "float64", "sdpa") for kind in CONFIGS] + [(kind, "float32", "eager") for kind in CONFIGS]


@pytest.mark.parametrize(("kind", "dtype", "attention"), CASES)
def test_pitfalls_13_15_18_19_scores_are_those_of_the_plain_model(tmp_path, kind, dtype, attention):
    """The shift by one, left padding in a mixed batch, an empty completion, and the temperature."""
    policy = tiny_policy(kind, tmp_path, dtype, temperature=0.7, attention=attention)
    exact = dtype == "float64" and kind != "cohere"  # turns queries and keys to their positions in float32
    tolerance = 1e-10 if exact else 1e-4
    scores = policy.score(batch(), entropy=True, sum_sq_probs=True)
    assert scores.entropy is not None
    assert scores.sum_sq_probs is not None
    expected = reference(policy, 0.7)
    logp, entropy = torch.zeros(()).double(), torch.zeros(()).double()
    for i, row in enumerate(expected):
        for t, values in enumerate(row):
            for ours, value in zip((scores.logp, scores.entropy, scores.sum_sq_probs), values, strict=True):
                assert ours[i, t].item() == pytest.approx(value.item(), abs=tolerance)
            logp, entropy = logp + (t + 1) * values[0], entropy + values[1]
        for ours in (scores.logp, scores.entropy, scores.sum_sq_probs):
            assert not ours[i, len(row) :].any()
    assert not scores.sum_sq_probs.requires_grad
    weights = torch.arange(1, scores.logp.shape[1] + 1)
    for name, theirs in (("logp", logp), ("entropy", entropy)):
        parameters = [p for p in policy.parameters() if p.requires_grad]
        scores = policy.score(batch(), entropy=True, sum_sq_probs=True)
        ours = (getattr(scores, name) * (weights if name == "logp" else 1)).sum()
        a = torch.autograd.grad(ours, parameters, allow_unused=True)
        b = torch.autograd.grad(theirs, parameters, retain_graph=True, allow_unused=True)
        for x, y in zip(a, b, strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x, y, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_pitfall_15_a_batch_of_one_gives_the_same(tmp_path, kind):
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5)):
        policy = tiny_policy(kind, tmp_path, dtype=dtype)
        together = policy.score(batch()).logp
        for row in range(len(COMPLETIONS)):
            alone = policy.score(batch()[[row]]).logp
            torch.testing.assert_close(alone[0], together[row, : alone.shape[1]], rtol=0, atol=tolerance)


def test_pitfall_14_masks_come_from_lengths(tmp_path):
    """Pad and end are the same token here, and it may stand anywhere in a completion."""
    policy = tiny_policy("llama", tmp_path)
    policy.tokenizer.pad_token = "<eos>"
    completion = [1, 20, 1, 1]
    tokens = policy.score(batch_of([[5, 6]], [completion, [9] * 6], [0, 0], pad=1)).logp[0]
    logits = policy.model(input_ids=torch.tensor([[5, 6, *completion]])).logits[0, 1:-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).squeeze(1)
    torch.testing.assert_close(tokens[:4], expected)
    assert not tokens[4:].any()


def test_pitfall_17_the_completions_own_tokens_are_scored(tmp_path):
    """The tokens "a", "b" as sampled and "ab" as a tokenizer would write it are different completions of equal text."""
    core = Tokenizer(BPE({"<eos>": 0, "x": 1, "a": 2, "b": 3, "ab": 4}, [("a", "b")]))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    save(CONFIGS["llama"](), tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = Policy(str(tmp_path), dtype="float64", max_completion_tokens=8)
    assert policy.decode([2, 3]) == policy.decode([4]) == "ab"
    assert policy.encode_text("ab") == [4]
    completions = [[2, 3, 0], [4, 0]]
    logp = policy.score(batch_of([[3]], completions, [0, 0])).logp.detach()
    for row, ids in enumerate(completions):
        logits = policy.model(input_ids=torch.tensor([[3, *ids]])).logits[0, :-1].detach().log_softmax(-1)
        assert float(logp[row].sum()) == pytest.approx(sum(float(logits[t, token]) for t, token in enumerate(ids)))
    assert float(logp[0].sum()) != pytest.approx(float(logp[1].sum()), abs=1e-3)


def test_pitfall_18_empty_completions_only():
    policy = Policy(fresh=FreshModel(width=16))
    rollouts = batch_of([[5, 6]], [[], []], [0, 0])
    scores = policy.score(rollouts, entropy=True, sum_sq_probs=True)
    assert not scores.logp.any()
    (scores.logp.sum() + scores.entropy.sum()).backward()
    assert not any(p.grad.any() for p in policy.parameters() if p.grad is not None)
    assert policy.score(rollouts[[0]]).logp.shape == (1, 0)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.9}])
def test_pitfall_19_training_refuses_what_the_scorer_does_not_apply(options):
    policy = Policy(fresh=FreshModel(width=16), **options)
    with pytest.raises(UsageError, match=f"policy.{next(iter(options))}"):
        policy.check_trainable_distribution()
    Policy(fresh=FreshModel(width=16)).check_trainable_distribution()


def test_pitfall_20_log_softmax_is_fp32_whatever_the_weights():
    policy = Policy(fresh=FreshModel(width=16), dtype="bfloat16", temperature=0.5)
    rollouts = batch()
    scores = policy.score(rollouts, entropy=True, sum_sq_probs=True)
    assert scores.logp.dtype == scores.entropy.dtype == scores.sum_sq_probs.dtype == torch.float32
    hidden = policy.hidden(rollouts, policy.scoring)
    assert hidden.dtype == torch.bfloat16
    logits = hidden[rollouts.completion_mask].double() @ policy.model.lm_head.weight.double().T / 0.5
    expected = logits.log_softmax(-1).gather(1, rollouts.completion_ids[rollouts.completion_mask][:, None])
    torch.testing.assert_close(scores.logp[rollouts.completion_mask].double(), expected[:, 0], rtol=0, atol=3e-6)
    fp32 = Policy(fresh=FreshModel(width=16))
    with torch.autocast("cpu", torch.bfloat16):
        assert fp32.score(rollouts).logp.dtype == torch.float32


def test_score_at_another_temperature():
    policy = Policy(fresh=FreshModel(width=16), temperature=0.5)
    plain = Policy(fresh=FreshModel(width=16))
    torch.testing.assert_close(policy.score(batch(), temperature=1.0).logp, plain.score(batch()).logp)
    assert not torch.allclose(policy.score(batch()).logp, plain.score(batch()).logp)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_embeddings_may_stand_in_for_tokens(tmp_path, kind):
    policy = tiny_policy(kind, tmp_path)
    embeddings = policy.embed(batch())
    assert embeddings.shape == (5, 7 + 8, 16)
    torch.testing.assert_close(policy.hidden(batch(), embeddings=embeddings), policy.hidden(batch()))


def test_gradient_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        policy = Policy(fresh=FreshModel(width=16), dtype="float64", gradient_checkpointing=checkpointing)
        assert policy.model.model.gradient_checkpointing == checkpointing
        assert policy.model.training
        policy.score(batch()).logp.sum().backward()
        gradients.append([p.grad for p in policy.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_inference_puts_modes_back():
    policy = Policy(fresh=FreshModel(width=16))
    policy.model.lm_head.eval()
    modes = [module.training for module in policy.modules()]
    assert any(modes)
    with policy.inference() as same:
        assert same is policy
        assert not any(module.training for module in policy.modules())
        assert not policy.score(batch()).logp.requires_grad
        with policy.inference():
            pass
        assert not policy.training
    assert [module.training for module in policy.modules()] == modes
    assert policy.score(batch()).logp.requires_grad
    with pytest.raises(IndexError), policy.inference():
        [][0]
    assert [module.training for module in policy.modules()] == modes


def test_inference_inside_lightnings_inference_mode():
    policy = Policy(fresh=FreshModel(width=16), gradient_checkpointing=True)
    with torch.inference_mode(), policy.inference():
        logp = policy.score(batch()).logp
    torch.testing.assert_close(policy.score(batch()).logp.detach(), logp.clone())


def test_frozen_copy_stays_where_it_is():
    policy = Policy(fresh=FreshModel(width=16))
    frozen = policy.frozen_copy()
    before = policy.score(batch()).logp.detach()
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(2)
    torch.testing.assert_close(frozen.score(batch()).logp, before)
    assert not torch.allclose(policy.score(batch()).logp, before)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert frozen.tokenizer is policy.tokenizer
    assert policy.content_hash() != frozen.content_hash()


def test_content_hash_sees_every_weight_and_the_tokenizer():
    policy = Policy(fresh=FreshModel(width=16))
    seen = {policy.content_hash()}
    for weight in policy.model.state_dict().values():
        with torch.no_grad():
            weight.view(-1)[-1] += 0.5
        seen.add(policy.content_hash())
    policy.tokenizer.add_tokens(["new"])
    seen.add(policy.content_hash())
    assert len(seen) == 2 + len(policy.model.state_dict())


def test_a_policy_describes_itself_as_plain_data():
    described = describe(Policy(fresh=FreshModel(width=16), temperature=0.5, end_tokens=["<eos>"]))
    assert described["class_path"] == "apportion.modules.policy.Policy"
    assert described["init_args"]["fresh"]["width"] == 16
    assert described["init_args"]["end_tokens"] == ["<eos>"]


def test_a_model_that_cannot_be_reproduced_is_refused(tmp_path, monkeypatch):
    folder = save(CONFIGS["llama"](), tmp_path)
    forward = LlamaForCausalLM.forward

    def scaled(self, *args, **options):
        output = forward(self, *args, **options)
        output.logits = output.logits * 1.1
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(UsageError, match=r"LlamaForCausalLM.*not supported"):
        Policy(folder, max_completion_tokens=8)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"temperature": 0.0}, "policy.temperature is 0.0"),
        ({"temperature": -1.0}, "policy.temperature"),
        ({"temperature": math.nan}, "policy.temperature"),
        ({"top_k": -1}, "policy.top_k"),
        ({"top_p": 0.0}, "policy.top_p"),
        ({"top_p": 1.5}, "policy.top_p"),
        ({"max_completion_tokens": 0}, "policy.max_completion_tokens is 0"),
        ({"max_prompt_tokens": 0}, "policy.max_prompt_tokens is 0"),
        ({"max_completion_tokens": 5000}, "2048 positions"),
        ({"max_prompt_tokens": 2000, "max_completion_tokens": 100}, "2048 positions"),
        ({"end_tokens": ["nonesuch"]}, "'nonesuch'"),
        ({"end_tokens": []}, "empty list"),
        ({"chat_template": "always"}, "no chat template"),
        ({"attention": "eager", "dtype": "float64"}, "computes in float32"),
    ],
)
def test_options_out_of_range(options, part):
    with pytest.raises(UsageError, match=part) as caught:
        Policy(fresh=FreshModel(width=16), **options)
    assert "\n" not in str(caught.value)


def test_limits():
    policy = Policy(fresh=FreshModel(width=16), temperature=0.7, top_k=4, top_p=0.9, max_completion_tokens=48)
    limits = policy.limits("rollout")
    assert (limits.max_new_tokens, limits.temperature, limits.top_k, limits.top_p) == (48, 0.7, 4, 0.9)
    assert policy.max_prompt_tokens == 2000  # what the positions leave
    assert Policy(fresh=FreshModel(width=16), max_prompt_tokens=30).max_prompt_tokens == 30


# ---- text --------------------------------------------------------------------------------------------------------


def codec(tokenizer=None, end_tokens=None, generation_ends=None, chat_template="auto"):
    return TextCodec(tokenizer or character_tokenizer(), end_tokens, generation_ends, chat_template, "x")


def test_pitfall_14_several_end_tokens():
    assert codec().end_token_ids == (1,)
    assert codec(generation_ends=[7, 1, 9]).end_token_ids == (1, 7, 9)
    assert codec(generation_ends=7).end_token_ids == (1, 7)
    assert codec(end_tokens=["=", "<eos>"], generation_ends=7).end_token_ids == (codec().encode_text("=")[0], 1)
    text = codec(end_tokens=["=", "<eos>"])
    assert text.decode([*text.encode_text("1+2="), 1, 0, 0]) == "1+2"
    tokenizer = character_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UsageError, match="names no end token"):
        codec(tokenizer)
    tokenizer.pad_token = None
    assert codec(tokenizer, generation_ends=[7, 9]).pad_token_id == 7


def test_prompts_with_and_without_a_chat_template():
    tokenizer = character_tokenizer()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2"}]
    plain = codec(tokenizer)
    assert plain.decode(plain.encode_prompt("1+2=")) == "1+2="
    assert plain.decode(plain.encode_prompt(messages)) == "Be brief.\n\n1+2"
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    for choice in ("auto", "always"):
        text = codec(tokenizer, chat_template=choice)
        assert text.decode(text.encode_prompt("1+2")) == "[user]1+2[assistant]"
        assert text.decode(text.encode_prompt(messages)) == "[system]Be brief.[user]1+2[assistant]"
    never = codec(tokenizer, chat_template="never")
    assert never.decode(never.encode_prompt("1+2=")) == "1+2="


def test_the_start_token_is_put_where_the_tokenizer_puts_it():
    class WithStart:
        """As tokenizers of the Llama family: a start token before texts, and here an end token behind them too."""

        bos_token_id, eos_token_id, pad_token_id, eos_token, chat_template = 50, 1, 0, "<eos>", None

        def encode(self, text, add_special_tokens=True):
            ids = character_tokenizer().encode(text)
            return [50, *ids, 1] if add_special_tokens else ids

    text = codec(WithStart())
    assert text.encode_prompt("1") == [50, *text.encode_text("1")]
    assert text.encode_text("1") == character_tokenizer().encode("1")


def byte_tokenizer():
    """Every byte of a text is a token, as in the worst case of byte-level tokenizers."""
    vocabulary = {"<eos>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    core = Tokenizer(BPE(vocabulary, []))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)


BYTES = codec(byte_tokenizer())
CHARACTERS = codec()


@given(st.text(max_size=30))
@settings(deadline=None, max_examples=60)
def test_token_ends_of_texts(text):
    ids = [byte + 1 for byte in text.encode()]
    assert BYTES.decode(ids) == text
    ends = BYTES.token_char_ends([*ids, 0])
    expected = []
    for k in range(len(ids)):
        whole = text.encode()[: k + 1].decode(errors="ignore")
        expected.append(len(whole))
    if "\ufffd" not in text:
        assert ends == [*expected, len(text)]
    assert ends[-1] == len(text)


@given(st.lists(st.integers(0, 256), max_size=20))
@settings(deadline=None, max_examples=60)
def test_token_ends_of_any_tokens_never_fall_and_end_with_the_text(ids):
    ends = BYTES.token_char_ends(ids)
    assert len(ends) == len(ids)
    assert ends == sorted(ends)
    assert (ends[-1] if ends else 0) == len(BYTES.decode(ids))


def test_token_ends_are_found_in_linear_time():
    calls = []
    tokenizer = character_tokenizer()
    text = codec(tokenizer)
    decode = tokenizer.decode
    text.tokenizer = SimpleNamespace(decode=lambda ids, **options: calls.append(len(ids)) or decode(ids, **options))
    ids = CHARACTERS.encode_text("12+34=46;" * 50)
    assert text.token_char_ends(ids) == list(range(1, 451))
    assert sum(calls) < 6 * len(ids)


def test_token_strings_are_readable():
    assert CHARACTERS.token_strings([*CHARACTERS.encode_text("1 \n"), 1]) == ["1", " ", "\n", "<eos>"]


def test_conversions_leave_positions_exact():
    """Lightning's bf16-true converts a whole module; transformers keeps rotary frequencies in fp32."""
    policy = Policy(fresh=FreshModel(layers=1, width=16, heads=2))
    frequencies = policy.model.model.rotary_emb.inv_freq.clone()
    for converted in (
        copy.deepcopy(policy).to(torch.bfloat16),
        nn.ModuleList([copy.deepcopy(policy)]).to(torch.bfloat16)[0],
        Policy(fresh=FreshModel(layers=1, width=16, heads=2), dtype="bfloat16"),
    ):
        assert {p.dtype for p in converted.parameters()} == {torch.bfloat16}
        found = converted.model.model.rotary_emb.inv_freq
        assert found.dtype == torch.float32
        assert torch.equal(found, frequencies)
