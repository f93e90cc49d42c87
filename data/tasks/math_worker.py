"""Compares pairs of formulas by math-verify: JSON lines in, JSON lines out. A process of its own (see math_judge.py)
that can be killed: `9^{9^{9}}` is one call of C code, which no signal interrupts. Imports nothing of apportion."""

import contextlib
import json
import logging
import sys
from typing import Any

MOST_MEMORY = 4 << 30  # bytes; a formula that needs more is not compared


def main() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever prints must not end up among the answers
    from math_verify import parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):  # they warn that their own time limits are off
        logging.getLogger(name).setLevel(logging.ERROR)
    none: Any = None  # no time limits of its own: they are typed as numbers
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        gold, given = json.loads(line)
        try:
            left, right = parse(gold, parsing_timeout=none), parse(given, parsing_timeout=none)
            found: bool | str = bool(verify(left, right, timeout_seconds=none))
        except Exception as error:
            found = repr(error)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
