"""Loads YAML files named by flags, such as a judge's, into dataclasses of settings, and parses JSON flags."""

import json
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml

from spmdrl.config.dump import redact_text
from spmdrl.config.fields import nearest

S = TypeVar("S")
SUFFIXES = (".yaml", ".yml")
"""Suffixes that identify a setting's value as the path of a YAML file."""
KINDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    dict: "a list of names with numbers, such as {helpfulness: 0.65}",
}
"""Type of a setting -> its description for messages. The type `object` accepts any value and needs no description."""


def read_settings(
    flag: str,
    file: str,
    schema: type[S],
    what: str,
    check: Callable[[S, Collection[str]], list[str]],
    secret: Collection[str] = (),
    prefix: str | None = None,
) -> S:
    """Load a YAML file into an instance of `schema`.

    Args:
        flag: the flag that named the file.
        file: path of the file.
        schema: the dataclass for the settings.
        what: what the settings describe, such as `a judge`, for the error if the file has no settings.
        check: function that takes the settings and the names set in the file, and returns a line for each problem.
        secret: names of settings whose values must not appear in messages.
        prefix: text before the file's path in messages about its settings, or None to use the flag.

    Raises:
        ValueError: the file cannot be read, or its settings are invalid; the message has a line for each problem.
    """
    given, problems = _read_fields(flag, file, schema, what, secret)
    found = schema(**given)
    problems = problems or _value_problems(found) + check(found, given)
    if problems:
        raise ValueError("\n".join(f"{f'{flag} ' if prefix is None else prefix}{file}: {each}" for each in problems))
    return found


def read_text(flag: str, file: str) -> str:
    """Return the text of a file named by a flag. Raises ValueError, which names the flag, if it cannot be read."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {file}: cannot be read ({error})") from None


def read_json(flag: str, text: str, example: str) -> dict[str, Any]:
    """Parse a flag's JSON object; empty text gives {}. Raises ValueError, which names the flag, if it is invalid."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag}: is not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{flag}: must be a JSON object, such as {example}")
    return found


def _read_fields(
    flag: str, file: str, schema: type, what: str, secret: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    text = read_text(flag, file)
    try:
        problems = _repeated(yaml.compose(text, Loader=yaml.SafeLoader))
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{flag} {file}: is not valid YAML ({' '.join(str(error).split())})") from None
    except RecursionError:
        raise ValueError(f"{flag} {file}: is nested too deeply; it must contain settings with their values") from None
    if not isinstance(found, dict):
        raise ValueError(f"{flag} {file}: contains no settings of {what}")
    kinds, given = {each.name: _kind(each.type) for each in fields(schema)}, {}
    for name, value in found.items():
        if name not in kinds:
            near = nearest(str(name), kinds)
            problems.append(f"{name}: unknown{f'; did you mean {near[0]}?' if near else '.'} Valid: {', '.join(kinds)}")
            continue
        try:
            given[name] = _as(kinds[name], value)
        except (TypeError, ValueError):
            shown = "its value" if name in secret else repr(redact_text(str(value)))
            problems.append(f"{name}: {shown} is not {KINDS[kinds[name]]}")
    return given, problems


def _value_problems(found: Any) -> list[str]:
    """Return a line for each value that is not among its type's choices or violates its rule (`declare.py`)."""
    problems = []
    for each in fields(found):
        value, choices, rule = getattr(found, each.name), get_args(each.type), each.metadata.get("rule")
        if get_origin(each.type) is Literal and value not in choices:
            problems.append(f"{each.name} {value!r}: must be one of {', '.join(choices)}")
        elif rule and not rule.valid(value):
            problems.append(f"{each.name} {value}: {rule.says}")
    return problems


def _kind(hint: Any) -> type:
    """Return the type that a field's value is converted to, or `object` if the field accepts any YAML value."""
    if get_origin(hint) is Literal:
        return str
    return object if hint is dict else get_origin(hint) or hint


def _repeated(root: yaml.Node | None) -> list[str]:
    """Return a line for each name that appears twice in a section, because YAML silently uses only the last value."""
    problems = []
    inner = [("", root)]
    if isinstance(root, yaml.MappingNode):
        inner += [(f"{key.value}: ", value) for key, value in root.value]
    for of, node in inner:
        seen: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen:
                problems.append(f"{of}{name} is given twice, in lines {seen[name]} and {line}; remove one of them")
            seen[name] = line
    return problems


def _as(kind: type, value: Any) -> Any:
    """Convert a value parsed by YAML to the type of a setting. Raises TypeError or ValueError."""
    if kind is object:
        return value
    if kind is dict:
        return {str(name): _as(float, each) for name, each in {**value}.items()}
    if isinstance(value, (bool, list, dict)) or value is None:
        raise TypeError
    if kind is int and isinstance(value, float):
        raise TypeError
    return kind(value)
