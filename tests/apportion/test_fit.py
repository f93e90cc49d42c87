"""The command end to end on a tiny model: every combination by a flag, and what a run leaves behind."""

import itertools
import json
import re
import subprocess
import sys

import pytest
import torch
import yaml

from apportion.cli import main
from apportion.data.tasks import RunningSums
from apportion.modules import Policy
from apportion.modules.fresh import FreshModel
from tests.apportion.options import TINY

ESTIMATORS = [
    ["GroupMean"],
    ["LeaveOneOut"],
    ["OptimalBaseline"],
    ["OutcomeReshaped"],
    ["StepLevel"],
]
KL = [None, "k1_reward", "k1_coefficient", "k2_loss", "k3_loss"]
EVEN_TASK = """
from apportion.data import Verdict
from apportion.data.tasks import RunningSums


class Even(RunningSums):
    'One that an untrained model gets right now and then.'

    def verify(self, completion, example):
        return Verdict(terms={"accuracy": float(sum(map(ord, completion)) % 2 == 0)})
"""
COMBINATIONS = list(itertools.product(ESTIMATORS, ["Reinforce", "Clipped"], KL))


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def learnable(tmp_path):
    """Options for a reward that an untrained model gets now and then: a function in the current folder."""
    code = "def checksum(prompts, completions, **columns):\n    return [sum(map(ord, c)) % 7 for c in completions]\n"
    (tmp_path / "my_reward.py").write_text(code)
    return ["--data.reward=CallableReward", "--data.reward.function=my_reward.checksum"]


def latest(tmp_path):
    return sorted(tmp_path.glob("runs/run/version_*"))[-1]


def weights(checkpoint):
    return torch.load(checkpoint, weights_only=True)["state_dict"]


def run_combination(tmp_path, options, estimator, objective, kl):
    """One batch, which must move the weights wherever the estimator sees the reward."""
    words = [f"--model.estimator={estimator[0]}", *estimator[1:], f"--model.objective={objective}"]
    if kl is not None:
        words += ["--model.kl=KLPenalty", f"--model.kl.form={kl}", "--model.kl.coefficient=0.1"]
    assert main(["fit", *[w for w in TINY if "grpo" not in w], *options, *words]) == 0
    after = weights(latest(tmp_path) / "checkpoints" / "last.ckpt")
    assert all(value.isfinite().all() for value in after.values())
    assert any(name.startswith("reference.") for name in after) == (kl is not None)
    if estimator != ["StepLevel"]:  # an untrained model gets no step right
        before = Policy(fresh=FreshModel(layers=1, width=16, heads=2)).state_dict()
        assert any(not torch.equal(value, after[f"policy.{name}"]) for name, value in before.items())


@pytest.mark.parametrize(("estimator", "objective", "kl"), [COMBINATIONS[i] for i in (1, 17, 23, 39, 45)], ids=str)
def test_combinations_run_by_a_flag(estimator, objective, kl, tmp_path, learnable):
    run_combination(tmp_path, learnable, estimator, objective, kl)


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "objective", "kl"), COMBINATIONS, ids=str)
def test_all_combinations_run_by_a_flag(estimator, objective, kl, tmp_path, learnable):
    run_combination(tmp_path, learnable, estimator, objective, kl)


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator",
    [
        ["GroupMean", "--model.estimator.scale=std"],
        ["OptimalBaseline", "--model.estimator.weight=logit_norm", "--model.estimator.leave_one_out=true"],
        ["OptimalBaseline", "--model.estimator.weight=length"],
        ["OutcomeReshaped", "--model.estimator.signal=entropy"],
    ],
    ids=str,
)
def test_options_of_estimators_run_by_a_flag(estimator, tmp_path, learnable):
    run_combination(tmp_path, learnable, estimator, "Clipped", None)


def test_what_a_run_leaves_can_be_used_again(tmp_path, capsys, learnable):
    tiny = [*TINY, *learnable]
    assert main(["fit", *tiny, "--trainer.limit_train_batches=2"]) == 0
    run = latest(tmp_path)
    checkpoint = run / "checkpoints" / "last.ckpt"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert isinstance(config["model"]["micro_batch_tokens"], int)
    assert (run / "samples.jsonl").read_text().count("\n") >= 1

    # the written configuration is the run: the same weights once more
    assert main(["fit", "--config", str(run / "config.yaml")]) == 0
    again = weights(latest(tmp_path) / "checkpoints" / "last.ckpt")
    assert latest(tmp_path) != run
    assert all(torch.equal(value, again[name]) for name, value in weights(checkpoint).items())

    # and it goes on from a checkpoint to the same end as without a stop
    assert main(["fit", *tiny, "--trainer.limit_train_batches=4", "--name=whole"]) == 0
    assert main(["fit", *tiny, "--trainer.limit_train_batches=4", f"--ckpt_path={checkpoint}"]) == 0
    resumed = weights(latest(tmp_path) / "checkpoints" / "last.ckpt")
    whole = weights(tmp_path / "runs" / "whole" / "version_0" / "checkpoints" / "last.ckpt")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    assert any(not torch.equal(value, resumed[name]) for name, value in weights(checkpoint).items())


def test_a_checkpoint_is_as_good_as_the_fit_said(tmp_path, capsys):
    (tmp_path / "even_task.py").write_text(EVEN_TASK)
    judged = [w for w in TINY if "RunningSums" not in w]
    judged += ["--data.task=even_task.Even", "--data.task.validation_prompts=40", "--data.validation.prompts=40"]
    capsys.readouterr()
    assert main(["fit", *judged, "--model.optimizer=AdamW", "--model.optimizer.lr=0.03"]) == 0
    said = re.findall(r"^validation .*: accuracy ([\d.]+) %", capsys.readouterr().out, re.MULTILINE)
    assert 0 < float(said[-1]) < 100
    for command in ("validate", "test"):
        assert main([command, *judged, "--ckpt_path=last"]) == 0
        shown = re.search(r"(val|test)/accuracy\s+│\s+([\d.]+)", capsys.readouterr().out)
        assert shown is not None
        assert shown[1] == {"validate": "val", "test": "test"}[command]
        assert round(100 * float(shown[2]), 1) == float(said[-1])


def test_predictions(tmp_path):
    assert main(["fit", *TINY]) == 0
    assert main(["predict", *TINY, "--ckpt_path=last"]) == 0
    rows = [
        json.loads(line) for file in tmp_path.glob("**/predictions*.jsonl") for line in file.read_text().splitlines()
    ]
    prompts = RunningSums(max_terms=3, train_prompts=100, validation_prompts=4).prompts("validation")["prompt"]
    assert len(rows) == 4 * 2  # validation prompts, a group each
    for row in rows:
        assert row["prompt"] in prompts
        assert len(row["advantages"]) == len(row["tokens"]) <= 8
        assert "".join(row["tokens"]).startswith(row["completion"])
        assert len(row["completion_ids"]) == len(row["tokens"])
        assert row["reward"] == row["reward_terms"]["accuracy"]
        assert row["reward"] in (0.0, 1.0)
        assert isinstance(row["truncated"], bool)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert main(["fit", *TINY, f"--name={name}", f"--seed_everything={seed}"]) == 0
    a, b, c = (
        json.dumps([json.loads(x)["completion"] for x in (tmp_path / f"runs/{n}/version_0/samples.jsonl").open()])
        for n in "abc"
    )
    assert a == b != c


def test_an_interrupted_fit_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    code = """
calls = []

def third_time(prompts, completions, **columns):
    calls.append(1)
    if len(calls) == 3:
        raise KeyboardInterrupt
    return [sum(map(ord, c)) % 7 for c in completions]
"""
    (tmp_path / "interrupting.py").write_text(code)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # Lightning would ignore SIGINT from here on
    words = ["--data.reward=CallableReward", "--data.reward.function=interrupting.third_time"]
    every_batch = ["--trainer.limit_train_batches=3", "--trainer.val_check_interval=1"]
    assert main(["fit", *TINY, *words, *every_batch]) == 130
    shown = capsys.readouterr().out
    assert "Interrupted after 2 rollout batches." in shown
    assert "The run is in runs/run/version_0" in shown
    assert "--ckpt_path last" in shown
    assert main(["fit", *TINY, *words, *every_batch, "--ckpt_path=last"]) == 0
    assert "Done: 3 rollout batches" in capsys.readouterr().out


def test_runs_can_lie_elsewhere(tmp_path):
    elsewhere = f"--trainer.default_root_dir={tmp_path / 'disk'}"
    assert main(["fit", *TINY, elsewhere]) == 0
    assert (tmp_path / "disk/runs/run/version_0/config.yaml").is_file()
    assert main(["validate", *TINY, elsewhere, "--ckpt_path=last"]) == 0
    assert not (tmp_path / "runs").exists()


def test_a_budget_stops_a_fit(tmp_path):
    assert main(["fit", *TINY, "--trainer.limit_train_batches=20", "--budget.completions=12"]) == 0
    state = torch.load(latest(tmp_path) / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["apportion"]["rollout_step"] == 3


def test_a_fit_without_the_progress_bar_is_quieter(capsys):
    assert main(["fit", *TINY, "--trainer.enable_progress_bar=false"]) == 0
    out = capsys.readouterr().out
    assert "validation at the start" not in out
    assert "Validation accuracy:" in out


@pytest.mark.slow
def test_a_pipe_gets_plain_lines_and_nothing_else(tmp_path):
    """Of a fit with a reference and a warm start, going on from its checkpoint, and the other commands."""
    sums = [word.replace("max_completion_tokens=8", "max_completion_tokens=16") for word in TINY]
    sums += ["--model.kl=KLPenalty", "--model.kl.form=k3_loss"]
    runs = [
        ["fit", *sums, "--model.warm_start=WarmStart", "--model.warm_start.steps=2"],
        ["fit", *sums, "--ckpt_path=last", "--trainer.limit_train_batches=2"],
        *([command, *sums, "--ckpt_path=last"] for command in ("validate", "test", "predict")),
    ]
    code = f"import sys\nfrom apportion.cli import main\nsys.exit(sum([main(words) for words in {runs!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    accuracy = r"accuracy [\d.]+ % \(± [\d.]+\)"
    patterns = [
        rf"validation at the start: {accuracy}",
        rf"validation after batch 1: {accuracy}",
        *summary("1 rollout batch, 1 optimizer step; sampled 4 completions", 0),
        rf"validation after batch 2: {accuracy}",
        *summary("2 rollout batches, 2 optimizer steps; sampled 8 completions", 1),
        *table("Validate", "val"),
        *table("Test", "test"),
        r"8 completions are in runs/run/version_4/predictions\.jsonl",
    ]
    lines = done.stdout.splitlines()
    if lines[0] == "warming up on worked demonstrations …":  # said where it takes a moment
        lines = lines[1:]
    assert len(lines) == len(patterns), done.stdout
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(patterns, lines, strict=True)), done.stdout


def summary(done, version):
    return [
        "",
        r"Validation accuracy: .* at the start, .* at the end\.",
        rf"Done: {done}, \d+ tokens\.",
        r"Time: \d+ s.*",
        rf"The run is in runs/run/version_{version}",
        r"To look at it: .*tensorboard --logdir runs",
    ]


def table(title, stage):
    rows = [rf"│\s+{stage}/accuracy\s+│\s+[\d.]+\s+│", rf"│\s+{stage}/accuracy_stderr\s+│\s+[\d.]+\s+│"]
    return [r"┏[━┳]+┓", rf"┃\s+{title} metric\s+┃.*┃", r"┡[━╇]+┩", *rows, r"└[─┴]+┘"]
