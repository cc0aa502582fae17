"""Makes tools with OpenAI function schemas from typed functions.

A schema equals the result of transformers' `get_json_schema`, minus the return type, which calls do not need.
`get_json_schema` itself is not used, because transformers would import torch, which workers do not load.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin

from spmdrl.env.arguments import fitted

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
_HEADER = re.compile(r"(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Examples?|Notes?):\s*$")
_ARGUMENTS = ("Args", "Arguments", "Parameters")
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Tool:
    """A tool that an environment offers to the model, with the function that runs its calls."""

    schema: dict[str, Any]
    """Function schema in OpenAI's format."""
    function: Callable[..., Any]
    by_keyword: bool = True
    """True if `function` takes the arguments as keywords, False if it takes them as one dict."""
    closed: bool = True
    """True to reject arguments that the schema does not name."""

    @property
    def name(self) -> str:
        """Return the name of the tool in the schema."""
        return self.schema["function"]["name"]

    def bound(self, arguments: dict[str, Any]) -> Callable[[], Any]:
        """Return a zero-argument function that makes the call. Raises ArgumentsError if the schema forbids the call."""
        fitting = fitted(self.schema["function"], arguments, self.closed)
        return partial(self.function, **fitting) if self.by_keyword else partial(self.function, fitting)


def tool_of(function: Callable[..., Any]) -> Tool:
    """Return a tool that calls a typed function.

    Raises:
        ValueError: the function has no docstring, or one of its arguments is positional-only, has no type, or has a
            type that JSON cannot express.
    """
    name = getattr(function, "__name__", type(function).__name__)
    doc = inspect.getdoc(function) if hasattr(function, "__name__") else None
    if not doc or not doc.strip() or not name.isidentifier():
        raise ValueError(f"{name} is not a tool: write it as a function with a docstring, which the model reads")
    description, texts = _descriptions(doc)
    try:
        hints = typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters
    except Exception as e:  # evaluating a type hint may raise anything
        raise ValueError(f"the types of tool {name} cannot be read: {type(e).__name__}: {e}") from e
    properties, required, closed = {}, [], True
    for key, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            closed = False
            continue
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ValueError(f"tool {name} takes {key} by position, but calls name their arguments: make it a keyword")
        if key not in hints:
            raise ValueError(f"the argument {key} of tool {name} has no type: annotate it, as in `{key}: str`")
        properties[key] = _typed(hints[key], f"the argument {key} of tool {name}")
        text = texts.get(key, "")
        if choices := _CHOICES.search(text):
            try:
                properties[key]["enum"] = json.loads(choices[1])
            except ValueError:
                raise ValueError(f"the choices of {key} of tool {name} are not a JSON list: {choices[1]}") from None
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
    """Return the public methods that have a docstring, in source order.

    reserved: names of methods to skip.
    """
    names: dict[str, None] = {}
    for kind in reversed(type(environment).__mro__[:-1]):
        names |= dict.fromkeys(vars(kind))
    found = []
    for name in names:
        if name.startswith("_") or name in reserved:
            continue
        # Properties must not be evaluated. Wrappers, such as those of functools.lru_cache, have `__wrapped__`.
        static = inspect.getattr_static(environment, name)
        wraps = callable(static) and isinstance(getattr(static, "__wrapped__", None), types.FunctionType)
        if wraps or isinstance(static, types.FunctionType | staticmethod | classmethod):
            method = getattr(environment, name)
            if inspect.getdoc(method):
                found.append(method)
    return found


def by_name(tools: Iterable[Tool], owner: str) -> dict[str, Tool]:
    """Return tools by name. Raises ValueError if two have the same name. owner: the tools' origin, for the error."""
    table: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in table:
            raise ValueError(f"{owner} has two tools named {tool.name}: rename one")
        table[tool.name] = tool
    return table


def checked_schema(schema: Any, owner: str) -> dict[str, Any]:
    """Return a tool's schema in OpenAI's format. schema: the same format, or only its inner object `function`.

    Raises ValueError if the schema is neither. owner: the tool's origin, for the error message.
    """
    bare = schema.get("function", schema) if isinstance(schema, Mapping) else None
    if not isinstance(bare, Mapping) or not isinstance(bare.get("name"), str) or not bare["name"]:
        raise ValueError(
            f'{owner} has a tool whose schema is not {{"type": "function", "function": {{"name": ..., "parameters": '
            f"...}}}}: {str(schema)[:200]}"
        )
    if not isinstance(bare.get("parameters", {}), Mapping):
        raise ValueError(f"the parameters of tool {bare['name']} of {owner} are not a JSON schema of an object")
    return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}} | dict(bare)}


def _typed(hint: Any, what: str) -> dict[str, Any]:
    """Return a type hint's JSON schema. Raises ValueError if it has none. what: the argument, for the error message."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _JSON_NAMES:
        return {"type": _JSON_NAMES[hint]}
    if origin in _JSON_NAMES and not inner:  # a type such as typing.List, without the type of its items
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
        f"{what} has the type {getattr(hint, '__name__', hint)}, which JSON cannot express: use str, int, float, bool, "
        "list, tuple, dict, Literal, or a union of them"
    )


def _descriptions(docstring: str) -> tuple[str, dict[str, str]]:
    """Return a function's description and a dict of its arguments' descriptions, from a dedented docstring.

    The docstring follows Google's style: https://google.github.io/styleguide/pyguide.html, section 3.8.
    """
    lines = docstring.strip().splitlines()
    heads = [i for i, line in enumerate(lines) if _HEADER.match(line)]
    description = "\n".join(lines[: heads[0]] if heads else lines).strip()
    arguments: dict[str, str] = {}
    for begin, end in pairwise([*heads, len(lines)]):
        if lines[begin].split(":")[0] in _ARGUMENTS:
            arguments |= _entries(lines[begin + 1 : end])
    return description, arguments


def _entries(lines: list[str]) -> dict[str, str]:
    """Return the text of each entry `name: text` or `name (type): text`. Continuation lines are indented deeper."""
    found: dict[str, list[str]] = {}
    depth, name = None, ""
    for line in lines:
        text = line.strip()
        if not text:
            continue
        indent = len(line) - len(line.lstrip())
        depth = indent if depth is None else depth
        entry = _ENTRY.match(text) if indent <= depth else None
        if entry:
            name = entry[1]
            found[name] = [entry[2].strip()]
        elif name:
            found[name].append(text)
    return {name: " ".join(part for part in parts if part) for name, parts in found.items()}
