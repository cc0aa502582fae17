"""Checks tool-call arguments against the tool's JSON schema, and converts them to the schema's types."""

import json
import re
from collections.abc import Mapping
from typing import Any

SCHEMA_DEPTH = 32
"""Arguments are checked up to this nesting depth. Deeper values are passed on unchecked."""


class ArgumentsError(ValueError):
    """The call's arguments do not match the tool's schema. The message is sent to the model."""


def fitted(function: Mapping[str, Any], arguments: dict[str, Any], closed: bool) -> dict[str, Any]:
    """Return the arguments, converted to the types in a tool's schema. For example, text can become a number.

    function: the tool's schema, with name and parameters. closed: True to reject arguments that are not in the schema.

    Raises:
        ArgumentsError: an argument is missing, unknown, or has the wrong type.
    """
    name, schema = function["name"], function.get("parameters", {})
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    out = {}
    for key, value in arguments.items():
        if key in properties:
            # Models often write null for an argument that they want to omit.
            if value is None and key not in required and not _takes_null(properties[key]):
                continue
            out[key] = _as(value, properties[key], f"the argument {key} of {name}", 0)
        elif closed or schema.get("additionalProperties") is False:
            known = f"its arguments are {', '.join(properties)}" if properties else "it takes none"
            raise ArgumentsError(f"{name} has no argument {_shown(key)}: {known}")
        else:
            out[key] = value
    if lacking := [key for key in required if key not in out]:
        many = "s" if len(lacking) > 1 else ""
        raise ArgumentsError(f"the call of {name} lacks the argument{many} {', '.join(map(str, lacking))}")
    return out


def _as(value: Any, schema: Any, what: str, depth: int) -> Any:
    """Return a JSON value converted to a schema's type. Unsupported schema keywords are ignored."""
    if not isinstance(schema, Mapping) or depth > SCHEMA_DEPTH or (value is None and _takes_null(schema)):
        return value
    options = schema.get("anyOf") or schema.get("oneOf")
    kinds = schema.get("type")
    if not options and isinstance(kinds, list):
        options = [{**schema, "type": kind} for kind in kinds]
    if options:
        return _any_of(value, options, what, depth)
    if isinstance(kinds, str):
        value = _of_kind(value, kinds, what)
    if "enum" in schema and value not in schema["enum"]:
        raise ArgumentsError(f"{what} must be one of {_shown(schema['enum'], 200)}, but it is {_shown(value)}")
    if isinstance(value, list):
        first = schema.get("prefixItems") or []
        each = [*first, *[schema.get("items")] * max(0, len(value) - len(first))]
        return [_as(one, each[i], f"item {i} of {what}", depth + 1) for i, one in enumerate(value)]
    if isinstance(value, dict):
        known, rest = schema.get("properties") or {}, schema.get("additionalProperties")
        if lacking := [key for key in schema.get("required") or [] if key not in value]:
            raise ArgumentsError(f"{what} lacks {', '.join(map(str, lacking))}")
        return {key: _as(one, known.get(key, rest), f"{key} of {what}", depth + 1) for key, one in value.items()}
    return value


def _any_of(value: Any, options: list[Any], what: str, depth: int) -> Any:
    """Convert a value with the first option that leaves it unchanged, or else with the first option that accepts it."""
    fitting, error = [], None
    for option in options:
        try:
            as_option = _as(value, option, what, depth + 1)
        except ArgumentsError as e:
            error = error or e
            continue
        if as_option == value and type(as_option) is type(value):
            return as_option
        fitting.append(as_option)
    if fitting:
        return fitting[0]
    assert error
    raise error if len(options) == 1 else ArgumentsError(f"{what} has none of the allowed types: it is {_shown(value)}")


def _of_kind(value: Any, kind: str, what: str) -> Any:
    text = value.strip() if isinstance(value, str) else ""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "integer" if isinstance(value, int) and is_number:
            return value
        case "integer" if isinstance(value, float) and abs(value) < 2**53 and value == int(value):
            return int(value)
        case "integer" if re.fullmatch(r"[+-]?\d{1,300}", text):
            return int(text)
        case "number" if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, re.I):
            return float(text)
        case "boolean" if text.lower() in ("true", "false"):
            return text.lower() == "true"
        case "string" if is_number or isinstance(value, bool):
            return json.dumps(value)
    fits = {
        "number": is_number,
        "integer": False,
        "boolean": isinstance(value, bool),
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
        "null": value is None,
    }
    if fits.get(kind, True):
        return value
    article = "an" if kind[:1] in "aeiou" else "a"
    raise ArgumentsError(f"{what} must be {article} {kind}, but it is {_shown(value)}")


def _takes_null(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return True
    kinds = schema.get("type")
    options = schema.get("anyOf") or schema.get("oneOf") or []
    by_type = kinds == "null" or (isinstance(kinds, list) and "null" in kinds)
    return bool(schema.get("nullable")) or by_type or any(map(_takes_null, options))


def _shown(value: Any, longest: int = 60) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= longest else text[:longest] + "..."
