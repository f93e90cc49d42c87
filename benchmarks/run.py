"""`python -m benchmarks.run`: time and memory of apportion and of what else people use, on the same work.

Every measurement is a process of its own, and is kept in a work file under build/benchmarks as soon as it is there: an
interrupted run goes on where it stopped, as long as the commit is the same.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.plan import PRECISIONS, QUICK, Case, Plan, Scale
from benchmarks.report import write_figure, write_tables
from benchmarks.results import results, tuned_settings
from benchmarks.work import prepare, run

RESULTS = Path("benchmarks/results.json")
FIGURE, PAGE = Path("docs/speed.png"), Path("docs/speed.md")
WORK = Path("build/benchmarks")


class Measurements:
    """Answers by case and round, kept in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines()]

    def measure(self, cases: Iterable[Case]) -> None:
        """Run what is missing, round by round, so that a slow minute of the machine hits every system alike."""
        cases = list(cases)
        for number in range(max((case.rounds for case in cases), default=0)):
            for case in cases:
                key = {"name": case.name, "round": number, "job": asdict(case.job)}
                if number < case.rounds and not any(key.items() <= row.items() for row in self.rows):
                    answer = self._answer(case)
                    if answer is not None:
                        self._keep(key | {"answer": answer})

    def answers(self) -> dict[str, list[dict[str, Any]]]:
        """The answers of each case, by its name, rounds in order; cases that failed are left out."""
        found: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            found.setdefault(row["name"], []).append(row["answer"])
        return found

    def _answer(self, case: Case) -> dict[str, Any] | None:
        start = time.perf_counter()
        try:
            answer = run(case.system, case.job, peers.python(case.environment), peers.environment(case.environment))
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(f"{case.name}: failed, and is left out\n{error}", file=sys.stderr, flush=True)
            return None
        took = ", ".join(f"{name} {min(values):.2f} s" for name, values in answer.get("seconds", {}).items())
        whole = time.perf_counter() - start
        print(f"{case.name}: {took}  peak {answer['peak_gb']:.2f} GiB  ({whole:.0f} s)", flush=True)
        return answer

    def _keep(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def commit() -> str:
    """The checkout's commit, with "-changed" if something in it differs."""
    git = ["git", "describe", "--always", "--abbrev=12", "--dirty=-changed", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="little work, few repeats: shows that everything runs")
    parser.add_argument("--without", nargs="*", default=[], choices=["vllm", "growth"], help="leave these out")
    parser.add_argument("--out", type=Path, help=f"{RESULTS} unless given; build/benchmarks/quick.json with --quick")
    parser.add_argument("--fresh", action="store_true", help="begin anew instead of going on with an earlier run")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    path = WORK / f"{'quick' if options.quick else 'full'}-{commit()}.jsonl"
    if options.fresh:
        path.unlink(missing_ok=True)
    measurements = Measurements(path)
    plan = Plan(*prepare(WORK), QUICK if options.quick else Scale())
    vllm = "vllm" not in options.without
    measurements.measure(plan.machine())
    measurements.measure(plan.samplers(vllm))
    measurements.measure(plan.sweep())
    tuned = {p: tuned_settings(measurements.answers(), plan, p) for p in PRECISIONS}
    measurements.measure(plan.steps(tuned))
    if "growth" not in options.without:
        measurements.measure(plan.growth())
    command = shlex.join(["python", "-m", "benchmarks.run", *sys.argv[1:]])
    found = results(measurements.answers(), plan, tuned, command, commit())
    out = options.out or (WORK / "quick.json" if options.quick else RESULTS)
    out.write_text(json.dumps(found, indent=1) + "\n")
    if out == RESULTS:
        write_figure(found, FIGURE)
        write_tables(found, PAGE)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
