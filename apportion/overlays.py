"""`--config`: shipped overlays by name, overlays that include others, and the order in which all of them apply."""

import importlib.resources
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile  # pyright: ignore[reportPrivateImportUsage]

from apportion.data.errors import UsageError, nearest

from .messages import ROOTS, one_line

OPTIONS = ("--config", "-c")


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number, as in the command's own values, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
        twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key '{twice}' is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


class Overlay(ActionConfigFile):
    """The action of `--config`: takes a file or a shipped overlay's name, and expands its key `include` to earlier
    overlays, so that what the file itself says wins over what it includes."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        for path, content in expand(str(values)):
            try:
                self.apply_config(parser, cfg, self.dest, content)
            except (UsageError, TypeError) as error:
                raise UsageError(f"{path}: {one_line(str(error), parser)}") from None


def expand(name: str) -> list[tuple[Path, str]]:
    """The overlays that `name` stands for, in the order in which they apply, as (path, YAML text without `include`).

    Raises UsageError for a name that does not exist, a file that is no YAML mapping, and a circle of includes.
    """
    return _expand(locate(name), ())


def _expand(path: Path, outer: tuple[Path, ...]) -> list[tuple[Path, str]]:
    if path in outer:
        circle = " includes ".join(str(p) for p in (*outer, path))
        raise UsageError(f"overlays include each other in a circle: {circle}")
    content = read(path)
    included = content.pop("include", [])
    if isinstance(included, str):
        included = [included]
    if not isinstance(included, list) or not all(isinstance(name, str) for name in included):
        raise UsageError(f"{path}: `include` is {included!r}: give a list of overlays, say [tasks/running_sums]")
    overlays = [step for name in included for step in _expand(locate(name, path), (*outer, path))]
    return [*overlays, (path, yaml.safe_dump(content, sort_keys=False))]


def read(path: Path) -> dict[str, Any]:
    """The overlay's mapping; an empty file is an empty one."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path} is not valid YAML{where}: {getattr(error, 'problem', None) or error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds {type(content).__name__} and not a mapping of options, say `trainer: {{…}}`")
    content = {key: value for key, value in content.items() if value is not None or key not in ROOTS}  # empty sections
    for key in ROOTS:
        if not isinstance(content.get(key, {}), dict):
            raise UsageError(f"{path}: {key} is '{content[key]}': give a mapping of options, say `{key}: {{…}}`")
    return content


def locate(name: str, including: Path | None = None) -> Path:
    """The file that an overlay's name stands for: an existing file wins over a shipped overlay.

    Args:
        including: the overlay whose `include` has the name; files are looked for beside it too.
    """
    folders = [Path(), *([including.parent] if including else [])]
    for folder in folders:
        path = folder / Path(name).expanduser()
        if path.is_file():
            return path.resolve() if including else path
    for candidate in (name, f"{name}.yaml"):
        if candidate in shipped():
            return shipped()[candidate]
    if Path(name).expanduser().is_dir():
        raise UsageError(f"the overlay '{name}' is a folder: give a YAML file in it, or the name of a shipped overlay")
    word, known = name.removesuffix(".yaml"), [key.removesuffix(".yaml") for key in shipped()]
    namesakes = [key for key in known if key.rsplit("/")[-1] == word.rsplit("/")[-1]]
    hint = f"did you mean {' or '.join(namesakes)}?" if namesakes else nearest(word, known)
    raise UsageError(f"there is no file and no shipped overlay called '{name}': {hint}")


def shipped() -> dict[str, Path]:
    """Path of every overlay that comes with the package, by name (tasks/running_sums.yaml, …)."""
    root = Path(str(importlib.resources.files("apportion.configs")))
    return {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def configs_first(args: Sequence[str]) -> list[str]:
    """The same arguments with every `--config` before the other options: an option on the command line wins over the
    overlays wherever it stands."""
    configs: list[str] = []
    others: list[str] = []
    rest = iter(args)
    for word in rest:
        if word in OPTIONS:
            configs += [word, *([value] if (value := next(rest, None)) is not None else [])]
        elif word.startswith("--config="):
            configs.append(word)
        else:
            others.append(word)
    return configs + others
