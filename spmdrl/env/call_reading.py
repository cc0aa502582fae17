"""Code shared by the tool-call parsers: JSON inside text, calls between tags, and value conversion.

Every parser runs in linear time, because it stops after `MOST_CALLS` calls or failed attempts to read one.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from spmdrl.env.base import Call

Tools = Sequence[dict[str, Any]]
"""The tools of an environment as OpenAI function schemas."""
MOST_CALLS = 64
"""Maximum number of calls that are read from one turn."""


class MalformedError(ValueError):
    """A text is not a valid call. The message gives the reason and is sent to the model."""

    def __init__(self, why: str, name: str = ""):
        """Create the error. why: the reason. name: the tool's name, if it could be read."""
        super().__init__(why)
        self.name = name


def _finite(text: str) -> float:
    """Convert a number to float. Refuse `NaN` and `Infinity`, which are not JSON, and numbers too large for a float."""
    value = float(text)
    if math.isfinite(value):
        return value
    raise ValueError(f"the number {text[:20]} is too large" if text[-1].isdigit() else f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _skip_space(text: str, at: int) -> int:
    return re.compile(r"\s*").match(text, at).end()  # type: ignore[union-attr]


def json_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that starts at position `at`, and the position after it.

    Lone surrogates in strings become `?`. Raises MalformedError if there is no valid JSON.
    """
    at = _skip_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise MalformedError(f"not valid JSON: {error.msg} at character {error.pos - at}") from None
    except RecursionError:
        raise MalformedError("not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise MalformedError(f"not valid JSON: {error}") from None
    if "\\u" in text[at:end]:
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value, end


def arguments_at(text: str, at: int, name: str) -> tuple[dict[str, Any], int]:
    """Return a call's arguments, and the position after them.

    The arguments start at position `at`, as a JSON object or as a JSON string that contains one. Raises MalformedError
    for any other text. name: the called tool.
    """
    try:
        value, at = json_at(text, at)
    except MalformedError as error:
        raise MalformedError(f"the arguments are {error}", name) from None
    return arguments_of(value, name), at


def arguments_of(value: Any, name: str) -> dict[str, Any]:
    """Return the arguments of a call from a JSON object, or from a string that contains one as JSON text.

    Raises MalformedError if the value is something else. name: the called tool.
    """
    if isinstance(value, str):
        return arguments_at(value, 0, name)[0]
    if not isinstance(value, dict):
        raise MalformedError("the arguments are not a JSON object", name)
    return value


def python_call(text: str) -> tuple[str, dict[str, Any]]:
    """Return the function and arguments of a call written as `FUNCTION(KEY=VALUE)` with JSON-compatible literals.

    Raises:
        ValueError: the text is not such a call.
    """
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise ValueError("arguments must be given by name")
        given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return ast.unparse(call.func), json.loads(json.dumps(given))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def call_of(value: Any) -> Call:
    """Return the call in a JSON object `{"name", "arguments" (or "parameters"), "id" (optional)}`.

    Raises MalformedError if the value does not have this form.
    """
    if not isinstance(value, dict):
        raise MalformedError('not a JSON object with "name" and "arguments"')
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedError('the call has no "name"')
    given = next((value[key] for key in ("arguments", "parameters") if key in value), None)
    if given is None:
        raise MalformedError('the call has no "arguments"', name)
    own_id = value.get("id")
    return Call(name, arguments_of(given, name), own_id if isinstance(own_id, str) else "")


def broken(error: MalformedError) -> Call:
    """Return a `Call` for a malformed call, with an error message for the model."""
    return Call(error.name, None, error=f"The tool call is malformed: {error}.")


Read = Callable[[str, int], tuple[list[Call], int]]
"""Reads the calls after an opening tag: (text, position) -> (calls, position after them). May raise MalformedError."""


def between(text: str, opening: re.Pattern[str], closing: str, read: Read) -> tuple[str, list[Call]]:
    """Return the text outside the pairs of tags, and the calls inside the tags.

    opening: the tag before a call. closing: the tag after a call, or an empty string if the format has no such tag. The
    closing tag may be missing at the end of the text. read: reads the calls after an opening tag.
    """
    kept: list[str] = []
    calls: list[Call] = []
    at = 0
    while start := opening.search(text, at):
        kept.append(text[at : start.start()])
        if len(calls) >= MOST_CALLS:
            calls.append(broken(MalformedError(f"more than {MOST_CALLS} calls in one turn")))
            return "".join(kept), calls
        try:
            found, at = read(text, start.end())
            if closing:
                at = _skip_space(text, at)
                if not text.startswith(closing, at) and at < len(text):
                    name = found[-1].name if found else ""
                    raise MalformedError(f"there is text between the call and {closing}", name)
                at += len(closing)
            calls += found
        except MalformedError as error:
            calls.append(broken(error))
            at = _after(text, start.end(), opening, closing)
    kept.append(text[at:])
    return "".join(kept), calls


def _after(text: str, at: int, opening: re.Pattern[str], closing: str) -> int:
    """Return the end of a malformed call: after its closing tag, at the next call, or at the end of the text."""
    again = opening.search(text, at)
    until = again.start() if again else len(text)
    end = text.find(closing, at, until) if closing else -1
    return end + len(closing) if end >= 0 else until


def typed(value: str, function: str, key: str, tools: Tools) -> Any:
    """Convert the text of the argument `key` to its type in the called function's schema.

    If there are no schemas, valid JSON text is parsed as JSON.
    """
    kinds = _kinds(function, key, tools)
    plain = value.strip()
    if "null" in kinds and plain.lower() == "null":
        return None
    if "integer" in kinds and re.fullmatch(r"[+-]?\d{1,4000}", plain):
        return int(plain)
    if "boolean" in kinds and plain.lower() in ("true", "false", "1", "0"):
        return plain.lower() in ("true", "1")
    if kinds and not kinds & {"integer", "number", "object", "array"}:
        return value
    try:
        found, end = json_at(plain, 0)
    except MalformedError:
        return value
    return value if end < len(plain) or isinstance(found, str) else found


def _kinds(function: str, key: str, tools: Tools) -> set[str]:
    """Return the set of JSON types that an argument can have.

    The set is empty if there are no schemas, or if the argument's schema names no type. If there are schemas but none
    of them has the argument, its type is string.
    """
    for tool in tools:
        about = tool.get("function", tool)
        if about.get("name") == function:
            schema = about.get("parameters", {}).get("properties", {}).get(key, {"type": "string"})
            options = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
            kinds = [option.get("type", ()) for option in options if isinstance(option, dict)]
            return {name for kind in kinds for name in ([kind] if isinstance(kind, str) else kind)}
    return {"string"} if tools else set()
