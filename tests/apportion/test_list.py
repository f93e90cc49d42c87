"""`apportion list`, and that every overlay that comes with apportion is one that can be used."""

import importlib.resources
import inspect
import json
import subprocess
import sys

import pytest

import apportion.algorithms
import apportion.data
import apportion.modules
from apportion.cli import main
from apportion.listing import KINDS

CONFIGS = importlib.resources.files("apportion.configs")
OVERLAYS = sorted(
    f"{folder.name}/{file.name.removesuffix('.yaml')}"
    for folder in CONFIGS.iterdir()
    if folder.is_dir()
    for file in folder.iterdir()
    if file.name.endswith(".yaml")
)


def test_json_names_every_method(capsys):
    assert main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    named = {(row["kind"], row["name"]): row for row in rows}
    for kind, base in KINDS.items():
        for package in (apportion.algorithms, apportion.data, apportion.modules):
            for name in package.__all__:
                thing = getattr(package, name)
                if isinstance(thing, type) and issubclass(thing, base) and not inspect.isabstract(thing):
                    assert (kind, name) in named
    for form in ("k1_reward", "k1_coefficient", "k2_loss", "k3_loss"):
        assert "logp_ref" in named["kl", form]["needs"]
    for aggregation in ("token_mean", "sequence_mean", "sequence_sum", "constant_length"):
        assert ("aggregation", aggregation) in named
    for row in rows:
        assert row.keys() == {"name", "kind", "paper", "needs", "cost", "summary"}
        assert row["summary"]
        if row["kind"] in ("estimator", "objective", "kl"):
            assert row["paper"]
            assert row["cost"]
    assert named["estimator", "StepLevel"]["needs"] == ["step_rewards"]
    assert named["estimator", "GroupMean"]["needs"] == []


def test_the_table_fits_and_names_the_same(capsys):
    assert main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert {row["name"] for row in rows} <= {line.strip() for line in lines}


def test_a_module_that_cannot_be_imported(capsys):
    assert main(["list", "no_such_module"]) == 2
    assert "no_such_module" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m apportion list | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "ESTIMATOR\n"
    assert "Error" not in done.stderr


def test_there_are_the_overlays_of_the_readme():
    wanted = {"algorithms/grpo", "algorithms/oar_g", "tasks/gsm8k", "models/any", "experiments/demo"}
    assert wanted <= set(OVERLAYS)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_parses_and_begins_with_what_it_is(overlay, capsys):
    assert (CONFIGS / f"{overlay}.yaml").read_text().startswith("# ")
    base = ["--config=tasks/running_sums", "--config=models/tiny", "--config=algorithms/grpo"]
    extra = ["--model.policy.model=some/model"] if overlay == "models/any" else []
    assert main(["fit", *base, f"--config={overlay}", *extra, "--print_config"]) == 0
    assert "estimator:" in capsys.readouterr().out
