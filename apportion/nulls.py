"""Null where an option needs a value. The parser lets null through for every option; here it is refused by name."""

import dataclasses
import inspect
import typing
from collections.abc import Iterator
from typing import Any, cast

from jsonargparse import Namespace
from jsonargparse._util import import_object  # pyright: ignore[reportPrivateImportUsage]

from apportion.data.errors import UsageError

from .messages import classes_in, kind_of


def refuse_nulls(sections: dict[type, tuple[str, Any]]) -> None:
    """Raise a UsageError that names the first option that is null and may not be.

    Args:
        sections: for a class, the name of the section that holds its options, and the parsed options.
    """
    for cls, (name, options) in sections.items():
        _refuse(cls, options, name)


def _refuse(cls: type, options: Any, name: str) -> None:
    hints = _hints(cls)
    for parameter in inspect.signature(cls).parameters.values():
        value = options.get(parameter.name, parameter.default)
        annotation = hints.get(parameter.name, Any)
        option = f"{name}.{parameter.name}"
        if value is None and parameter.default is not None and not _takes_null(annotation):
            kinds = [kind_of(str(part)) for part in typing.get_args(annotation) or [annotation]]
            wanted = " or ".join(kind for kind in kinds if kind) or "a value"
            raise UsageError(f"{option} is null: give {wanted}, or leave it out")
        for inner, part in _parts(value, annotation):
            _refuse(inner, part, option)


def _parts(value: Any, annotation: Any) -> Iterator[tuple[type, Any]]:
    """The classes that a value will be made of, with their options."""
    if isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _parts(item, annotation)
    elif isinstance(value, Namespace) and "class_path" in value:
        yield cast(type, import_object(value.class_path)), value.get("init_args") or Namespace()
    elif isinstance(value, Namespace):
        yield from ((cls, value) for cls in classes_in(annotation) if dataclasses.is_dataclass(cls))


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__)
    except (NameError, TypeError):  # a class of someone else's, whose annotations cannot be read
        return {}


def _takes_null(annotation: Any) -> bool:
    return annotation in (Any, type(None)) or any(_takes_null(part) for part in typing.get_args(annotation))
