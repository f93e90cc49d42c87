"""`apportion list`: every method with its paper, what it needs and what it costs, found from the classes themselves."""

import argparse
import importlib
import inspect
import json
import shutil
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from apportion.algorithms import AGGREGATIONS, KL_FORMS, AdvantageEstimator, KLPenalty, PolicyObjective
from apportion.data import Reward, RolloutScheme, Sampler, Task, UsageError
from apportion.modules import SignalProvider

KINDS: dict[str, type] = {
    "estimator": AdvantageEstimator,
    "objective": PolicyObjective,
    "scheme": RolloutScheme,
    "sampler": Sampler,
    "task": Task,
    "reward": Reward,
    "signal": SignalProvider,
}
COLUMNS = ("kind", "name", "needs", "cost", "paper")


class _Parser(argparse.ArgumentParser):
    """One whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"apportion list: {message}; it takes --json and names of modules")


def list_command(words: Sequence[str]) -> None:
    """Print the table, or JSON with --json."""
    parser = _Parser(
        prog="apportion list", description="Every method: its name, paper, needs and cost.", allow_abbrev=False
    )
    parser.add_argument("modules", nargs="*", help="further modules whose classes are listed too, say mylab")
    parser.add_argument("--json", action="store_true", help="as JSON: name, kind, paper, needs, cost, summary")
    options = parser.parse_args(words)
    for module in options.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(f"the module '{module}' cannot be imported ({error}): give an importable name") from error
    rows = list(entries())
    print(json.dumps(rows, indent=2) if options.json else table(rows), flush=True)


def entries() -> Iterator[dict[str, Any]]:
    """One dict a method: name, kind, paper, needs (names of signals), cost, summary."""
    costs = {name: cls.cost for cls in concrete(SignalProvider) for name in cls.provides}
    for kind, base in KINDS.items():
        for cls in concrete(base):
            needs = needs_of(cls)
            own = getattr(cls, "cost", None)
            from_needs = "; ".join(dict.fromkeys(costs[n] for n in needs if n in costs)) or "none"
            yield {
                "name": cls.__name__,
                "kind": kind,
                "paper": getattr(cls, "paper", ""),
                "needs": needs,
                "cost": own or (from_needs if kind in ("estimator", "objective") else ""),
                "summary": (inspect.getdoc(cls) or "").splitlines()[0],
            }
    for form, summary in KL_FORMS.items():
        needs = sorted(KLPenalty(form).needs)
        cost = "; ".join(dict.fromkeys(costs[name] for name in needs))
        yield {"name": form, "kind": "kl", "paper": KLPenalty.paper, "needs": needs, "cost": cost, "summary": summary}
    for name, summary in AGGREGATIONS.items():
        yield {"name": name, "kind": "aggregation", "paper": "", "needs": [], "cost": "none", "summary": summary}


def needs_of(cls: type) -> list[str]:
    """The signals that a class reads with its default options, and with each other choice of an option of its own."""
    if not hasattr(cls, "needs"):
        return []
    found = set(cls().needs)
    for name, hint in typing.get_type_hints(cls.__init__).items():
        for choice in typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ():
            found |= cls(**{name: choice}).needs
    return sorted(found)


def concrete(base: type) -> list[Any]:
    """Every public class below `base` that can be made, by name."""
    found: dict[str, type] = {}

    def visit(cls: type) -> None:
        if cls is not base and not inspect.isabstract(cls) and not cls.__name__.startswith("_"):
            found[cls.__name__] = cls
        for child in cls.__subclasses__():
            visit(child)

    visit(base)
    return [found[name] for name in sorted(found)]


def table(rows: list[dict[str, Any]]) -> str:
    """For people: a heading a kind, and under each name what it is, needs and costs."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    lines: list[str] = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        lines += ["", kind.upper()]
        for row in (row for row in rows if row["kind"] == kind):
            facts = {"needs": ", ".join(row["needs"]), "cost": row["cost"], "paper": row["paper"]}
            lines.append(f"  {row['name']}")
            lines += textwrap.wrap(row["summary"], width, initial_indent=" " * 6, subsequent_indent=" " * 6)
            for name, value in facts.items():
                if value:
                    lines += textwrap.wrap(
                        f"{name + ':':<7}{value}", width, initial_indent=" " * 6, subsequent_indent=" " * 13
                    )
    return "\n".join(lines[1:])
