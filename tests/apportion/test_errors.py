"""Each wrong request ends in one clear line and exit status 2, or 1 where it only shows while running."""

import importlib
import json
import zipfile

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from apportion.cli import main
from tests.apportion.options import TINY

DATASET = ["--data.task=DatasetTask", "--data.task.validation_share=0.5"]


JARGON = [
    "Parser key",
    "Subtypes",
    "NestedArg",
    "Namespace",
    "Expected a",
    "<class",
    "typing.",
    "import path string",
    "\0",
]


def error_of(words, capsys, monkeypatch, tmp_path, status=2):
    """The line that the command ends with, which is all that it says on stderr."""
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(words) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert len(line) < 400
    assert not any(word in line for word in JARGON)
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # names of classes
        (["--model.estimator=GroupMeen"], ["model.estimator is 'GroupMeen'", "did you mean GroupMean?"]),
        (["--model.estimator=Clipped"], ["'Clipped'", "no known AdvantageEstimator", "GroupMean", "StepLevel"]),
        (["--model.estimator=mylab.Mine"], ["mylab.Mine", "cannot be imported", "PYTHONPATH"]),
        (["--model.estimator=null"], ["model.estimator is 'null'", "GroupMean"]),
        (["--data.task=RuningSums"], ["data.task is 'RuningSums'", "did you mean RunningSums"]),
        (["--data.reward+=CalableReward"], ["CalableReward", "did you mean CallableReward?"]),
        (["--model.optimizer=AdamX"], ["model.optimizer is 'AdamX'", "Adam"]),
        (["--trainer.callbacks+=Sampels"], ["Sampels", "did you mean Samples?"]),
        (["--data.validation_sets={a: 3}"], ["data.validation_sets is '3'", "RunningSums"]),
        # options of classes
        (["--model.estimator=GroupMean", "--model.estimator.scal=std"], ["(GroupMean)", "'scal'", "scale?"]),
        (["--model.estimator=LeaveOneOut", "--model.estimator.scale=std"], ["(LeaveOneOut)", "'scale'", "has none"]),
        (["--model.objective.epsilon_hi=0.3"], ["(Clipped)", "epsilon_hi", "did you mean epsilon_high"]),
        (["--model.policy.fresh.layer=2"], ["model.policy.fresh", "'layer'", "did you mean layers?"]),
        (["--data.validation.promts=2"], ["data.validation", "'promts'", "did you mean prompts"]),
        (["--model.warm_start=WarmStart", "--model.warm_start.step=2"], ["(WarmStart)", "'step'", "steps"]),
        (["--model.optimizer=AdamW", "--model.optimizer.lrr=1"], ["(AdamW)", "'lrr'", "did you mean lr?"]),
        (["--model.optimizer.lr=1"], ["model.optimizer has no class yet", "--model.optimizer=Class"]),
        (
            ["--data.reward=[{class_path: TaskVerdict, init_args: {wieght: 2}}]"],
            ["(TaskVerdict)", "'wieght'", "weight?"],
        ),
        # options of the command; abbreviated ones are unknown
        (["--model.agregation=token_mean"], ["--model.agregation", "did you mean --model.aggregation?"]),
        (["--data.group_siz=4"], ["--data.group_siz", "did you mean --data.group_size?"]),
        (["--trainer.max_step=4"], ["--trainer.max_step", "did you mean --trainer.max_steps?"]),
        (["--nane=x"], ["--nane", "did you mean --name?"]),
        (["words"], ["'words' stands alone", "--option=value"]),
        # values
        (["--data.group_size=four"], ["data.group_size is 'four': give a whole number"]),
        (["--data.group_size=2.5"], ["data.group_size is '2.5': give a whole number"]),
        (["--model.clip_gradient_norm=x"], ["model.clip_gradient_norm is 'x': give a number or null"]),
        (["--model.policy.temperature=hot"], ["model.policy.temperature is 'hot': give a number"]),
        (["--model.policy.fresh.layers=a"], ["model.policy.fresh.layers is 'a': give a whole number"]),
        (["--model.policy.fresh=5"], ["model.policy.fresh is '5'", "--model.policy.fresh.layers", "width"]),
        (["--model.estimator=GroupMean", "--model.estimator.scale=max"], ["scale is 'max': give none or std"]),
        (["--model.optimizer=AdamW", "--model.optimizer.lr=x"], ["model.optimizer.lr is 'x': give a number"]),
        (["--trainer.precision=bf17"], ["trainer.precision is 'bf17'", "bf16-true"]),
        (["--data.task=DatasetTask"], ["data.task.path is missing", "--data.task.path=…"]),
        (["--data.reward=CallableReward"], ["data.reward.function is missing", "--data.reward.function=…"]),
        (["--model.aggregation=mean"], ["mean", "token_mean", "sequence_mean"]),
        (["--data.group_size=1"], ["group_size", "1", "at least 2"]),
        (["--data.reward=[]"], ["data.reward"]),
        (["--trainer.precision=7"], ["trainer.precision is '7'", "32-true", "64-true", "bf16-mixed", "bf16-true"]),
        (["--trainer=null"], ["trainer is 'null'", "group of options", "--trainer."]),
        (["--model.optimizer=torch.optim.Foo"], ["model.optimizer is 'torch.optim.Foo'", "cannot be imported"]),
        (["--model.estimator.help=Foo"], ["model.estimator", "'Foo'", "GroupMean"]),
        (["--model.kl=KLPenalty", "--model.kl.coefficient=nan"], ["model.kl.coefficient is 'nan'", "finite"]),
        (["--data.validation.prompts=-3"], ["data.validation.prompts is -3", "at least 1"]),
        (["--data.validation.samples=0"], ["data.validation.samples is 0", "at least 1"]),
        (["--data.validation.prompts_per_call=0"], ["data.validation.prompts_per_call is 0", "at least 1"]),
        (["--data.validation.temperature=-1"], ["data.validation.temperature is -1.0", "0 (greedy)"]),
        (["--model.optimizer=AdamW", "--model.optimizer.lr=-1"], ["model.optimizer", "-1"]),
        (["--seed_everything=-1"], ["seed_everything is -1", "at least 0"]),
        (["--name=../x"], ["name is '../x'", "runs/"]),
        (["--name="], ["name is ''", "runs/"]),
        # null where a value must be
        (["--model.policy.max_completion_tokens=null"], ["model.policy.max_completion_tokens is null", "whole number"]),
        (["--data.validation.temperature=null"], ["data.validation.temperature is null", "a number"]),
        (["--model.optimizer=AdamW", "--model.optimizer.lr=null"], ["model.optimizer.lr is null", "a number"]),
        (["--model.policy.fresh.layers=null"], ["model.policy.fresh.layers is null", "a whole number"]),
        (["--data.group_size=null"], ["data.group_size is null", "a whole number"]),
        # what does not go together
        (["--trainer.val_check_interval=3"], ["trainer.val_check_interval is 3", "1 batch", "limit_train_batches"]),
        (["--trainer.val_check_interval=0"], ["trainer.val_check_interval is 0", "at least 1"]),
        (["--model.policy.model=no/such"], ["no/such", "fresh"]),
        (["--model.kl=KLPenalty", "--model.kl.form=k1_loss"], ["k1_loss", "k1_reward", "k3_loss"]),
        (["--model.policy.top_p=0.9"], ["top_p", "0.9"]),
        (["--model.estimator=StepLevel", "--data.task=ReasoningGym", "--data.task.name=chain_sum"], ["StepLevel"]),
        (["--data.task=ReasoningGym", "--data.task.name=chain_sums"], ["chain_sums", "did you mean chain_sum"]),
        (["--model.policy.max_prompt_tokens=1"], ["max_prompt_tokens", "1"]),
        (["--trainer.gradient_clip_val=1"], ["trainer.gradient_clip_val", "model.clip_gradient_norm"]),
        (["--trainer.limit_train_batches=-3"], ["limit_train_batches", "-3"]),
        (["--trainer.strategy=no_such"], ["no_such", "ddp"]),
        # what is not there
        (["--model.policy.fresh=null", "--model.policy.model=./nowhere"], ["./nowhere"]),
        (["--config=algorithms/grop"], ["algorithms/grop", "did you mean algorithms/grpo"]),
        (["--config=demo"], ["demo", "did you mean experiments/demo?"]),
        (["--config=nowhere.yaml"], ["nowhere.yaml", "tasks/running_sums"]),
        (["--config=."], ["'.'", "is a folder"]),
        (["--ckpt_path=nowhere.ckpt"], ["nowhere.ckpt", "does not exist"]),
        (["--ckpt_path=last"], ["last", "runs"]),
        (["--data.reward=CallableReward", "--data.reward.function=no_such_package.f"], ["no_such_package"]),
        (["--data.reward=CallableReward", "--data.reward.function=math.sqr"], ["math", "did you mean sqrt"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_wrong_requests(words, said, capsys, monkeypatch, tmp_path):
    line = error_of(["fit", *TINY, *words], capsys, monkeypatch, tmp_path)
    assert all(word in line for word in said), line


def test_a_name_of_two_classes(capsys, monkeypatch, tmp_path):
    for module in ("twin_a", "twin_b"):
        code = "from apportion.algorithms import LeaveOneOut\n\n\nclass Twin(LeaveOneOut):\n    pass\n"
        (tmp_path / f"{module}.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.import_module(module)
    line = error_of(["fit", *TINY, "--model.estimator=Twin"], capsys, monkeypatch, tmp_path)
    assert "twin_a.Twin or twin_b.Twin" in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model:\n  clip_gradient_nrm: 1.0", ["model.clip_gradient_nrm", "did you mean model.clip_gradient_norm?"]),
        ("modle:\n  clip_gradient_norm: 1.0", ["modle", "did you mean model?"]),
        ("model:\n  estimator: GroupMeen", ["mine.yaml", "GroupMeen", "did you mean GroupMean?"]),
        ("model: {policy: {init_args: {fresh: {widht: 1}}}}", ["mine.yaml", "model.policy.fresh", "widht", "width"]),
        ("model: {estimator: {class_path: GroupMean, scale: std}}", ["mine.yaml", "model.estimator", "init_args"]),
        ("data:\n  group_size: four", ["mine.yaml", "data.group_size is 'four'"]),
        ("model: {update_epochs: null}", ["model.update_epochs is null", "a whole number"]),
        ("data: 3", ["mine.yaml", "data is '3'", "data: {"]),
        ("data: [", ["mine.yaml", "YAML", "line 1"]),
        ("name: a\nname: b", ["mine.yaml", "'name' is given twice"]),
        ("- data", ["mine.yaml", "mapping"]),
        ("include: tasks/running_sum", ["tasks/running_sum", "did you mean tasks/running_sums"]),
        ("include: mine.yaml", ["mine.yaml", "circle"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_overlays(text, said, capsys, monkeypatch, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    line = error_of(["fit", *TINY, "--config=mine.yaml"], capsys, monkeypatch, tmp_path)
    assert all(word in line for word in said), line


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


def test_a_reward_that_raises_is_named(capsys, monkeypatch, tmp_path):
    (tmp_path / "raising_reward.py").write_text("def boom(completions, **columns):\n    raise ValueError('no')\n")
    monkeypatch.chdir(tmp_path)
    words = ["--data.reward=CallableReward", "--data.reward.function=raising_reward.boom"]
    assert main(["fit", *TINY, *words]) == 1
    assert "boom: raised ValueError" in capsys.readouterr().err.splitlines()[-1]


def test_checkpoints_that_do_not_fit(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *TINY]) == 0
    checkpoint = str(next(tmp_path.glob("runs/run/version_0/checkpoints/last.ckpt")))
    other = ["--model.policy.fresh={layers: 1, width: 32, heads: 2}", f"--ckpt_path={checkpoint}"]
    for command in ("fit", "validate"):
        line = error_of([command, *TINY, *other], capsys, monkeypatch, tmp_path)
        assert "another model" in line
        assert "policy." in line  # the first weight that differs
        assert "16" in line
        assert "32" in line


def test_files_that_are_no_checkpoint(capsys, monkeypatch, tmp_path):
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    with zipfile.ZipFile(tmp_path / "zip.ckpt", "w") as archive:
        archive.writestr("a", "b")
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.6"}, tmp_path / "foreign.ckpt")
    torch.save([1], tmp_path / "list.ckpt")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "object.ckpt")
    for name in ("text", "zip", "foreign", "list", "object"):
        line = error_of(["validate", *TINY, f"--ckpt_path={name}.ckpt"], capsys, monkeypatch, tmp_path)
        assert f"{name}.ckpt" in line
        assert "checkpoint" in line


def test_list_refuses_in_one_line_too(capsys, monkeypatch, tmp_path):
    assert "--jsn" in error_of(["list", "--jsn"], capsys, monkeypatch, tmp_path)
    assert "no_such_module" in error_of(["list", "no_such_module"], capsys, monkeypatch, tmp_path)
