"""Reading an answer out of a completion, and judging it against a reference. No task lives here."""

import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

from ..errors import UsageError, nearest
from .math_judge import MathJudge

Extract = Literal["last_number", "answer_tags", "hashes", "boxed", "text"]

JUDGE_SECONDS = 5.0
_JUDGE = MathJudge()

_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-−]\$?)?"  # a minus is a sign unless it follows something that can be subtracted from
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
_FRACTION = re.compile(r"([-−]?[0-9]{1,400})\s*/\s*([0-9]{1,400})")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z][A-Za-z '’,.-]*")


class Answer(NamedTuple):
    """An answer's text, cleaned of white space (and a number of separators), and where it stands in the completion, in
    characters."""

    text: str
    span: tuple[int, int]


def extract(completion: str, how: Extract) -> Answer | None:
    r"""The answer of a completion, or None if it has none.

    Args:
        how: "last_number": the last whole or decimal number, thousands separators and a currency sign left out.
            "answer_tags": inside the last `<answer>…</answer>`. "hashes": after the last `####`, to the end of the
            line. "boxed": inside the last `\boxed{…}` or `\fbox{…}`, braces balanced. "text": the whole completion.
            White space around an answer never belongs to it, and nothing but white space is no answer.
    """
    span = _FINDERS[how](completion)
    if span is None:
        return None
    start, stop = span
    found = completion[start:stop]
    start += len(found) - len(found.lstrip())
    found = found.strip()
    if not found:
        return None
    return Answer(_clean_number(found) if how == "last_number" else found, (start, start + len(found)))


def check_extract(how: str | None, option: str) -> None:
    """Raise a UsageError for an unknown way to read an answer; None is none."""
    if how is not None and how not in get_args(Extract):
        raise UsageError(f"{option} is '{how}': {nearest(how, get_args(Extract))}")


def check_readable(references: Iterable[str | None], how: Extract, source: str) -> None:
    """Raise a UsageError if `how` asks for numbers and not one of the references is a plain number."""
    known = [reference for reference in references if reference]
    if how == "last_number" and known and all(_decimal(reference) is None for reference in known):
        raise UsageError(
            f"extract is 'last_number' but no answer of {source} is a number (the first: '{one_line(known[0], 40)}'): "
            "set data.task.extract to answer_tags, hashes, boxed or text"
        )


def same_answer(answer: str, reference: str) -> bool:
    r"""Whether an answer equals the reference.

    In this order: equal text (white space, `$`, a final full stop and `\text{…}` aside); two plain numbers or fractions
    are compared exactly, and up to a relative 1e-6 where one is not whole; a reference in words is compared as text
    without regard to case; the rest is up to math-verify (symbolic equality, sets, intervals, units).

    Raises TimeoutError when math-verify takes longer than `JUDGE_SECONDS`, and RuntimeError when it fails.
    """
    left, right = _plain(answer), _plain(reference)
    if left == right:
        return True
    a, b = _number(left), _number(right)
    if a is not None and b is not None:
        whole = a.denominator == b.denominator == 1
        return a == b if whole else abs(a - b) <= max(abs(a), abs(b)) / 1_000_000
    if _WORDS.fullmatch(right):  # as symbols, "north" and "thorn" would be the same product of five letters
        return left.casefold() == right.casefold()
    return _JUDGE.same(_as_math(reference), _as_math(answer), JUDGE_SECONDS)


class _TimeUp(BaseException):
    """Not an Exception, so that no `except Exception` of the code under the limit can swallow it."""


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise TimeoutError if the block takes longer. Uses SIGALRM: outside the main thread, and on systems without it,
    there is no limit; a single long call of C code is stopped only when it returns."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise _TimeUp

    handler = signal.signal(signal.SIGALRM, stop)
    outer = (0.0, 0.0)
    try:
        outer = signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TimeUp:
        raise TimeoutError(f"{what} took longer than {seconds:g} s") from None
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *outer)


def one_line(text: object, width: int = 200) -> str:
    """Text for an error message: white space collapsed, cut at `width`."""
    line = " ".join(str(text).split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _last_number(text: str) -> tuple[int, int] | None:
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007  (the last match is what is wanted)
        pass
    return last.span() if last else None


def _answer_tags(text: str) -> tuple[int, int] | None:
    stop = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(stop, 0))
    return (start + len("<answer>"), stop) if start >= 0 else None


def _hashes(text: str) -> tuple[int, int] | None:
    start = text.rfind("####")
    if start < 0:
        return None
    stop = text.find("\n", start)
    return start + 4, len(text) if stop < 0 else stop


def _boxed(text: str) -> tuple[int, int] | None:
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if box < 0:
        return None
    start = box + (6 if text.startswith("\\boxed", box) else 5)
    if not text[start:].lstrip().startswith("{"):  # MATH has a few of the form \boxed 5
        token = re.compile(r"\s+[^\s$]+").match(text, start)
        return token.span() if token else None
    start = text.index("{", start) + 1
    depth = 1
    for position in range(start, len(text)):
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
        if depth == 0:
            return start, position
    return None


def _whole(text: str) -> tuple[int, int]:
    return 0, len(text)


_FINDERS: dict[str, Callable[[str], tuple[int, int] | None]] = {
    "last_number": _last_number,
    "answer_tags": _answer_tags,
    "hashes": _hashes,
    "boxed": _boxed,
    "text": _whole,
}


def _plain(text: str) -> str:
    """Without what does not change an answer: dollar signs, \\text{…}, a final full stop, repeated white space."""
    text = _TEXT_COMMAND.sub(r"\1", text).replace("\\$", "").replace("$", "")
    return " ".join(text.split()).removesuffix(".")


def _clean_number(text: str) -> str:
    return text.replace(",", "").replace("$", "").replace("−", "-")


def _decimal(text: str) -> Fraction | None:
    """The value of a plain whole or decimal number, else None. Longer than 400 characters is not a plain number."""
    text = _plain(text)
    return Fraction(_clean_number(text)) if len(text) <= 400 and _NUMBER.fullmatch(text) else None


def _number(text: str) -> Fraction | None:
    """Like `_decimal`, a fraction of whole numbers included."""
    match = _FRACTION.fullmatch(text)
    if match is None:
        return _decimal(text)
    return Fraction(int(_clean_number(match[1])), int(match[2])) if int(match[2]) else None


def _as_math(text: str) -> str:
    """math-verify reads a formula only inside math delimiters."""
    text = text.replace("**", "^")
    return text if any(mark in text for mark in ("$", "\\(", "\\[", "\\boxed")) else f"${text}$"
