"""The benchmark's bookkeeping, and that the published tables are those of the published results."""

import json
from pathlib import Path

import pytest

from benchmarks.plan import QUICK, Case, Plan, Scale
from benchmarks.report import TABLES, fill, filled, table
from benchmarks.results import fastest, peak, results, seconds, tuned_settings
from benchmarks.run import Measurements
from benchmarks.work import Job

ROOT = Path(__file__).parents[2]
KEYS = {
    "machine",
    "step_speedup_vs_trl_tuned",
    "peak_memory_share_of_trl_tuned",
    "sampler_speedup_vs_generate",
    "sampler_speedup_vs_vllm_cpu",
    "update_speedup_vs_padded",
    "diagnostics_share_of_time",
    "phases",
    "growth",
    "command",
    "versions",
}


def answers_of(plan: Plan) -> dict[str, list[dict]]:
    """Made-up answers for every case: seconds that tell the cases apart."""
    tuned = {
        "fp32": {"batch": 2, "gradient_checkpointing": False},
        "bf16": {"batch": 4, "gradient_checkpointing": True},
    }
    cases = [*plan.samplers(vllm=True), *plan.sweep(), *plan.steps(tuned), *plan.growth()]
    found: dict[str, list[dict]] = {
        "machine": [{"cores": 2, "gemm_gflops": {"fp32": 100.0, "bf16": 200.0}, "copy_gbs": 30.0, "peak_gb": 1.0}]
    }
    for number, case in enumerate(cases):
        size = {"prompts": 4, "group_size": 8, "tokens": 2048, "prompt_tokens": 512}
        weights = {"parameters": 10, "layer_parameters": 6, "head_parameters": 4}
        took = {phase: [number + 1.0, number + 3.0] for phase in ("step", "rollout", "update", "sample")}
        found[case.name] = [{"seconds": took, "peak_gb": float(number), **size, **weights}] * case.rounds
    return found


def test_ratios_say_how_often_ours_fits_into_theirs():
    plan = Plan("m", ["p"] * 16, Scale())
    answers = answers_of(plan)
    tuned = {p: tuned_settings(answers, plan, p) for p in ("fp32", "bf16")}
    found = results(answers, plan, tuned, "make bench", "abc")
    assert found.keys() >= KEYS
    ours, theirs = "step/fp32/apportion", "step/fp32/trl tuned"
    assert found["step_speedup_vs_trl_tuned"]["fp32"] == seconds(answers, theirs, "step") / seconds(
        answers, ours, "step"
    )
    assert found["peak_memory_share_of_trl_tuned"]["fp32"] == peak(answers, ours) / peak(answers, theirs)
    padded, packed = "step/bf16/generate + padded", "step/bf16/apportion, equal micro-batch"
    assert found["update_speedup_vs_padded"]["bf16"] == seconds(answers, padded, "update") / seconds(
        answers, packed, "update"
    )
    assert tuned["fp32"] == {"batch": 1, "gradient_checkpointing": False}
    assert [row["N"] for row in found["growth"]] == [32] * len(found["growth"])
    json.dumps(found)


def test_the_fastest_setting_is_found_by_its_name():
    plan = Plan("m", ["p"] * 16, QUICK)
    names = [case.name for case in plan.sweep()]
    answers = {name: [{"seconds": {"step": [9.0 - i]}}] for i, name in enumerate(names[:2])}
    assert tuned_settings(answers, plan, "fp32") == {"batch": 8, "gradient_checkpointing": True}
    with pytest.raises(SystemExit, match="failed"):
        fastest({}, "sweep/fp32/")


def test_measurements_go_on_where_they_stopped_and_failures_are_tried_again(tmp_path, monkeypatch):
    job = Job("m", ["p"], 8, 4)
    cases = [Case("a", "x", job, rounds=2), Case("b", "x", job, rounds=1)]
    asked: list[str] = []

    def run(self, case):
        asked.append(case.name)
        return None if case.name == "b" and len(asked) < 3 else {"seconds": {"step": [1.0]}, "peak_gb": 1.0}

    monkeypatch.setattr(Measurements, "_answer", run)
    path = tmp_path / "work.jsonl"
    Measurements(path).measure(cases)
    assert asked == ["a", "b", "a"]  # interleaved
    again = Measurements(path)
    again.measure(cases)
    assert asked == ["a", "b", "a", "b"]
    assert {name: len(found) for name, found in again.answers().items()} == {"a": 2, "b": 1}
    other = Case("a", "x", Job("m", ["p"], 8, 5), rounds=1)
    again.measure([other])  # the same name with other work is measured anew
    assert asked[4:] == ["a"]


def test_tables_align_numbers_and_fill_their_places():
    assert table(["a", "b"], [["x", 1.234], ["y", 120.0]]).splitlines()[1:] == [
        "| --- | ---: |",
        "| x | 1.23 |",
        "| y | 120 |",
    ]
    with pytest.raises(ValueError, match="no place for the table"):
        filled("nothing", "steps", "text")


def test_the_page_shows_the_published_results():
    found = json.loads((ROOT / "benchmarks/results.json").read_text())
    page = (ROOT / "docs/speed.md").read_text()
    assert found.keys() >= KEYS
    assert fill(page, found) == page
    assert all(f"<!-- {name} -->\n|" in page or name == "machine" for name in TABLES)
