"""An estimator of somebody else's: one new file, one export, one YAML, as docs/extending.md shows it."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from apportion.cli import main

DOCUMENT = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
RUN = [
    "--config=tasks/running_sums",
    "--data.task.train_prompts=100",
    "--config=algorithms/grpo",
    "--data.sampler=GenerateSampler",
    "--model.policy=Policy",
    "--model.policy.fresh={layers: 1, width: 16, heads: 2}",
    "--model.policy.max_completion_tokens=8",
    "--data.group_size=3",
    "--data.prompts_per_step=2",
    "--data.validation.prompts=4",
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=1",
    "--data.reward=CallableReward",
    "--data.reward.function=mylab.vowels",
    "--config=group_median.yaml",
]


@pytest.fixture
def mylab(tmp_path, monkeypatch):
    """The document's blocks, written where it says."""
    code, overlay = (re.findall(rf"```{kind}\n(.*?)```", DOCUMENT, re.DOTALL)[0] for kind in ("python", "yaml"))
    export = re.search(r"`mylab/__init__.py`: `(.+?)`", DOCUMENT)
    assert export is not None
    assert code.startswith("# mylab/median.py\n")
    assert overlay.startswith("# group_median.yaml")
    (tmp_path / "mylab").mkdir()
    (tmp_path / "mylab" / "median.py").write_text(code)
    reward = (
        "\n\ndef vowels(prompts, completions, **columns):\n    return [sum(map(ord, c)) % 5 for c in completions]\n"
    )
    (tmp_path / "mylab" / "__init__.py").write_text(export[1] + reward)
    (tmp_path / "group_median.yaml").write_text(overlay)
    monkeypatch.chdir(tmp_path)  # nothing else makes it importable
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "mylab"
    for name in ("mylab", "mylab.median"):
        sys.modules.pop(name, None)


def test_fit_list_and_predict_with_it(mylab, tmp_path, capsys):
    assert main(["fit", *RUN]) == 0
    run = tmp_path / "runs" / "run" / "version_0"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["estimator"]["class_path"].startswith("mylab.")

    capsys.readouterr()
    assert main(["list", "mylab", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out) if row["kind"] == "estimator"}
    assert rows["GroupMedian"]["paper"] == "ours"
    assert rows["GroupMedian"]["needs"] == []

    assert main(["predict", *RUN, "--model.estimator.weight=2", "--ckpt_path=last"]) == 0
    files = list(tmp_path.glob("**/predictions*.jsonl"))
    predictions = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(predictions) == 4 * 3
    for prompt in {row["prompt"] for row in predictions}:
        group = [row for row in predictions if row["prompt"] == prompt]
        median = sorted(row["reward"] for row in group)[1]
        for row in group:
            assert row["advantages"] == [2 * (row["reward"] - median)] * len(row["tokens"])


def test_it_takes_options_by_name_and_refuses_others(mylab, capsys):
    assert main(["fit", *RUN, "--model.estimator.wait=2"]) == 2
    assert "weight" in capsys.readouterr().err


def test_a_package_that_registered_itself_is_imported(mylab, tmp_path, capsys):
    """By the entry-point group of docs/extending.md, without being named; one that cannot be imported is named."""
    code = (mylab / "median.py").read_text()  # under another name, as classes live on from test to test
    (mylab / "median.py").write_text(code.replace("GroupMedian", "RegisteredMedian"))
    (mylab / "__init__.py").write_text((mylab / "__init__.py").read_text().replace("GroupMedian", "RegisteredMedian"))
    metadata = tmp_path / "mylab-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mylab\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[apportion.plugins]\nmylab = mylab\n")
    assert main(["list", "--json"]) == 0
    assert "RegisteredMedian" in {row["name"] for row in json.loads(capsys.readouterr().out)}
    by_name = ["--model.estimator=RegisteredMedian", "--model.estimator.weight=2"]
    assert main(["fit", *(word for word in RUN if "group_median" not in word), *by_name]) == 0

    (metadata / "entry_points.txt").write_text("[apportion.plugins]\nmylab = mylab.no_such_module\n")
    capsys.readouterr()
    assert main(["list"]) == 2
    assert "mylab.no_such_module" in capsys.readouterr().err
