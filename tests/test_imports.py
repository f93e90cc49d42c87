"""Who may import whom: five floors, each using only those below it, without cycles."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_USE = {
    "data": set(),
    "algorithms": {"data"},
    "modules": {"data", "algorithms"},
    "callbacks": {"data", "algorithms", "modules"},
    "apportion": {"data", "algorithms", "modules", "callbacks"},
}
FORBIDDEN = {"algorithms": {"lightning", "transformers"}, "data": {"transformers"}}


def modules_of(root: Path) -> dict[str, Path]:
    """Files by dotted name: data.tasks.base."""
    files = [file for folder in MAY_USE for file in sorted((root / folder).rglob("*.py"))]
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports_of(name: str, file: Path) -> Iterator[tuple[str, bool]]:
    """Dotted names that a file imports, ours without the leading `apportion.`, and whether the import is relative."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield from ((f"{source}.{alias.name}" if source else alias.name, node.level > 0) for alias in node.names)


def ours(imported: str, known: dict[str, Path]) -> str | None:
    """The file of ours that an import reads, or None."""
    if imported == "apportion" or imported.startswith("apportion."):
        rest = imported.removeprefix("apportion").removeprefix(".")
        imported = rest if rest.split(".")[0] in set(MAY_USE) - {"apportion"} else imported
    while imported and imported not in known:
        imported = imported.rpartition(".")[0]
    return imported or None


def faults(root: Path) -> list[str]:
    known = modules_of(root)
    found: list[str] = []
    uses: dict[str, set[str]] = {}
    for name, file in known.items():
        floor = name.split(".")[0]
        for imported, relative in imports_of(name, file):
            if imported.split(".")[0] in FORBIDDEN.get(floor, set()):
                found.append(f"{name} imports {imported}")
            target = ours(imported, known)
            if target is None or target == name:
                continue
            uses.setdefault(name, set()).add(target)
            other = target.split(".")[0]
            if other != floor and other not in MAY_USE[floor]:
                found.append(f"{name} imports {target}")
            if floor != "apportion" and not relative and not imported.startswith(("importlib", "torch")):
                found.append(f"{name} imports {imported} by its full name")
    return found + [f"a cycle: {' -> '.join(cycle)}" for cycle in cycles(uses, known)]


def cycles(uses: dict[str, set[str]], known: dict[str, Path]) -> list[list[str]]:
    """Cycles between files, as lists of names that end where they begin."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> None:
        if name in way:
            found.append([*way[way.index(name) :], name])
            return
        if name in done:
            return
        for target in sorted(uses.get(name, ())):
            visit(target, [*way, name])
        done.add(name)

    for name in known:
        visit(name, [])
    return found


def test_the_floors_hold():
    assert faults(ROOT) == []


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"data/a.py": "from ..modules.b import B", "modules/b.py": ""}, "data.a imports modules.b"),
        ({"algorithms/a.py": "import transformers"}, "algorithms.a imports transformers"),
        ({"modules/a.py": "from apportion.data.b import B", "data/b.py": ""}, "by its full name"),
        ({"data/a.py": "from .b import B", "data/b.py": "from .a import A"}, "a cycle: data.a -> data.b -> data.a"),
        ({"callbacks/a.py": "from ..apportion.cli import main", "apportion/cli.py": ""}, "callbacks.a imports"),
        ({"data/__init__.py": "from .a import A", "data/a.py": "from . import B"}, "a cycle"),
    ],
)
def test_each_fault_is_found(files, fault, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert any(fault in line for line in faults(tmp_path))


def test_what_is_allowed_is_allowed(tmp_path):
    files = {
        "data/b.py": "import torch",
        "algorithms/a.py": "from ..data.b import B",
        "apportion/cli.py": "import apportion.data.b",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    assert faults(tmp_path) == []
