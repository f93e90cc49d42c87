"""Each wrong request ends in one clear line and exit status 2, or 1 where it only shows while running."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from apportion.cli import main

TINY = [
    "--config=tasks/running_sums",
    "--config=algorithms/grpo",
    "--data.sampler=GenerateSampler",
    "--model.policy=Policy",
    "--model.policy.fresh={layers: 1, width: 16, heads: 2}",
    "--model.policy.max_completion_tokens=8",
    "--data.group_size=2",
    "--data.prompts_per_step=2",
    "--data.validation.prompts=2",
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=1",
]
DATASET = ["--data.task=DatasetTask", "--data.task.validation_share=0.5"]


def error_of(words, capsys, monkeypatch, tmp_path, status=2):
    """The line that the command ends with."""
    monkeypatch.chdir(tmp_path)
    assert main(words) == status
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert lines[-1] == errors[0]
    assert "Traceback" not in "\n".join(lines)
    assert len(errors[0]) < 400
    return errors[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.estimator=GroupMeen"], ["GroupMeen", "GroupMean"]),
        (["--model.estimator=GroupMean", "--model.estimator.scal=std"], ["scal", "scale"]),
        (["--model.objective.epsilon_hi=0.3"], ["epsilon_hi", "epsilon_high"]),
        (["--model.agregation=token_mean"], ["--model.agregation", "--model.aggregation"]),
        (["--data.group_siz=4"], ["--data.group_siz", "--data.group_size"]),
        (["--data.group_size=four"], ["data.group_size", "four", "whole number"]),
        (["--model.aggregation=mean"], ["mean", "token_mean", "sequence_mean"]),
        (["--data.group_size=1"], ["group_size", "1", "at least 2"]),
        (["--model.policy.fresh=null", "--model.policy.model=./nowhere"], ["./nowhere"]),
        (["--model.kl=KLPenalty", "--model.kl.form=k1_loss"], ["k1_loss", "k3_loss"]),
        (["--model.policy.top_p=0.9"], ["top_p", "0.9"]),
        (["--config=algorithms/grop"], ["algorithms/grop", "algorithms/grpo"]),
        (["--config=nowhere.yaml"], ["nowhere.yaml"]),
        (["--ckpt_path=nowhere.ckpt"], ["nowhere.ckpt", "does not exist"]),
        (["--ckpt_path=last"], ["last", "runs"]),
        (["--model.estimator=StepLevel", "--data.task=ReasoningGym", "--data.task.name=chain_sum"], ["StepLevel"]),
        (["--data.task=ReasoningGym", "--data.task.name=chain_sums"], ["chain_sums", "chain_sum"]),
        (["--model.policy.max_prompt_tokens=1"], ["max_prompt_tokens", "1"]),
        (["--data.reward=CallableReward", "--data.reward.function=no_such_package.f"], ["no_such_package"]),
        (["--data.reward=CallableReward", "--data.reward.function=math.no_such"], ["no_such", "math"]),
        (["--data.reward=[]"], ["data.reward"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_wrong_requests(words, said, capsys, monkeypatch, tmp_path):
    line = error_of(["fit", *TINY, *words], capsys, monkeypatch, tmp_path)
    assert all(word in line for word in said), line


def test_a_misspelt_key_in_an_overlay(capsys, monkeypatch, tmp_path):
    (tmp_path / "mine.yaml").write_text("model:\n  clip_gradient_nrm: 1.0\n")
    line = error_of(["fit", *TINY, "--config=mine.yaml"], capsys, monkeypatch, tmp_path)
    assert "clip_gradient_nrm" in line
    assert "clip_gradient_norm" in line


def test_an_unknown_command(capsys, monkeypatch, tmp_path):
    assert "fit" in error_of(["fitt"], capsys, monkeypatch, tmp_path)


def test_a_folder_without_tokenizer(capsys, monkeypatch, tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=99, **shape)).save_pretrained(tmp_path / "model")
    words = [word for word in TINY if "fresh" not in word]
    line = error_of(["fit", *words, "--model.policy.model=./model"], capsys, monkeypatch, tmp_path)
    assert "tokenizer" in line
    assert "model" in line


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([{"question": "1+1", "answer": "2"}] * 4, ["--data.task.prompt_column=prompt"], ["prompt", "question"]),
        ([], [], ["empty", "rows.jsonl"]),
    ],
    ids=["no such column", "no rows"],
)
def test_data_sets(rows, options, said, capsys, monkeypatch, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["fit", *TINY, *DATASET, "--data.task.path=rows.jsonl", *options]
    line = error_of(words, capsys, monkeypatch, tmp_path)
    assert all(word in line for word in said), line


def test_all_rewards_missing(capsys, monkeypatch, tmp_path):
    (tmp_path / "silent_reward.py").write_text(
        "def silent(prompts, completions, **columns):\n    return [None] * len(prompts)\n"
    )
    words = ["fit", *TINY, "--data.reward=CallableReward", "--data.reward.function=silent_reward.silent"]
    line = error_of(words, capsys, monkeypatch, tmp_path, status=1)
    assert "missing" in line


def test_checkpoints_that_do_not_fit(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *TINY]) == 0
    checkpoint = str(next(tmp_path.glob("runs/run/version_0/checkpoints/last.ckpt")))
    capsys.readouterr()
    other = ["--model.policy.fresh={layers: 1, width: 32, heads: 2}", f"--ckpt_path={checkpoint}"]
    line = error_of(["validate", *TINY, *other], capsys, monkeypatch, tmp_path)
    assert "another model" in line
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.6"}, tmp_path / "other.ckpt")
    line = error_of(["validate", *TINY, "--ckpt_path=other.ckpt"], capsys, monkeypatch, tmp_path)
    assert "not written by a fit of apportion" in line
    (tmp_path / "no.ckpt").write_text("not a checkpoint")
    line = error_of(["validate", *TINY, "--ckpt_path=no.ckpt"], capsys, monkeypatch, tmp_path)
    assert "no.ckpt" in line
