"""Verification by workers: the same as in this process, and only where it pays."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from apportion.data import DatasetTask, ReasoningGym, RunError, RunningSums, UsageError, verification, verify_all
from apportion.data.datamodule import RolloutDataModule, Validation
from apportion.data.sampler import Sampler
from apportion.data.verification import Verification
from tests.data.slow_tasks import Overridden, Renamed, Slow
from tests.data.test_datamodule import OneCharacter, Repeat

EXAMPLES = [{"prompt": "p" * length, "answer": "x+1", "prompt_id": length} for length in range(1, 5)]


@pytest.fixture
def started(monkeypatch):
    """The workers that were started, two at a time, ended in the end."""
    found = []

    class Counted(verification._Workers):
        def __init__(self):
            super().__init__()
            found.append(self)

    monkeypatch.setattr(verification, "MOST_WORKERS", 2)
    monkeypatch.setattr(verification, "_Workers", Counted)
    yield found
    for workers in found:
        workers.close()


@pytest.fixture
def trace(tmp_path):
    (tmp_path / "run").write_text(str(os.getpid()))
    return tmp_path


def slow_batch(run, task):
    """Let it take longer than is slow, and wait for the workers."""
    task.seconds, seconds = 0.2, task.seconds
    run.verdicts(task, ["a"] * 5, [EXAMPLES[0]] * 5)
    task.seconds = seconds
    until = time.monotonic() + 120
    while run._workers is not None and not run._workers.ready():
        assert time.monotonic() < until
        time.sleep(0.05)


def verified_by(trace, completion) -> set[int]:
    return {int(file.suffix[1:]) for file in trace.glob(f"{completion}.*")}


def pids(workers):
    return [worker.process.pid for worker in workers._workers]


def test_fast_tasks_pay_for_nothing(started, trace):
    run = Verification()
    task = Slow(str(trace), seconds=0)
    for _ in range(3):
        assert run.verdicts(task, ["a", "bb"], EXAMPLES[:2]) == verify_all(task, ["a", "bb"], EXAMPLES[:2])
    run.ahead(task, ["a"], EXAMPLES[:1])
    assert not started


def test_one_slow_completion_is_not_a_slow_batch(started, trace):
    """The first one may have to start what judges."""
    run = Verification()
    run.verdicts(Slow(str(trace), seconds=verification.SLOW + 0.1), ["a"], EXAMPLES[:1])
    assert not started


def test_tasks_that_cannot_be_handed_over_are_verified_here(started, trace, monkeypatch):
    class Local(Slow):
        pass

    monkeypatch.setattr(Renamed, "__module__", "__main__")
    for kind in (Local, Overridden, Renamed):
        run = Verification()
        task = kind(str(trace), seconds=0.2)
        monkeypatch.setattr(verification, "SLOW", -1.0)
        assert len(run.verdicts(task, ["a"], EXAMPLES[:1])) == 1
    assert not started


def test_which_tasks_are_pure():
    for kind in (DatasetTask, ReasoningGym, RunningSums, Slow, Renamed):
        assert kind.verify_is_pure
    assert not Overridden.verify_is_pure


@pytest.mark.slow
def test_workers_give_the_same_verdicts_warnings_and_errors(started, trace, caplog):
    task = Slow(str(trace))
    run = Verification()
    slow_batch(run, task)
    assert len(started) == 1
    completions = ["a", "raises", "missing", "loops", "judged", "a", "raises", "bbb"]
    examples = [EXAMPLES[i % 4] for i in range(8)]
    run.ahead(task, completions[:3], examples[:3])
    found = run.verdicts(task, completions, examples)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert verified_by(trace, "bbb") <= set(pids(started[0]))
    assert os.getpid() not in verified_by(trace, "raises") | verified_by(trace, "loops")
    assert found[4].terms == {"accuracy": 1.0}
    assert found[3].missing == "verifier raised TimeoutError"

    caplog.clear()
    again = Slow(str(trace))
    assert found == verify_all(again, completions, examples)
    assert warnings == [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2
    for completion, error in (("usage", UsageError), ("run", RunError)):
        with pytest.raises(error, match="stop here"):
            run.verdicts(task, ["a", completion], EXAMPLES[:2])
    assert run.verdicts(task, ["cc"], EXAMPLES[:1]) == verify_all(task, ["cc"], EXAMPLES[:1])

    processes = [worker.process for worker in started[0]._workers]
    run.close()
    assert {process.returncode for process in processes} == {-signal.SIGKILL}
    assert run.verdicts(task, ["d"], EXAMPLES[:1]) == verify_all(task, ["d"], EXAMPLES[:1])  # a second fit
    assert len(started) == 2
    assert verified_by(trace, "d") == {os.getpid()}  # nobody waits for workers that start
    run.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("dies", "it ended by itself"),
        ("killed", "it ended by itself"),
        ("unpicklable", "pickle"),
        ("broken", "no second one"),
    ],
)
def test_a_failing_worker_loses_nothing(started, trace, caplog, completion, reason):
    task = Slow(str(trace), broken=completion == "broken")
    run = Verification()
    slow_batch(run, task)
    if completion == "killed":
        os.kill(pids(started[0])[0], signal.SIGKILL)
    completions = [completion, "a", "bb", "raises"]
    found = run.verdicts(task, completions, EXAMPLES)
    assert [verdict.terms.get("share") for verdict in found[1:3]] == [1 / 7 + 2 / 3, 2 / 7 + 3 / 3]
    assert found[3].missing == "verifier raised ValueError"
    assert os.getpid() in verified_by(trace, completion)
    run.ahead(task, completions, EXAMPLES)
    run.verdicts(task, completions, EXAMPLES)
    slow_batch(run, task)
    warnings = [record.getMessage() for record in caplog.records if "a worker" in record.getMessage()]
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert len(started) == 1
    assert all(worker.process.returncode is not None for worker in started[0]._workers)


class Waves(Sampler):
    """A prompt at a time; waits after each until another process has verified its completions."""

    def generate(self, policy, prefixes, members, limits, seeds, finished=None):
        samples = Repeat().generate(policy, prefixes, members, limits, seeds)
        for prompt, prefix in enumerate(prefixes):
            rows = slice(prompt * members, (prompt + 1) * members)
            fields = {name: getattr(samples, name)[rows] for name in samples.__dataclass_fields__}
            assert finished is not None
            finished([prompt], type(samples)(**fields))
            until = time.monotonic() + 120
            while not list(self.trace.glob(f"{chr(prefix[0]) * (members - 1)}.*")):
                assert time.monotonic() < until
                time.sleep(0.01)
        return samples


@pytest.mark.slow
def test_a_wave_is_verified_while_the_next_is_sampled(started, trace):
    """The engine goes on only when its first prompt's completions are verified."""
    policy, rewards = OneCharacter(), []
    for sampler in (Waves(), Repeat()):
        task = Slow(str(trace))
        data = RolloutDataModule(task, sampler, group_size=3, prompts_per_step=2, validation=Validation(prompts=5))
        rows = data.load_prompts(task, "train", policy)
        if isinstance(sampler, Waves):
            sampler.trace = trace
            slow_batch(data._verification, task)
        rewards.append(data.collect(rows[1:4], policy, step=0))
        if isinstance(sampler, Waves):
            assert os.getpid() not in verified_by(trace, "bb") | verified_by(trace, "cc")
        data.on_exception(KeyboardInterrupt())
    assert len(started) == 1
    assert all(not is_running(pid) for pid in pids(started[0]))
    for name in ("reward", "step_reward", "step_index", "answer_span"):
        assert torch.equal(getattr(rewards[0], name), getattr(rewards[1], name))


SCRIPT = """
import sys, time
from apportion.data.verification import Verification
from tests.data.slow_tasks import Slow
run = Verification()
task = Slow(sys.argv[1], seconds=0.2)
examples = [{"prompt": "p", "answer": "1"}] * 5
run.verdicts(task, list("abcde"), examples)
while not run._workers.ready():
    time.sleep(0.05)
run.ahead(task, ["hangs", "also"], examples[:2])
while not list(task.trace.glob("hangs.*")):
    time.sleep(0.05)
print(*(worker.process.pid for worker in run._workers._workers), flush=True)
if sys.argv[2] == "wait":
    run.verdicts(task, ["hangs", "also"], examples[:2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, None])
def test_no_worker_outlives_the_run(trace, end):
    """In the middle of a verification; None is a run that simply ends. The script has no guard against being imported:
    a worker that imported it would start workers of its own."""
    (trace / "script.py").write_text(SCRIPT)
    run = subprocess.Popen(
        [sys.executable, str(trace / "script.py"), str(trace), "wait" if end else "end"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    workers = [int(pid) for pid in run.stdout.readline().split()]
    assert workers
    if end:
        run.send_signal(end)
    _, errors = run.communicate(timeout=60)
    assert errors.count("Traceback") == (end == signal.SIGINT)
    until = time.monotonic() + 10
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return state not in ("", "Z")
