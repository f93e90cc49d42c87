"""What is wrong with a request, in one line: the parser's nested messages cut down to the fact, with the nearest right
name.

jsonargparse parses the options of a class by a parser of their own, and wraps what that one says in a message of the
outer parser. An inner line therefore speaks of its class as HERE, and the outer parser puts in the option's name.
"""

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from apportion.data.errors import nearest
from apportion.modules.trainer_options import PRECISIONS

HERE = "\0"
ROOTS = ("model", "data", "budget", "trainer")
CHOICES = {"trainer.precision": PRECISIONS}  # of options for which the parser allows more than can be used
NO_CHOICE = (torch.Tensor, torch.optim.Optimizer, LRScheduler)  # what an annotation names, and nobody asks for


def one_line(message: str, parser: Any) -> str:
    """The parser's message as one line: what was given, what is allowed, what to do.

    Args:
        message: as jsonargparse makes it, several nested lines.
        parser: the parser that it comes from; its options are the known ones.
    """
    message = message.removeprefix('Parser key "config": ')
    for explain in (
        _from_inside,
        _unknown_words,
        _unknown_key,
        _unknown_option,
        _no_group,
        _unknown_class,
        _missing,
        _wrong,
    ):
        line = explain(message, parser)
        if line:
            return line
    parts = [part.strip().removeprefix("- ") for part in message.splitlines()]
    return " ".join(part for part in parts if part)


# ---- what the messages look like -----------------------------------------------------------------------------------


def _from_inside(message: str, parser: Any) -> str | None:
    """The line of an inner parser, when there is one."""
    line = next((line for line in message.splitlines() if HERE in line), None)
    return line.strip().removeprefix("- ").replace(HERE, _key(message, parser)) if line else None


def _unknown_words(message: str, parser: Any) -> str | None:
    match = re.match(r"unrecognized arguments: (.*)", message)
    if match is None:
        return None
    word = match[1].split(" ")[0]
    if not word.startswith("-"):
        return f"'{word}' stands alone: options are given as --option=value or --option value"
    option = word.split("=")[0]
    return f"there is no option {option}: {nearest(option, _options(parser), most=1)}"


def _unknown_key(message: str, parser: Any) -> str | None:
    match = re.match(r"(?:Subcommand '\w+'|Group '(?P<group>[\w.]+)') does not accept option '(?P<key>[^']+)'", message)
    if match is None:
        return None
    key = f"{match['group']}.{match['key']}" if match["group"] else match["key"]
    known = {option.removeprefix("--") for option in _options(parser)}
    if "." in key and key.split(".")[0] not in ROOTS:  # a misspelt section: its options say nothing
        return f"there is no section '{key.split('.')[0]}': {nearest(key.split('.')[0], ROOTS)}"
    return f"there is no option '{key}': {nearest(key, known, most=1)}"


def _unknown_option(message: str, parser: Any) -> str | None:
    """Of a class: said by its own parser."""
    match = re.fullmatch(r"Option '([^']+)' is not accepted", message)
    if match is None:
        return None
    option, owner = match[1], getattr(parser, "owner", object)
    if option == "class_path":
        return f"{HERE} has options beside class_path: put them below init_args"
    if owner in NO_CHOICE or inspect.isabstract(owner):
        return f"{HERE} has no class yet, so no option '{option}': name the class first, --{HERE}=Class"
    known = sorted(name.removeprefix("--") for name in _options(parser) - {"--help"})
    return f"{HERE} ({owner.__name__}) has no option '{option}': " + (
        nearest(option, known) if known else "it has none"
    )


def _no_group(message: str, parser: Any) -> str | None:
    """One value in the place of a group of options."""
    match, key = re.search(r"Unable to load config '(.*)'", message), _key(message, parser)
    if match is None:
        return None
    known = min((option for option in _options(parser) if option.startswith(f"--{key}.")), default=f"--{key}.…")
    return f"{key} is '{match[1]}', but it is a group of options: give them one by one, say {known}"


def _unknown_class(message: str, parser: Any) -> str | None:
    match = re.search(r"Expected a dot import path string: (.+)", message)
    null = re.search(r"Not a valid subclass of \w+\. Got value: (\S+)", message)
    key, bases = _key(message, parser), list(_expected_classes(message, parser))
    if match and not key:  # --KEY.help=CLASS
        key = message.split(":")[0].removeprefix("--")
        bases = list(_classes_of(key.removesuffix(".help"), parser))
    if match is None and null is None:
        return _not_importable(message, key)
    if "Expected a <class 'float'>" in message or "Expected a <class 'int'>" in message:
        return None  # a number would do as well: the wrong value is the better explanation
    given = match[1] if match else {"None": "null"}.get(null[1], null[1]) if null else ""
    options = [name for base in bases if dataclasses.is_dataclass(base) for name in inspect.signature(base).parameters]
    if options:
        return f"{key} is '{given}', but has options of its own, say --{key}.{options[0]}: {', '.join(sorted(options))}"
    known = {cls.__name__ for base in bases for cls in _concrete(base)}
    if not known:
        return f"{key} is '{given}', which is no known class: give its full path, package.module.Class"
    near = nearest(given, known)
    what = "/".join(base.__name__ for base in bases)
    return f"{key} is '{given}', which is no known {what}: {near} (one of your own: package.module.Class)"


def _not_importable(message: str, key: str) -> str | None:
    several = re.search(r"Multiple subclasses with name (\S+?)\. .*: (.*)\.", message)
    if several:
        return f"{key} is '{several[1]}', which several classes are called: give {several[2].replace(', ', ' or ')}"
    match = re.search(r"Problem with given class_path '([^']+)':\s+(.*)", message)
    factory = re.search(r"expects a function or a callable class: (.*)\n(?:.*\n)*.*Given value: (.*)", message)
    if factory and "." in factory[2]:
        return f"{key} is '{factory[2]}', which cannot be imported ({factory[1]}): check the name"
    if match is None or not re.search(r"import|module|attribute", match[2], re.IGNORECASE):
        return None
    return (
        f"{key} is '{match[1]}', which cannot be imported ({match[2].strip().rstrip('.')}): check the name; its folder "
        "must be the current one, installed, or on PYTHONPATH"
    )


def _missing(message: str, parser: Any) -> str | None:
    match = re.search(r"the following arguments are required: (.*)", message)
    if match is None:
        return None
    names = [re.sub(r"^(fit|validate|test|predict)\.", "", name) for name in match[1].strip().split(", ")]
    names = [f"{HERE}.{name}" if _is_inner(parser) else name for name in names]
    options = " ".join(f"--{name}=…" for name in names)
    verb = "is" if len(names) == 1 else "are"
    return f"{' and '.join(names)} {verb} missing: give {options}, or a --config that has it"


def _wrong(message: str, parser: Any) -> str | None:
    """A value of the wrong type."""
    given = re.search(r"(?:Given value|Got value): (.*)", message)
    expected = re.findall(r"Expected an? (?!path )(.*?)(?:\. Got value: .*)?$", message, re.MULTILINE)
    if not _key(message, parser) or given is None or not expected:
        return None
    value = given[1]
    nested = re.match(r"NestedArg\(key='([^']+)', val=(.*)\)$", value)
    if nested:
        value = nested[2].strip("'")
    choices = [choice for kind in expected for choice in _choices(kind)]
    choices = list(CHOICES.get(_key(message, parser), dict.fromkeys(choices)))
    if len(choices) > 4 or _key(message, parser) in CHOICES:
        return f"{_key(message, parser)} is '{value}': {nearest(value, choices)}"
    kinds = [kind for word in expected if (kind := kind_of(word))]
    if value.lstrip("-+").lower() in ("nan", "inf", "infinity"):
        kinds = [kind.replace("a number", "a finite number") for kind in kinds]
    shown, wanted = "null" if value == "None" else f"'{value}'", " or ".join(dict.fromkeys([*choices, *kinds]))
    return f"{_key(message, parser)} is {shown}: give {wanted}"


# ---- helpers -------------------------------------------------------------------------------------------------------


def _is_inner(parser: Any) -> bool:
    return getattr(parser, "_inner_parser", False)


def _options(parser: Any) -> set[str]:
    """Of a parser and of its subcommand's."""
    commands = getattr(getattr(parser, "_subcommands_action", None), "choices", None) or {}
    own = {o for o in parser._option_string_actions if o.startswith("--") and not o.endswith((".help", "+"))}
    return own.union(*(_options(command) for command in commands.values()))


def _key(message: str, parser: Any) -> str:
    """The dotted name of the option that a message speaks of."""
    keys = re.findall(r'Parser key "([^"]+)"', message)
    return ".".join([HERE, *keys] if _is_inner(parser) else keys)


def _choices(expected: str) -> Iterator[str]:
    literal = re.match(r"typing\.Literal\[(.*)\]", expected)
    if literal:
        yield from (choice.strip(" '\"") for choice in literal[1].split(","))


def kind_of(expected: str) -> str | None:
    plain = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    plain |= {"NoneType": "null", "list": "a list", "Iterable": "a list", "dict": "a mapping"}
    kind = re.match(r"<class '(?:[\w.]+\.)?(\w+)'>", expected)
    if kind:
        return plain.get(kind[1], f"a {kind[1]}")
    known = expected.startswith(("typing.Literal", "dot import path", "instantiatable"))
    return None if known else expected


def _expected_classes(message: str, parser: Any) -> Iterable[type]:
    """The base classes that the option in question takes."""
    keys = re.findall(r'Parser key "([^"]+)"', message)
    return _classes_of(keys[-1], parser) if keys else ()


def _classes_of(dest: str, parser: Any) -> Iterable[type]:
    action = next((a for a in parser._actions if a.dest == dest), None)
    return dict.fromkeys(classes_in(getattr(action, "_typehint", None)))


def classes_in(annotation: Any) -> Iterator[type]:
    if not inspect.isclass(annotation) or typing.get_args(annotation):
        for argument in typing.get_args(annotation)[-1 if _is_callable(annotation) else 0 :]:
            yield from classes_in(argument)
    elif annotation not in (type(None), str, int, float, bool, list, dict, torch.Tensor):
        yield annotation


def _is_callable(annotation: Any) -> bool:
    """A factory: what counts is the class that it makes."""
    return any(isinstance(argument, list) for argument in typing.get_args(annotation))


def _concrete(base: type) -> Iterator[type]:
    if not inspect.isabstract(base) and base not in NO_CHOICE and not base.__name__.startswith("_"):
        yield base
    for child in base.__subclasses__():
        yield from _concrete(child)
