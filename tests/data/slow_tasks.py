"""Tasks that workers may verify: they must be importable there."""

import os
import time
from pathlib import Path

from datasets import Dataset

from apportion.data.errors import RunError, UsageError
from apportion.data.tasks.answers import same_answer, time_limit
from apportion.data.tasks.base import Task, Verdict


class Slow(Task):
    """A completion says what verifying it does. `trace` is a folder in which each verification leaves a file."""

    verify_is_pure = True

    def __init__(self, trace: str, seconds: float = 0.02, broken: bool = False) -> None:
        self.trace = Path(trace)
        self.seconds = seconds
        if broken and not (self.trace / "built").exists():
            (self.trace / "built").touch()
        elif broken:
            raise KeyError("no second one")

    def prompts(self, split):
        return Dataset.from_list([{"prompt": letter} for letter in "abcdef"])

    def verify(self, completion, example):
        (self.trace / f"{completion}.{os.getpid()}").touch()
        time.sleep(self.seconds)
        match completion:
            case "raises":
                raise ValueError(f"cannot read {completion}")
            case "usage":
                raise UsageError("stop here")
            case "run":
                raise RunError("stop here too")
            case "missing":
                return Verdict(missing="too short")
            case "dies" if os.getpid() != int((self.trace / "run").read_text()):
                os._exit(3)
            case "loops":
                with time_limit(0.1, "the loop"):
                    time.sleep(60)
            case "judged":
                return Verdict({"accuracy": float(same_answer("1+x", example["answer"]))})
            case "unpicklable":
                return Verdict({"accuracy": 1.0}, missing=lambda: None)
            case "hangs":
                time.sleep(600)
        share = len(completion) / 7 + len(example["prompt"]) / 3
        return Verdict({"accuracy": 1.0, "share": share}, (0, 1), [(0, 1), (1, 2)], [share, float("-inf")])


class Overridden(Slow):
    def verify(self, completion, example):
        return Verdict({"accuracy": 1.0})


class Renamed(Slow):
    pass
