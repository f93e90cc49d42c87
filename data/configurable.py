"""Objects that remember how they were made, so that a checkpoint can hold plain data instead of pickled objects."""

import dataclasses
import functools
import inspect
from typing import Any


class Configurable:
    """Base of everything that a user configures: records the arguments of the outermost constructor.

    `describe(thing)` gives `{"class_path": …, "init_args": {…}}`, the form that the command's YAML has too, whether
    the object came from YAML or from Python.
    """

    _arguments: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" not in cls.__dict__:
            return
        original = cls.__init__
        signature = inspect.signature(original)

        @functools.wraps(original)
        def remember(self: Any, *args: Any, **options: Any) -> None:
            if "_arguments" not in self.__dict__:  # the outermost class of a chain of constructors
                bound = signature.bind(self, *args, **options)
                bound.apply_defaults()
                given = dict(list(bound.arguments.items())[1:])
                self.__dict__["_arguments"] = given
            original(self, *args, **options)

        type.__setattr__(cls, "__init__", remember)  # an assignment would look like a method of Configurable


def describe(value: Any) -> Any:
    """Plain data (numbers, strings, lists, dicts) that the command's parser turns into an equal object again.

    Raises TypeError for an object that is neither plain nor `Configurable`.
    """
    if isinstance(value, Configurable):
        cls = type(value)
        arguments = value.__dict__.get("_arguments", {})
        return {
            "class_path": f"{cls.__module__}.{cls.__qualname__}",
            "init_args": {name: describe(argument) for name, argument in arguments.items()},
        }
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [describe(item) for item in value]
    raise TypeError(f"{type(value).__name__} is neither plain data nor Configurable: it cannot go into a checkpoint")
