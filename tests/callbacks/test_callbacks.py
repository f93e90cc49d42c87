"""What each callback writes, stops or prints, on made-up rollouts."""

import json
import math
import re
import sys

import pytest
import torch
from matplotlib.colors import to_rgb

from apportion.callbacks import (
    BestAndLast,
    BudgetLimit,
    CreditHeatmap,
    FitSummary,
    Hyperparameters,
    PredictionWriter,
    Progress,
    Samples,
    ScalarLayout,
    StartingPoint,
    Throughput,
)
from apportion.callbacks.credit_figure import CreditRow, credit_figure, readable
from apportion.callbacks.samples import cell, samples_table
from apportion.callbacks.scalar_layout import LAYOUT
from apportion.callbacks.wording import accuracies, duration, percent
from apportion.data.errors import UsageError

WATCHING = [Throughput, Samples, CreditHeatmap, ScalarLayout, Hyperparameters, StartingPoint, Progress, FitSummary]


def scalars(events, tag):
    return [(event.step, event.value) for event in events().Scalars(tag)]


# ---- nobody changes what is trained ----------------------------------------------------------------------------------


def test_watching_changes_no_weight_and_draws_nothing(trainer_of, stand_in, prompts):
    weights = []
    for callbacks in ([], [cls() for cls in WATCHING]):
        torch.manual_seed(0)
        module = stand_in()
        trainer_of(*callbacks, num_sanity_val_steps=-1, enable_progress_bar=bool(callbacks)).fit(
            module, datamodule=prompts()
        )
        weights.append((module.layer.weight.detach().clone(), torch.rand(1)))
    assert torch.equal(weights[0][0], weights[1][0])
    assert torch.equal(weights[0][1], weights[1][1])


@pytest.mark.parametrize("cls", WATCHING)
def test_without_tensorboard_the_run_goes_on(cls, trainer_of, stand_in, prompts, recwarn):
    module = stand_in()
    trainer_of(cls(), logger=False, enable_progress_bar=cls is Progress).fit(module, datamodule=prompts(2))
    assert module.rollout_step == 2


# ---- budget ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "steps"), [({"completions": 16}, 2), ({"completions": 17}, 3), ({"tokens": 13}, 2)])
def test_a_budget_ends_the_fit(limit, steps, trainer_of, stand_in, prompts, events):
    """8 completions and 12 tokens a batch: "3;", "4", "", "12;" for two prompts."""
    module = stand_in()
    trainer_of(BudgetLimit(**limit)).fit(module, datamodule=prompts())
    assert module.rollout_step == steps
    assert scalars(events, "budget/completions") == [(i, 8.0 * (i + 1)) for i in range(steps)]
    assert scalars(events, "budget/tokens") == [(i, 12.0 * (i + 1)) for i in range(steps)]


def test_a_spent_budget_ends_a_resumed_fit_at_once(trainer_of, stand_in, prompts, tmp_path):
    trainer = trainer_of(BudgetLimit(completions=16))
    trainer.fit(stand_in(), datamodule=prompts())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = stand_in()
    trainer_of(BudgetLimit(completions=16)).fit(
        module, datamodule=prompts(), ckpt_path=tmp_path / "a.ckpt", weights_only=True
    )
    assert module.rollout_step == 2


@pytest.mark.parametrize("limit", [{"completions": 0}, {"tokens": -3}])
def test_a_budget_below_one_is_refused(limit):
    with pytest.raises(UsageError, match="at least 1"):
        BudgetLimit(**limit)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_best_is_the_first_of_the_highest_and_last_is_the_end(trainer_of, stand_in, prompts, tmp_path):
    """Accuracies are 2/3 after batch 1 and 1 from batch 2 on; the checkpoints are compared by rollout_step."""
    trainer_of(BestAndLast(), enable_checkpointing=True, val_check_interval=1, num_sanity_val_steps=0).fit(
        stand_in(), datamodule=prompts(5)
    )
    folder = tmp_path / "run" / "version_0" / "checkpoints"
    steps = {f.name: torch.load(f, weights_only=True)["rollout_step"] for f in folder.iterdir()}
    assert steps == {"best.ckpt": 2, "last.ckpt": 5}


def test_the_best_accuracy_survives_a_resume(trainer_of, stand_in, prompts, tmp_path):
    trainer_of(BestAndLast(), enable_checkpointing=True, val_check_interval=1).fit(stand_in(), datamodule=prompts(3))
    folder = tmp_path / "run" / "version_0" / "checkpoints"
    before = (folder / "best.ckpt").stat().st_mtime_ns
    again = BestAndLast()
    trainer_of(again, enable_checkpointing=True, val_check_interval=1, max_epochs=2).fit(
        stand_in(), datamodule=prompts(3), ckpt_path=folder / "last.ckpt", weights_only=True
    )
    assert again.best_accuracy == 1.0
    assert (folder / "best.ckpt").stat().st_mtime_ns == before  # no later one was better


# ---- curves ----------------------------------------------------------------------------------------------------------


def test_times_and_throughput(trainer_of, stand_in, prompts, events):
    """Phases take 0.2, 0.1 and 0.7 seconds, for 12 tokens."""
    trainer_of(Throughput()).fit(stand_in(), datamodule=prompts(2))
    assert [value for _, value in scalars(events, "time/rollout")] == pytest.approx([0.2, 0.2])
    assert [value for _, value in scalars(events, "time/update")] == pytest.approx([0.7, 0.7])
    assert scalars(events, "throughput/tokens_per_second") == [(0, pytest.approx(12.0)), (1, pytest.approx(12.0))]
    assert all(value > 0 for _, value in scalars(events, "time/batch"))


def test_the_curves_start_before_the_first_step(trainer_of, stand_in, prompts, events):
    trainer_of(StartingPoint(), num_sanity_val_steps=-1).fit(stand_in(), datamodule=prompts(2))
    assert scalars(events, "val/accuracy") == [(0, pytest.approx(1 / 3)), (1, pytest.approx(1.0))]


def test_a_short_sanity_check_is_no_accuracy(trainer_of, stand_in, prompts, events):
    trainer_of(StartingPoint(), num_sanity_val_steps=1).fit(stand_in(), datamodule=prompts(2))
    assert scalars(events, "val/accuracy") == [(1, pytest.approx(1.0))]


def test_layout_names_the_tags_that_are_fixed(trainer_of, stand_in, prompts, events):
    tags = [tag for charts in LAYOUT.values() for chart in charts.values() for tag in chart]
    fixed = ["train/reward", "train/reward_std", "train/loss", "train/entropy", "train/grad_norm", "train/kl"]
    fixed += ["train/ratio_clipped", "val/accuracy", "val/hard/accuracy", "val/pass_at_4", "rank/mean/r_eff"]
    fixed += ["rank/mean/r_eff_null", "rank/mean/top1", "credit/zero_variance_groups", "credit/effective_rollouts"]
    fixed += ["budget/completions", "budget/tokens", "time/rollout", "time/update", "sampler/logp_gap_max"]
    assert [tag for tag in fixed if not any(re.fullmatch(known, tag) for known in tags)] == []
    assert not any(re.fullmatch(known, "val/accuracy_stderr") for known in tags)
    trainer_of(ScalarLayout()).fit(stand_in(), datamodule=prompts(1))
    assert "custom_scalars__config__" in events().Tags()["tensors"]


def test_hyperparameters_with_final_metrics(trainer_of, stand_in, prompts, events):
    trainer_of(Hyperparameters()).fit(stand_in(), datamodule=prompts(2))
    assert scalars(events, "hp/train_reward") == [(1, pytest.approx(0.25))]
    assert scalars(events, "hp/val_accuracy") == [(1, pytest.approx(1.0))]
    content = events().SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"model.estimator.scale" in content
    assert b"optimizer.lr" in content


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_samples_as_lines_and_as_a_table(trainer_of, stand_in, prompts, events, tmp_path):
    trainer_of(Samples(every_n_batches=2, count=3)).fit(stand_in(), datamodule=prompts(3))
    lines = (tmp_path / "run" / "version_0" / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [0, 0, 0, 2, 2, 2]
    assert [row["completion"] for row in rows[:3]] == ["3;", "3;", "12;"]
    assert [row["prompt"] for row in rows[:3]] == ["1+2=", "3|4\n=", "3|4\n="]
    assert [row["advantage"] for row in rows[:3]] == [0.75, 0.75, -0.25]
    assert [row["verdict"] for row in rows[:3]] == ["right", "right", "wrong"]
    assert [row["tokens"] for row in rows[:3]] == [2, 2, 3]
    assert "samples/text_summary" in events().Tags()["tensors"]


def test_a_missing_reward_is_null_and_said(trainer_of, stand_in, prompts, rollouts_of, tmp_path):
    module = stand_in()
    module.make_rollouts = lambda: rollouts_of(reward=[math.nan, 0.0, 1.0, 0.0] * 2)
    trainer_of(Samples(count=1)).fit(module, datamodule=prompts(1))
    row = json.loads((tmp_path / "run" / "version_0" / "samples.jsonl").read_text())
    assert row["reward"] is None
    assert row["verdict"] == "missing"


def test_nothing_breaks_the_table():
    row = {"prompt": "a|b\nc", "completion": "<b>*x*", "verdict": "wrong", "truncated": True, "reward": math.nan}
    lines = samples_table([{**row, "advantage": -0.5}]).splitlines()
    assert len(lines) == 3
    assert lines[2] == r"| a\|b<br>c | &lt;b&gt;\*x\* | ✗ wrong, truncated | – | -0.500 |"
    assert cell("x" * 3000).endswith(r"x … \(1000 more characters\)")


# ---- heat map --------------------------------------------------------------------------------------------------------


def test_the_heat_map_is_drawn_where_there_is_credit(trainer_of, stand_in, prompts, rollouts_of, events):
    module = stand_in()
    rewards = iter([[0.0] * 8, [1.0, 0.0, 0.0, 0.0] * 2])
    module.make_rollouts = lambda: rollouts_of(reward=next(rewards))
    trainer_of(CreditHeatmap(every_n_batches=1)).fit(module, datamodule=prompts(2))
    images = events().Images("credit/heatmap")
    assert [image.step for image in images] == [1]
    assert images[0].width > 300
    assert images[0].encoded_image_string.startswith(b"\x89PNG")


def test_colours_are_symmetric_and_cells_hold_their_tokens():
    row = CreditRow("✓ reward 1", ["3", "+", "5"], [0.5, 0.0, -0.25], [True, True, False])
    figure = credit_figure("3+5=", "one completion", [row])
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["3+5=", "one completion", "✓ reward 1", "3", "+", "5"]
    cells = figure.axes[0].patches
    red, _, blue = to_rgb(cells[0].get_facecolor())
    assert blue > red  # more likely
    assert to_rgb(cells[1].get_facecolor()) == pytest.approx((0.97, 0.97, 0.97), abs=0.02)
    assert [text.get_text() for text in figure.axes[1].get_xticklabels()] == ["-0.5", "-0.25", "0", "+0.25", "+0.5"]


def test_a_long_completion_is_cut_and_counted():
    figure = credit_figure("p", "c", [CreditRow("r", ["abcdefgh"] * 500, [1.0] * 500, [True] * 500)])
    texts = [text.get_text() for text in figure.axes[0].texts]
    shown = texts.count("abcdefgh")
    assert f"… {500 - shown} more" in texts
    assert 20 < shown < 60


def test_tokens_are_readable():
    assert [readable(token) for token in (" ", "\n", "a\tb", "x" * 40, "\U0001f600")] == [
        "·",
        "↵",
        "a⇥b",
        "x" * 31 + "…",
        "□",
    ]


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_progress_in_a_pipe(trainer_of, stand_in, prompts, capsys):
    trainer_of(Progress(every_n_batches=2), enable_progress_bar=True, num_sanity_val_steps=-1).fit(
        stand_in(0.01), datamodule=prompts(4)
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "validation at the start: accuracy 33.3 % (± 33.3)"
    assert lines[1].startswith("batch 2/4 · reward 0.25 · accuracy 33.3 % · 12 tokens/s · ")
    assert lines[1].endswith(" left")
    assert lines[2].startswith("batch 4/4 · ")
    assert lines[3] == "validation after batch 4: accuracy 100.0 % (± 0.0)"
    assert len(lines) == 4


@pytest.mark.parametrize("columns", [110, 0])  # some terminals say that they have none
def test_progress_in_a_terminal(columns, trainer_of, stand_in, prompts, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda file: (columns, 40))
    trainer_of(Progress(), enable_progress_bar=True, num_sanity_val_steps=-1).fit(stand_in(0.6), datamodule=prompts(1))
    out = capsys.readouterr().out
    assert "sampling" in out
    assert "validating" in out
    assert "1/1" in out
    assert "accuracy 33.3 %" in out


def test_the_summary_says_what_was_done(trainer_of, stand_in, prompts, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer_of(FitSummary(), num_sanity_val_steps=-1).fit(stand_in(), datamodule=prompts(3))
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0] == "Validation accuracy: 33.3 % (± 33.3) at the start, 100.0 % (± 0.0) at the end."
    assert lines[1] == "Done: 3 rollout batches, 3 optimizer steps; sampled 24 completions, 36 tokens."
    assert lines[-2] == "The run is in run/version_0"
    assert lines[-1].startswith("To look at it: ")
    assert lines[-1].endswith("tensorboard --logdir .")


def test_the_summary_goes_on_over_a_resume(trainer_of, stand_in, prompts, capsys, tmp_path):
    trainer = trainer_of(FitSummary(), num_sanity_val_steps=-1)
    trainer.fit(stand_in(), datamodule=prompts(2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    capsys.readouterr()
    trainer_of(FitSummary(), num_sanity_val_steps=-1, max_epochs=2).fit(
        stand_in(), datamodule=prompts(2), ckpt_path=tmp_path / "a.ckpt", weights_only=True
    )
    out = capsys.readouterr().out
    assert "33.3 % (± 33.3) at the start" in out
    assert "4 rollout batches" in out


def test_words():
    assert [duration(s) for s in (8.6, 124, 4321)] == ["9 s", "2 min 4 s", "1 h 12 min"]
    assert percent((0.485, 0.035)) == "48.5 % (± 3.5)"
    assert percent((0.5, math.nan)) == "50.0 %"
    found = accuracies({"val/accuracy": 0.5, "val/accuracy_stderr": 0.1, "val/hard/accuracy": 1.0, "val/score": 2})
    assert found == {"": (0.5, 0.1), "hard": (1.0, None)}


# ---- predictions -----------------------------------------------------------------------------------------------------


class Outputs:
    world_size, loggers, global_rank = 1, (), 0


def test_predictions_get_their_name_when_all_are_there(tmp_path, capsys):
    writer = PredictionWriter(tmp_path / "out" / "p.jsonl")
    writer.on_predict_start(Outputs, None)
    writer.on_predict_batch_end(
        Outputs, None, [{"prompt": "é", "reward": math.nan, "advantages": [math.inf, 1.0]}], None, 0
    )
    assert not (tmp_path / "out" / "p.jsonl").exists()
    writer.on_predict_end(Outputs, None)
    assert (tmp_path / "out" / "p.jsonl").read_text() == '{"prompt": "é", "reward": null, "advantages": [null, 1.0]}\n'
    assert capsys.readouterr().out.startswith("1 completions are in ")


def test_a_failed_prediction_leaves_only_the_part(tmp_path):
    writer = PredictionWriter(tmp_path / "p.jsonl")
    writer.on_predict_start(Outputs, None)
    writer.on_exception(Outputs, None, RuntimeError())
    assert [file.name for file in tmp_path.iterdir()] == ["p.jsonl.part"]
