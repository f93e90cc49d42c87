"""What is wrong with a request, in one line: the parser's nested messages cut down to the fact, with the nearest right
name."""

import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

from apportion.data.errors import nearest

ROOTS = ("model", "data", "budget", "trainer")


def one_line(message: str, parser: Any) -> str:
    """The parser's message as one line: what was given, what is allowed, what to do.

    Args:
        message: as jsonargparse makes it, several nested lines.
        parser: the parser that it comes from; its options are the known ones.
    """
    for explain in (_unknown_words, _unknown_key, _unknown_nested, _unknown_class, _missing, _wrong_value):
        line = explain(message, parser)
        if line:
            return line
    return _flat(message)


# ---- what the messages look like -----------------------------------------------------------------------------------


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
        return f"there is no option '{key}': {nearest(key.split('.')[0], {name.split('.')[0] for name in known})}"
    return f"there is no option '{key}': {nearest(key, known, most=1)}"


def _unknown_nested(message: str, parser: Any) -> str | None:
    option = re.search(r"Option '([^']+)' is not accepted", message)
    if option is None:
        return None
    if option.end() == len(message):  # said by the parser of a class: its options are all that there are
        known = sorted(name.removeprefix("--") for name in _options(parser) - {"--help", "--config", "--print_config"})
        return f"has no option '{option[1]}': " + (nearest(option[1], known) if known else "it has none at all")
    classes = re.findall(r"class_path=?\s?'([^']+)'", message[: option.end()] + message[option.end() :])
    before = re.findall(r"class_path '([^']+)'", message[: option.start()])
    owner = _imported((before or classes)[-1]) if before or classes else None
    key = _key(message[: option.start()])
    if owner is None:
        return f"{key} has no option '{option[1]}'"
    known = [name for name in _parameters(owner) if name != "self"]
    if not known:
        return f"{key}: {owner.__name__} has no options, so no '{option[1]}' either"
    return f"{key}: {owner.__name__} has no option '{option[1]}': {nearest(option[1], known)}"


def _unknown_class(message: str, parser: Any) -> str | None:
    match = re.search(r"Expected a dot import path string: (\S+)", message)
    if match is None:
        return _unimportable(message)
    key = _key(message[: match.start()])
    known = {cls.__name__ for base in _expected_classes(message, parser) for cls in _concrete(base)}
    if not known:
        return f"{key} is '{match[1]}', which is no known class: give its full path, package.module.Class"
    hint = nearest(match[1], known)
    return f"{key} is '{match[1]}', which is no known class: {hint} (another class: package.module.Class)"


def _unimportable(message: str) -> str | None:
    match = re.search(r"Problem with given class_path '([^']+)':\s+(.*)", message)
    if match is None or not re.search(r"import|module|attribute", match[2], re.IGNORECASE):
        return None
    return f"{_key(message[: match.start()])} is '{match[1]}', which cannot be imported: {match[2]}"


def _missing(message: str, parser: Any) -> str | None:
    match = re.search(r"the following arguments are required: (.*)", message)
    if match is None:
        return None
    names = [re.sub(r"^(fit|validate|test|predict)\.", "", name) for name in match[1].strip().split(", ")]
    key = _key(message[: match.start()])
    owners = re.findall(r"class_path '([^']+)'", message[: match.start()])
    options = " ".join(f"--{key}.{name}=…" if key else f"--{name}=…" for name in names)
    if owners:
        return f"{key}: {owners[-1].rsplit('.', 1)[-1]} needs {' and '.join(names)}: give {options}"
    verb = "is" if len(names) == 1 else "are"
    return f"{' and '.join(names)} {verb} missing: give {options}, or a --config that has it"


def _wrong_value(message: str, parser: Any) -> str | None:
    keys = re.findall(r'Parser key "([^"]+)"', message)
    values = re.findall(r"Given value: (.*)|Got value: (.*)", message)
    expected = re.findall(r"Expected a (.*?)(?:\. Got value: .*)?$", message, re.MULTILINE)
    if not keys or not values or not expected:
        return None
    given = next(value for value in values[0] if value)
    nested = re.match(r"NestedArg\(key='([^']+)', val=(.*)\)$", given)
    if nested:
        given = nested[2].strip("'")
    allowed: list[str] = []
    for word in expected:
        allowed += [phrase for phrase in _allowed(word) if phrase not in allowed]
    return f"{_key(message)} is '{given}': give {' or '.join(allowed)}"


# ---- helpers -------------------------------------------------------------------------------------------------------


def _options(parser: Any) -> set[str]:
    """Of a parser and of its subcommand's."""
    commands = getattr(getattr(parser, "_subcommands_action", None), "choices", None) or {}
    own = {o for o in parser._option_string_actions if o.startswith("--") and not o.endswith((".help", "+"))}
    return own.union(*(_options(command) for command in commands.values()))


def _key(message: str) -> str:
    """The dotted name of the option that a nested message speaks of."""
    return ".".join(re.findall(r'Parser key "([^"]+)"', message))


def _flat(message: str) -> str:
    """A nested message on one line, its keys joined: 'model.estimator has no option …'."""
    parts = [part.strip().removeprefix("- ") for part in message.splitlines()]
    line = " ".join(part for part in parts if part)
    return re.sub(r'^Parser key "([^"]+)":\s*', r"\1 ", re.sub(r'^Parser key "config":\s*', "", line))


def _allowed(expected: str) -> Iterator[str]:
    literal = re.match(r"typing\.Literal\[(.*)\]", expected)
    plain = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    plain |= {"NoneType": "null", "list": "a list", "dict": "a mapping"}
    kind = re.match(r"<class '(?:[\w.]+\.)?(\w+)'>", expected)
    if literal:
        yield from (choice.strip(" '\"") for choice in literal[1].split(","))
    elif kind:
        yield plain.get(kind[1], f"a {kind[1]}")
    else:
        yield expected


def _imported(class_path: str) -> type | None:
    module, _, name = class_path.rpartition(".")
    try:
        found = getattr(__import__(module, fromlist=[name]), name, None)
    except ImportError:
        return None
    return found if inspect.isclass(found) else None


def _parameters(owner: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(owner.__init__).parameters)


def _expected_classes(message: str, parser: Any) -> list[type]:
    """The base classes that the option in question takes, from the annotations on the way to it."""
    keys = re.findall(r'Parser key "([^"]+)"', message)
    owners = re.findall(r"class_path '([^']+)'", message)
    if len(keys) > 1 and owners and (owner := _imported(owners[-1])) is not None:
        return _classes_in(typing.get_type_hints(owner.__init__).get(keys[-1]))
    action = next((a for a in parser._actions if keys and a.dest == keys[0]), None)
    return _classes_in(getattr(action, "_typehint", None))


def _classes_in(annotation: Any) -> list[type]:
    if inspect.isclass(annotation) and not typing.get_args(annotation):
        return [annotation] if annotation not in (type(None), str, int, float, bool, list, dict) else []
    parts = [p for arg in typing.get_args(annotation) for p in (arg if isinstance(arg, list) else [arg])]
    return [cls for part in parts for cls in _classes_in(part)]


def _concrete(base: type) -> Iterator[type]:
    if not inspect.isabstract(base):
        yield base
    for child in base.__subclasses__():
        yield from _concrete(child)
