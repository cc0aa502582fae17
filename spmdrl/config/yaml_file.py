"""Reads the settings of a YAML file that a flag names, such as a judge's, each as the type of its field."""

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from spmdrl.config.dump import redact_text
from spmdrl.config.fields import nearest

SUFFIXES = (".yaml", ".yml")
"""Ends of a value that names such a file."""
KINDS = {str: "text", int: "number", float: "number", dict: "list of names with numbers, such as {helpfulness: 0.65}"}
"""Types that settings have, in words; `object` is for any value."""


def read_fields(
    flag: str, file: str, schema: type, what: str, secret: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a file, and one line for each that is unknown or of another type.

    Args:
        flag: the flag that named the file.
        file: its path.
        schema: the dataclass of the settings.
        what: whose settings they are, for the message about a file without any.
        secret: settings whose values no message may show.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
        problems = _twice(yaml.compose(text, Loader=yaml.SafeLoader))
        found = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {file}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{flag} {file}: is no YAML ({' '.join(str(error).split())})") from None
    except RecursionError:
        raise ValueError(f"{flag} {file}: is nested too deeply; it holds settings with their values") from None
    kinds = {each.name: _kind(each.type) for each in fields(schema)}
    if not isinstance(found, dict):
        raise ValueError(f"{flag} {file}: holds no settings of {what}")
    given = {}
    for name, value in found.items():
        if name not in kinds:
            near = nearest(str(name), kinds)
            problems.append(f"{name}: unknown{f'; did you mean {near[0]}?' if near else '.'} Valid: {', '.join(kinds)}")
            continue
        try:
            given[name] = _as(kinds[name], value)
        except (TypeError, ValueError):
            shown = "its value" if name in secret else repr(redact_text(str(value)))
            problems.append(f"{name}: {shown} is no {KINDS[kinds[name]]}")
    return given, problems


def value_problems(found: Any) -> list[str]:
    """One line for each setting of a file that its field does not allow, by its choices or its rule (`declare.py`)."""
    problems = []
    for each in fields(found):
        value, choices, rule = getattr(found, each.name), get_args(each.type), each.metadata.get("rule")
        if get_origin(each.type) is Literal and value not in choices:
            problems.append(f"{each.name} {value!r}: must be one of {', '.join(choices)}")
        elif rule and not rule.valid(value):
            problems.append(f"{each.name} {value}: {rule.says}")
    return problems


def _kind(hint: Any) -> type:
    """Return the type by which a field's value is read; `object` for a value that is taken as YAML has it."""
    if get_origin(hint) is Literal:
        return str
    return object if hint is dict else get_origin(hint) or hint


def _twice(root: yaml.Node | None) -> list[str]:
    """One line for each name that stands twice in the file, or in a list of names: YAML takes the last alone."""
    problems = []
    inner = [("", root)]
    if isinstance(root, yaml.MappingNode):
        inner += [(f"{key.value}: ", value) for key, value in root.value]
    for of, node in inner:
        seen: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen:
                problems.append(f"{of}{name} stands twice, in lines {seen[name]} and {line}; leave one of them")
            seen[name] = line
    return problems


def _as(kind: type, value: Any) -> Any:
    """Return a value of YAML as a setting's type: the type counts, not YAML's guess."""
    if kind is object:
        return value
    if kind is dict:
        return {str(name): _as(float, each) for name, each in {**value}.items()}
    if isinstance(value, (bool, list, dict)) or value is None:
        raise TypeError
    if kind is int and isinstance(value, float):
        raise TypeError
    return kind(value)
