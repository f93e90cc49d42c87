"""The two errors that a user is meant to read. Each is one line: what was given, what is allowed, what to do."""

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """The request itself is wrong (an option, a name, a combination). The command ends with exit status 2."""


class RunError(RuntimeError):
    """Something failed while running (every reward missing, a NaN loss, …). The command ends with exit status 1."""


def nearest(word: str, known: Iterable[str], most: int = 2) -> str:
    """The end of an error about an unknown name: the nearest known ones (at most `most`); all if they are few."""
    known = sorted(known)
    matches = difflib.get_close_matches(word, known, n=most, cutoff=0.5)
    if matches:
        rest = [name for name in known if name not in matches] if len(known) <= 8 else []
        return f"did you mean {' or '.join(matches)}?" + (f" (also known: {', '.join(rest)})" if rest else "")
    return f"known: {', '.join(known)}" if len(known) <= 30 else f"none of the {len(known)} known ones is like it"
