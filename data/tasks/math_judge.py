"""math-verify under a time limit that holds: in a process of its own, which is killed when it takes too long."""

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

START_SECONDS = 120.0  # for the process to import what it needs; a busy machine may be slow


class MathJudge:
    """Compares formulas, one at a time; the process is started with the first and started anew after it was killed.

    Works in any thread. It ends with the program: its input is closed then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._owner = 0  # a forked program must not talk to its parent's process

    def same(self, gold: str, given: str, seconds: float) -> bool:
        """Whether math-verify takes `given` for `gold`, both as it reads them.

        Raises TimeoutError when that takes longer than `seconds`, and RuntimeError when math-verify fails.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([gold, given]) + "\n")
            self._process.stdin.flush()
            found = json.loads(self._next_line(seconds, f"math-verify took longer than {seconds:g} s"))
        if isinstance(found, str):
            raise RuntimeError(f"math-verify failed: {found}")
        return found

    def _start(self) -> None:
        self._lines = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._owner = os.getpid()
        threading.Thread(target=_forward, args=(self._process, self._lines), daemon=True).start()
        self._next_line(START_SECONDS, f"math-verify did not start within {START_SECONDS:g} s")

    def _next_line(self, seconds: float, otherwise: str) -> str:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self._kill()
            raise TimeoutError(otherwise) from None
        if not line:
            self._kill()
            raise RuntimeError("the process of math-verify ended by itself: is the package math-verify installed?")
        return line

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None


def _forward(process: "subprocess.Popen[str]", lines: "queue.Queue[str]") -> None:
    """Every line that the process writes, and an empty one at its end."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")
