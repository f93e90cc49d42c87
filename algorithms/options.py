"""Checks of options that several estimators, objectives and penalties share. Nothing is computed here."""

from collections.abc import Iterable

from ..data.errors import UsageError, nearest


def check_choice(option: str, value: object, allowed: Iterable[str]) -> None:
    """Raise a UsageError unless `value` is one of the strings `allowed`; "true" or None never pass for a name."""
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(f"{option} is {value!r}: {nearest(str(value), allowed)}")


def check_range(option: str, value: float, low: float, high: float = float("inf"), *, above: bool = False) -> None:
    """Raise a UsageError unless low <= value <= high (low < value with `above`); NaN and non-numbers never pass."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and (low < value if above else low <= value) and value <= high):
        bounds = f"{'above' if above else 'at least'} {low:g}"
        if high < float("inf"):
            bounds += f" and at most {high:g}"
        raise UsageError(f"{option} is {value!r}: give a number {bounds}")


def check_flag(option: str, value: object) -> None:
    """Raise a UsageError unless `value` is true or false: the string "none" is not true."""
    if not isinstance(value, bool):
        raise UsageError(f"{option} is {value!r}: give true or false")
