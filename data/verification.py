"""Verdicts on completions, by processes beside this one where that has shown itself slow."""

import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any
from weakref import finalize

from .rewards import Raised, judge, verify_all
from .tasks.base import Task, Verdict

log = logging.getLogger(__name__)

SLOW = 0.5  # seconds; a batch that takes longer to verify is worth several processes
MOST_WORKERS = 8  # each needs half a gigabyte


class Verification:
    """Verdicts of a run's tasks on one batch of completions after the other.

    A batch is verified in this process, one completion after the other, until one has taken longer than `SLOW`, its
    slowest completion aside (it may have paid for a start). Workers are started then, and verify the task's
    completions once they are ready, if `Task.verify_is_pure` and the task can be pickled. Verdicts, errors and
    warnings are the same either way. If a worker fails, this process verifies whatever has no verdict yet, and
    everything after it.
    """

    def __init__(self) -> None:
        self._recipes: list[tuple[Task, bytes]] = []  # the tasks that workers verify, and what they make them from
        self._workers: _Workers | None = None
        self._failed = False

    def ahead(self, task: Task, completions: Sequence[str], examples: Sequence[dict[str, Any]]) -> None:
        """Let workers begin with completions for which `verdicts` will be asked; nothing for a task that has none."""
        recipe = self._recipe(task)
        if recipe is None or self._failed:
            return
        with self._guarded():
            if self._workers is None:
                self._workers = _Workers()
            if self._workers.ready():
                self._workers.give(recipe, completions, examples)

    def verdicts(self, task: Task, completions: Sequence[str], examples: Sequence[dict[str, Any]]) -> list[Verdict]:
        """As `verify_all` gives them. Completions given `ahead` are recognised by their text and example object."""
        known: dict[_Key, Verdict | Raised] = {}
        self.ahead(task, completions, examples)
        if self._workers is not None:
            with self._guarded():
                known.update(self._workers.results())
        seconds = [0.0]

        def found(task: Task, completion: str, example: dict[str, Any]) -> Verdict | Raised:
            outcome = known.get((id(example), completion))
            if outcome is None:
                start = time.perf_counter()
                outcome = judge(task, completion, example)
                seconds.append(time.perf_counter() - start)
            return outcome

        verdicts = verify_all(task, completions, examples, found)
        if sum(seconds) - max(seconds) > SLOW and self._recipe(task) is None:
            self._hand_over(task, sum(seconds))
        return verdicts

    def close(self) -> None:
        """End the workers, in the middle of whatever they do."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _recipe(self, task: Task) -> bytes | None:
        return next((recipe for known, recipe in self._recipes if known is task), None)

    def _hand_over(self, task: Task, seconds: float) -> None:
        """Start workers, unless the task cannot be handed over."""
        kind = type(task)
        if self._failed or not task.verify_is_pure or kind.__module__ == "__main__" or not hasattr(os, "killpg"):
            return
        try:
            self._recipes.append((task, pickle.dumps((kind, task.__dict__.get("_arguments", {})))))
        except Exception as error:  # whatever an argument raises
            log.debug("%s is verified in this process: %r", kind.__name__, error)
            return
        log.info("verifying a batch of %s took %.1f s: workers are started for it", kind.__name__, seconds)
        self.ahead(task, [], [])

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failed = True
            self.close()
            reason = "it ended by itself" if isinstance(error, EOFError | ConnectionError) else error
            log.warning("a worker that verifies completions failed (%s): the run verifies them itself again", reason)
        except BaseException:  # Ctrl-C, maybe in the middle of a message
            self.close()
            raise


_Key = tuple[int, str]  # the example's id and the completion


class _Workers:
    """Processes that verify, started with the object. They end with `close`, or with this process however it ends."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._given: dict[_Key, dict[str, Any]] = {}  # holds the examples, so that an id is one example's
        self._workers: list[_Worker] = []
        self.close = finalize(self, _end, self._workers)
        for _ in range(min(cores, MOST_WORKERS)):
            self._workers.append(_Worker())

    def ready(self) -> bool:
        return all(worker.ready() for worker in self._workers)

    def give(self, recipe: bytes, completions: Sequence[str], examples: Sequence[dict[str, Any]]) -> None:
        """Hand out what is not given yet."""
        pairs = zip(completions, examples, strict=True)
        new = {
            (id(example), completion): example
            for completion, example in pairs
            if (id(example), completion) not in self._given
        }
        self._given.update(new)
        for number, worker in enumerate(self._workers):
            worker.give(recipe, list(new.items())[number :: len(self._workers)])

    def results(self) -> Iterator[tuple[_Key, Verdict | Raised]]:
        """All that was given and came to a verdict; forgotten then. Waits for it."""
        for worker in self._workers:
            yield from worker.results()
        self._given.clear()


class _Worker:
    """One process, in a session of its own: Ctrl-C does not reach it, and whatever it starts can be ended with it."""

    def __init__(self) -> None:
        self.connection, other = Pipe()
        code = f"import sys; sys.path[:] = sys.argv[2:]; from {__name__} import work; work(int(sys.argv[1]))"
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(other.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        self._ready = False
        self._awaited: list[list[_Key]] = []

    def ready(self) -> bool:
        if not self._ready and self.connection.poll():
            self._ready = self.connection.recv()
        return self._ready

    def give(self, recipe: bytes, rows: list[tuple[_Key, dict[str, Any]]]) -> None:
        if rows:
            self.connection.send((recipe, [(completion, example) for (_, completion), example in rows]))
            self._awaited.append([key for key, _ in rows])

    def results(self) -> Iterator[tuple[_Key, Verdict | Raised]]:
        while self._awaited:
            found = self.connection.recv()
            if isinstance(found, str):
                raise RuntimeError(found)
            for key, outcome in zip(self._awaited.pop(0), found, strict=True):
                if outcome is not None:
                    yield key, outcome


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        with suppress(ProcessLookupError, PermissionError):  # it has ended by itself
            os.killpg(worker.process.pid, signal.SIGKILL)
    for worker in workers:
        worker.process.wait()
        worker.connection.close()


def work(descriptor: int) -> None:
    """What a worker runs. It says True when it is ready. A request is a pickled task and (completion, example) pairs;
    the answer is an outcome a pair, None for an error that the run has to raise itself, or, as text, why there is no
    answer."""
    connection = Connection(descriptor)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    tasks: dict[bytes, Task] = {}
    connection.send(True)
    while True:
        try:
            recipe, pairs = pickle.loads(requests.get())
            if recipe not in tasks:
                kind, arguments = pickle.loads(recipe)
                tasks[recipe] = kind(**arguments)
            connection.send([_outcome(tasks[recipe], *pair) for pair in pairs])
        except Exception as error:
            connection.send(repr(error))


def _outcome(task: Task, completion: str, example: dict[str, Any]) -> Verdict | Raised | None:
    try:
        return judge(task, completion, example)
    except Exception:
        return None


def _receive(connection: Connection, requests: "queue.SimpleQueue[bytes]") -> None:
    """Take in requests at once, so that the run never waits to hand one over; end this process and what it has started
    when the run has ended."""
    with suppress(EOFError, OSError):
        while True:
            requests.put(connection.recv_bytes())
    os.killpg(0, signal.SIGKILL)
