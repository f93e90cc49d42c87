import csv
import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from apportion.data import DatasetTask, UsageError


def lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(n: int) -> list[dict]:
    return [{"question": f"{i}+1=?", "answer": str(i + 1), "level": i} for i in range(n)]


@pytest.fixture(autouse=True)
def _offline_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


def test_a_share_is_held_out_by_seed_and_no_prompt_is_in_both(tmp_path):
    path = lines(tmp_path / "a.jsonl", [*sums(20), *sums(5)])  # five prompts twice
    task = DatasetTask(path, validation_share=0.3)
    train, validation = task.prompts("train"), task.prompts("validation")
    assert len(set(validation["prompt"])) == 6
    assert not set(train["prompt"]) & set(validation["prompt"])
    assert len(train) + len(validation) == 25
    again = DatasetTask(path, validation_share=0.3)
    assert again.prompts("train").to_dict() == train.to_dict()
    assert DatasetTask(path, validation_share=0.3, seed=1).prompts("validation").to_dict() != validation.to_dict()


def test_columns_are_kept_and_prompt_and_reference_added(tmp_path):
    task = DatasetTask(lines(tmp_path / "a.jsonl", sums(4)), prompt_template="Q {prompt} {x}")
    row = task.prompts("train")[0]
    assert set(row) == {"question", "answer", "level", "prompt", "reference"}
    assert row["prompt"] == f"Q {row['question']} {{x}}"
    assert row["reference"] == row["answer"]


def test_a_validation_prompt_that_is_trained_on_is_dropped_from_training_and_counted(tmp_path, caplog):
    lines(tmp_path / "train.jsonl", sums(10))
    lines(tmp_path / "test.jsonl", sums(14)[7:])
    task = DatasetTask(str(tmp_path), validation_split="test")
    assert len(task.prompts("train")) == 7
    assert len(task.prompts("validation")) == 7
    assert task.left_out == {"training rows whose prompt is in the validation split too": 3}
    assert "3 training rows" in caplog.text


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "several", "saved", "saved_dict"])
def test_every_kind_of_source(tmp_path, kind):
    rows = sums(6)
    if kind == "json":
        path = tmp_path / "a.json"
        path.write_text(json.dumps(rows))
    elif kind == "csv":
        path = tmp_path / "a.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "parquet":
        path = tmp_path / "a.parquet"
        Dataset.from_list(rows).to_parquet(path)
    elif kind == "several":
        path = [lines(tmp_path / "a.jsonl", rows[:2]), lines(tmp_path / "b.jsonl", rows[2:])]
    else:
        path = tmp_path / "saved"
        data = Dataset.from_list(rows)
        (data if kind == "saved" else DatasetDict({"train": data})).save_to_disk(path)
    task = DatasetTask(path if isinstance(path, list) else str(path), validation_share=0.5)
    found = [*task.prompts("train")["prompt"], *task.prompts("validation")["prompt"]]
    assert sorted(found) == [row["question"] for row in rows]
    row = task.prompts("train")[0]
    assert task.verify(f"I say {row['reference']}", row).terms == {"accuracy": 1.0}  # csv makes the answers numbers


def test_gsm8k_convention(tmp_path):
    rows = [
        {"question": "Apples?", "answer": "He has 3 * 4 = <<3*4=12>>12.\n#### 1,012"},
        {"question": "Pears?", "answer": "No.\n#### -5"},
    ]
    task = DatasetTask(
        lines(tmp_path / "a.jsonl", rows), convention="gsm8k", strict_extract="hashes", validation_share=0.5
    )
    by_prompt = {row["prompt"]: row for split in ("train", "validation") for row in task.prompts(split)}
    apples = by_prompt["Apples?"]
    assert apples["reference"] == "1,012"
    assert apples["answer"] == rows[0]["answer"]
    v = task.verify("so 1012 apples", apples)
    assert v.terms == {"accuracy": 1.0, "accuracy_strict": 0.0}
    assert v.answer_span == (3, 7)
    assert task.verify("#### 1012", apples).terms == {"accuracy": 1.0, "accuracy_strict": 1.0}
    assert task.verify("#### 1012 of 1013", apples).terms == {"accuracy": 0.0, "accuracy_strict": 0.0}
    assert task.verify("#### -5", by_prompt["Pears?"]).terms["accuracy"] == 1.0
    assert task.verify("none", apples).terms == {"accuracy": 0.0, "accuracy_strict": 0.0}


def test_math_convention(tmp_path):
    rows = [
        {"problem": "Half?", "solution": r"It is $\boxed{\frac{1}{2}}$."},
        {"problem": "Set?", "solution": r"So $\boxed{(1,2)}$."},
        {"problem": "Open?", "solution": "Nobody knows."},
    ]
    task = DatasetTask(
        lines(tmp_path / "a.jsonl", rows),
        prompt_column="problem",
        answer_column="solution",
        convention="math",
        validation_share=0.5,
    )
    by_prompt = {row["prompt"]: row for split in ("train", "validation") for row in task.prompts(split)}
    assert {prompt: row["reference"] for prompt, row in by_prompt.items()} == {
        "Half?": r"\frac{1}{2}",
        "Set?": "(1,2)",
    }
    assert task.left_out == {"rows without a question or an answer": 1}
    assert task.verify(r"thus \boxed{0.5}", by_prompt["Half?"]).terms["accuracy"] == 1.0
    assert task.verify(r"thus \boxed{ (1, 2) }", by_prompt["Set?"]).terms["accuracy"] == 1.0
    assert task.verify(r"thus \boxed{(2, 1)}", by_prompt["Set?"]).terms["accuracy"] == 0.0
    assert task.verify("thus 0.5", by_prompt["Half?"]).terms["accuracy"] == 0.0


def test_chat_messages(tmp_path):
    path = lines(tmp_path / "a.jsonl", sums(3))
    row = DatasetTask(path, system_prompt="Be brief.").prompts("train")[0]
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": row["question"]}]
    chat = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": i} for i in range(3)]
    path = lines(tmp_path / "chat.jsonl", chat)
    row = DatasetTask(path, prompt_column="prompt").prompts("train")[0]
    assert row["prompt"] == [{"role": "user", "content": f"{row['answer']}?"}]
    task = DatasetTask(path, prompt_column="prompt", prompt_template="{prompt}!")
    with pytest.raises(UsageError, match="leave it out"):
        task.prompts("train")


def test_limit(tmp_path):
    path = lines(tmp_path / "a.jsonl", sums(40))
    task = DatasetTask(path, validation_share=0.5, limit=7)
    assert len(task.prompts("train")) == len(task.prompts("validation")) == 7
    assert not set(task.prompts("train")["prompt"]) & set(task.prompts("validation")["prompt"])


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            sums(3),
            {"prompt_column": "questions"},
            "no column 'questions'.*did you mean question",
        ),
        (sums(3), {"answer_column": "zzz"}, "no column 'zzz'.*known: answer, level, question"),
        (sums(3), {"train_split": "training"}, "no split 'training'.*its splits: train"),
        (sums(3), {"validation_split": "test"}, "no split 'test'"),
        (sums(3), {"convention": "gsm8k"}, "no row .* by the convention 'gsm8k'"),
        (sums(1), {}, "1 different prompt"),
        ([], {}, "is empty"),
        ([{"question": "a", "answer": "red"}, {"question": "b", "answer": "blue"}], {}, "is a number"),
        ([{"question": "a", "answer": ["1"]}], {}, "holds a list"),
        ([{"question": ["a"], "answer": "1"}], {}, "no chat messages"),
    ],
)
def test_wrong_data_is_an_error_of_one_line(tmp_path, rows, options, message):
    task = DatasetTask(lines(tmp_path / "a.jsonl", rows), **options)
    with pytest.raises(UsageError, match=message) as error:
        task.prompts("train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./nowhere", "no file or folder './nowhere'"),
        ("/nowhere/a.jsonl", "no file or folder '/nowhere/a.jsonl'"),
        ("nowhere.csv", "no file or folder 'nowhere.csv'"),
        ("owner/not_on_the_hub_or_offline", "cannot load data set 'owner/not_on_the_hub_or_offline'"),
        (["owner/a", "owner/b"], "must be files of one kind"),
    ],
)
def test_a_path_that_is_not_there_is_an_error_of_one_line(path, message):
    with pytest.raises(UsageError, match=message) as error:
        DatasetTask(path).prompts("train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[]", '{"question": 1\n xx'])
def test_empty_and_broken_files(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UsageError, match=r"is empty|cannot load") as error:
        DatasetTask(str(tmp_path / "a.json")).prompts("train")
    assert "\n" not in str(error.value)


def test_a_header_without_rows_is_an_empty_data_set(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\n")
    with pytest.raises(UsageError, match="is empty"):
        DatasetTask(str(tmp_path / "a.csv")).prompts("train")


def test_training_rows_that_are_all_in_validation_are_an_error(tmp_path):
    lines(tmp_path / "train.jsonl", sums(3))
    lines(tmp_path / "test.jsonl", sums(3))
    with pytest.raises(UsageError, match="nothing is left to train on"):
        DatasetTask(str(tmp_path), validation_split="test").prompts("train")


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_template": "no place"},
        {"validation_split": "train"},
        {"validation_share": 0.0},
        {"validation_share": 1.0},
        {"limit": 0},
        {"path": []},
        {"extract": "boxd"},
        {"convention": "gsm8"},
    ],
)
def test_impossible_options_are_errors_of_one_line(options):
    with pytest.raises(UsageError) as error:
        DatasetTask(**{"path": "a.jsonl", **options})
    assert "\n" not in str(error.value)
