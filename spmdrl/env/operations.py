"""Typed functions as tools: their JSON schemas in the form of OpenAI, and the arguments of calls checked by schemas.

A schema equals that of transformers' `get_json_schema`, less the type of the result, which no call needs. That function
imports torch, which a worker does without.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin

from spmdrl.env.docstrings import described

_JSON_NAMES: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    tuple: "array",
    dict: "object",
}
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
SCHEMA_DEPTH = 32
"""Levels of an argument that are checked."""


class ArgumentsError(ValueError):
    """Arguments of a call that do not fit the tool; the message is for the model."""


@dataclass(frozen=True)
class Tool:
    """A tool of one environment."""

    schema: dict[str, Any]
    """OpenAI's function schema."""
    function: Callable[..., Any]
    by_keyword: bool = True
    """It takes the arguments as keywords, else as one dict."""
    closed: bool = True
    """Arguments that the schema does not name are refused."""

    @property
    def name(self) -> str:
        """The name that a call gives."""
        return self.schema["function"]["name"]

    def bound(self, arguments: dict[str, Any]) -> Callable[[], Any]:
        """Return a function of nothing that makes the call. Raises ArgumentsError."""
        fitting = fitted(self, arguments)
        return partial(self.function, **fitting) if self.by_keyword else partial(self.function, fitting)


# ── functions as tools ───────────────────────────────────────────────────────


def tool_of(function: Callable[..., Any]) -> Tool:
    """Return a function as a tool.

    Raises:
        ValueError: it has no docstring, an argument without a type or with one that JSON cannot give, or arguments by
            position.
    """
    name = getattr(function, "__name__", type(function).__name__)
    doc = inspect.getdoc(function) if hasattr(function, "__name__") else None
    if not doc or not doc.strip() or not name.isidentifier():
        raise ValueError(f"{name} is no tool: write it as a function with a docstring, which the model reads")
    description, texts = described(doc)
    try:
        hints = typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters
    except Exception as e:  # a name in a hint may be anything
        raise ValueError(f"the types of tool {name} cannot be read: {type(e).__name__}: {e}") from e
    properties, required, closed = {}, [], True
    for key, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            closed = False
            continue
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ValueError(f"tool {name} takes {key} by position, and calls name their arguments: make it a keyword")
        if key not in hints:
            raise ValueError(f"the argument {key} of tool {name} has no type: annotate it, as in `{key}: str`")
        properties[key] = _typed(hints[key], f"the argument {key} of tool {name}")
        text = texts.get(key, "")
        if choices := _CHOICES.search(text):
            try:
                properties[key]["enum"] = json.loads(choices[1])
            except ValueError:
                raise ValueError(f"the choices of {key} of tool {name} are no JSON list: {choices[1]}") from None
            text = text[: choices.start()].strip()
        if text:
            properties[key]["description"] = text
        if parameter.default is parameter.empty:
            required.append(key)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    body = {"name": name, "description": description, "parameters": schema}
    return Tool({"type": "function", "function": body}, function, closed=closed)


def methods_of(environment: object, reserved: Iterable[str]) -> list[Callable[..., Any]]:
    """Return the public methods with a docstring, but the reserved ones, in the order in which they are written."""
    names: dict[str, None] = {}
    for kind in reversed(type(environment).__mro__[:-1]):
        names |= dict.fromkeys(vars(kind))
    found = []
    for name in names:
        if name.startswith("_") or name in reserved:
            continue
        # A property is not evaluated.
        if isinstance(inspect.getattr_static(environment, name), types.FunctionType | staticmethod | classmethod):
            method = getattr(environment, name)
            if inspect.getdoc(method):
                found.append(method)
    return found


def by_name(tools: Iterable[Tool], owner: str) -> dict[str, Tool]:
    """Return tools by name.

    Raises:
        ValueError: two of them have one name.
    """
    table: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in table:
            raise ValueError(f"{owner} has two tools of the name {tool.name}: rename one")
        table[tool.name] = tool
    return table


def checked_schema(schema: Any, owner: str) -> dict[str, Any]:
    """Return an environment's own schema in OpenAI's form; a bare function (`name`, `parameters`) is put into it.

    Raises:
        ValueError: it is neither.
    """
    bare = schema.get("function", schema) if isinstance(schema, Mapping) else None
    if not isinstance(bare, Mapping) or not isinstance(bare.get("name"), str) or not bare["name"]:
        raise ValueError(
            f'{owner} has a tool whose schema is not {{"type": "function", "function": {{"name": ..., "parameters": '
            f"...}}}}: {str(schema)[:200]}"
        )
    if not isinstance(bare.get("parameters", {}), Mapping):
        raise ValueError(f"the parameters of tool {bare['name']} of {owner} are no JSON schema of an object")
    return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}} | dict(bare)}


def _typed(hint: Any, what: str) -> dict[str, Any]:
    """Return the JSON schema of a type."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _JSON_NAMES:
        return {"type": _JSON_NAMES[hint]}
    if origin in _JSON_NAMES and not inner:  # typing.List without its items
        return {"type": _JSON_NAMES[origin]}
    if typing.is_typeddict(hint):
        return {"type": "object"}
    if origin in (Union, types.UnionType):
        each = [_typed(one, what) for one in inner if one is not type(None)]
        if len(each) == 1:
            schema = each[0]
        elif all(one.keys() == {"type"} and isinstance(one["type"], str) for one in each):
            names = sorted({one["type"] for one in each})
            schema = {"type": names[0] if len(names) == 1 else names}
        else:
            schema = {"anyOf": each}
        return schema | ({"nullable": True} if type(None) in inner else {})
    if origin is Literal and all(type(one) in _JSON_NAMES for one in inner):
        names = list(dict.fromkeys(_JSON_NAMES[type(one)] for one in inner))
        return {"type": names[0] if len(names) == 1 else names, "enum": list(inner)}
    if origin in (list, Sequence, Iterable) or (origin is tuple and len(inner) == 2 and inner[1] is ...):
        return {"type": "array", "items": _typed(inner[0], what)}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_typed(one, what) for one in inner]}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _typed(inner[1], what)}
    raise ValueError(
        f"{what} has the type {getattr(hint, '__name__', hint)}, which no call can give: take str, int, float, bool, "
        "list, tuple, dict, Literal, or a union of them"
    )


# ── arguments of calls ───────────────────────────────────────────────────────


def fitted(tool: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as the tool takes them: numbers that were written as text are numbers, and so on.

    Raises:
        ArgumentsError: one is missing, unknown, or of another type.
    """
    schema = tool.schema["function"].get("parameters", {})
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    out = {}
    for key, value in arguments.items():
        if key in properties:
            # Models write null for arguments that they leave out.
            if value is None and key not in required and not _takes_null(properties[key]):
                continue
            out[key] = _as(value, properties[key], f"the argument {key} of {tool.name}", 0)
        elif tool.closed or schema.get("additionalProperties") is False:
            raise ArgumentsError(
                f"{tool.name} has no argument {_shown(key)}: its arguments are {', '.join(properties) or 'none'}"
            )
        else:
            out[key] = value
    if lacking := [key for key in required if key not in out]:
        raise ArgumentsError(f"{tool.name} lacks the argument {', '.join(map(str, lacking))}")
    return out


def _as(value: Any, schema: Any, what: str, depth: int) -> Any:
    """Return a JSON value as a schema asks for it; parts of a schema that are not known here are not checked."""
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
        raise ArgumentsError(f"{what} must be one of {_shown(schema['enum'], 200)}, and it is {_shown(value)}")
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
    """Return the value as the first option takes it unchanged, else as the first that takes it at all."""
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
    raise error if len(options) == 1 else ArgumentsError(f"{what} has none of its types: it is {_shown(value)}")


def _of_kind(value: Any, kind: str, what: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "integer":
            if is_number and (isinstance(value, int) or (abs(value) < 2**53 and value == int(value))):
                return int(value)
            if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d{1,300}\s*", value):
                return int(value)
        case "number":
            if is_number:
                return value
            if isinstance(value, str) and re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", value, re.I):
                return float(value)
        case "boolean":
            if isinstance(value, bool):
                return value
            if isinstance(value, str) and value.strip().lower() in ("true", "false"):
                return value.strip().lower() == "true"
        case "string":
            if isinstance(value, str):
                return value
            if is_number or isinstance(value, bool):
                return json.dumps(value)
        case "array":
            if isinstance(value, list):
                return value
        case "object":
            if isinstance(value, dict):
                return value
        case "null":
            if value is None:
                return value
        case _:
            return value
    named = "an" if kind[:1] in "aeiou" else "a"
    raise ArgumentsError(f"{what} must be {named} {kind}, and it is {_shown(value)}")


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
