"""fit --dry-run: the plan in words, and nothing on disk."""

import re

import pytest

from apportion.cli import main
from tests.apportion.options import TINY

WARM = ["--model.warm_start=WarmStart", "--model.policy.max_completion_tokens=16"]


def plan_of(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *TINY, "--data.sampler=SharedPrefixSampler", "--dry-run", *words]) == 0
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "lightning_logs").exists()
    return capsys.readouterr().out.splitlines()


def test_the_plan(tmp_path, monkeypatch, capsys):
    options = ["--trainer.limit_train_batches=7", "--data.sampler.rows_per_wave=2", "--model.update_epochs=3"]
    model, batch, update, measured, warm, end = plan_of([*options, *WARM], tmp_path, monkeypatch, capsys)
    assert re.fullmatch(r"Model: LlamaForCausalLM, [\d,]+ parameters, weights in float32, precision 32-true\.", model)
    assert batch == (
        "Rollout batch: 2 prompts x 2 completions of at most 16 tokens, sampled by SharedPrefixSampler in 2 waves."
    )
    assert re.fullmatch(r"Update: 3 x 1 optimizer steps, packed micro-batches of at most [\d,]+ tokens\.", update)
    assert re.search(r"prompts of up to 6 tokens, \d+ tokens sampled in [\d.]+ s, .* memory [\d.]+ GiB\.", measured)
    assert warm == "Before it: a warm start of 600 steps of 32, not run now."
    assert re.match(r"The fit: 7 rollout batches, 28 completions; about \d+ s at this pace", end)


@pytest.mark.parametrize(
    ("words", "batches"),
    [
        (["--trainer.limit_train_batches=null"], 50),
        (["--trainer.limit_train_batches=0.5"], 25),
        (["--trainer.limit_train_batches=null", "--budget.completions=30"], 8),
        (["--trainer.max_steps=12", "--model.minibatches=2", "--trainer.limit_train_batches=null"], 6),
    ],
)
def test_where_it_ends(words, batches, tmp_path, monkeypatch, capsys):
    assert f"The fit: {batches} rollout batches" in plan_of(words, tmp_path, monkeypatch, capsys)[-1]


def test_without_an_end(tmp_path, monkeypatch, capsys):
    words = ["--trainer.max_epochs=-1", "--trainer.limit_train_batches=null"]
    assert plan_of(words, tmp_path, monkeypatch, capsys)[-1].startswith("The fit has no end")
