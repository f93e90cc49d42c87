"""Functions named by their import path, as reward callables are."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from .errors import UsageError, nearest


def import_callable(path: str) -> Callable[..., Any]:
    """The callable at `package.module.name` (or `package.module.Class.name`). Raises a UsageError if there is none."""
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise UsageError(f"reward function '{path}': give an import path like package.module.function")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
                continue  # a shorter path may be the module, and this part an attribute of it
            raise _failed_import(path, module_name, error) from error
        except Exception as error:
            raise _failed_import(path, module_name, error) from error
        break
    else:
        raise UsageError(
            f"reward function '{path}': there is no module '{parts[0]}': check the name; it must lie in the "
            "current folder, be installed, or have its folder on PYTHONPATH"
        )
    where = module_name
    for part in parts[length:]:
        if not hasattr(found, part):
            public = [name for name in dir(found) if not name.startswith("_") and callable(getattr(found, name))]
            hint = nearest(part, public) if public else "it has no functions"
            raise UsageError(f"reward function '{path}': '{where}' has no '{part}': {hint}")
        found, where = getattr(found, part), f"{where}.{part}"
    if not callable(found):
        raise UsageError(f"reward function '{path}' is of type {type(found).__name__}: name a function")
    return found


def _failed_import(path: str, module: str, error: Exception) -> UsageError:
    return UsageError(f"reward function '{path}': importing '{module}' failed ({type(error).__name__}: {error})")


def accepted_arguments(function: Callable[..., Any], path: str) -> frozenset[str] | None:
    """The keyword arguments that a function takes; None if it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-ins have no signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = frozenset(parameter.name for parameter in parameters if parameter.kind in named)
    if "completions" not in names:
        raise UsageError(
            f"reward function '{path}' takes no keyword argument 'completions': define it as "
            "function(prompts, completions, **columns)"
        )
    return names
