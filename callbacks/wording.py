"""Numbers as words: validation accuracies with their errors, and lengths of time."""

import re
from collections.abc import Mapping
from typing import Any

TAG = re.compile(r"val/(?:(?P<set>.+)/)?accuracy")


def accuracies(metrics: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """(accuracy, standard error) by validation set; the only set's name is "". No error where none was logged."""
    found: dict[str, tuple[float, float | None]] = {}
    for tag, value in metrics.items():
        match = TAG.fullmatch(tag)
        if match:
            error = metrics.get(f"{tag}_stderr")
            found[match["set"] or ""] = (float(value), None if error is None else float(error))
    return found


def percent(accuracy: tuple[float, float | None], with_error: bool = True) -> str:
    """As "48.5 % (± 3.5)", the error being one standard error in points."""
    mean, error = accuracy
    known = with_error and error is not None and error == error  # NaN: one prompt has no error
    return f"{100 * mean:.1f} %" + (f" (± {100 * (error or 0.0):.1f})" if known else "")


def duration(seconds: float) -> str:
    """ "9 s", "2 min 4 s" or "1 h 12 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
