"""Reads a row's prompt messages, and checks messages and errors that come from an environment's code."""

import json
from typing import Any

from spmdrl.config.user_code import error_text
from spmdrl.env.answers import cut_parts, cut_text, raw_text

OPENING = "prompt_messages"
"""Row key under which the sampler passes all prompt messages, including the system message and history."""
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
"""Message keys that chat templates read; their values must be strings."""


class FailedError(Exception):
    """The environment failed, not the model. The text continues a sentence that starts with the environment's name."""


def messages_of(value: Any, what: str, longest: float, cut: str) -> tuple[list[dict[str, Any]], int]:
    """Return messages with valid text, and the number of truncated texts. A string is converted to a user message.

    A content that shows images is a list of parts, as in `Reply.messages`. A list of parts is converted to a user
    message. value: messages whose images are data URLs (`pictures.encoded`). what: name of the environment's function
    that returned the value. longest, cut: as in `answers.cut_parts`.

    Raises:
        FailedError: the value is neither text nor messages.
    """
    given = [{"role": "user", "content": value}] if isinstance(value, str | bytes) else value
    given = [given] if isinstance(given, dict) else given
    if (
        isinstance(given, list)
        and given
        and all(isinstance(m, dict) and "type" in m and "role" not in m for m in given)
    ):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list | tuple):
        raise FailedError(f"must return messages, a text or None from {what}, and returned {type_name(given)}")
    out, cuts = [], 0
    for message in given:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise FailedError(
                f'must return messages {{"role": ..., "content": ...}} with a role of {", ".join(ROLES)} from {what}, '
                f"and returned {str(message)[:100]!r}"
            )
        content = message.get("content")
        try:
            if isinstance(content, list):
                shown, were_cut = cut_parts(content, longest, cut)
            else:
                raw = raw_text(content)
                shown, were_cut = cut_text(raw, int(min(longest, len(raw))), cut)
            cuts += were_cut
            made = json.loads(json.dumps({**message, "content": shown}))
        except (TypeError, ValueError) as e:
            raise FailedError(f"returned a message from {what} that is neither text nor JSON: {e}") from None
        if wrong := _wrong(made):
            raise FailedError(f"returned a message from {what} {wrong}")
        out.append(made)
    return out, cuts


def _wrong(message: dict[str, Any]) -> str:
    """Check the keys of a message, except role and content. Return an error text, or "" if all values are valid."""
    for key in TEXTS:
        if not isinstance(message.get(key, ""), str | None):
            return f"whose {key} is not text: {str(message[key])[:100]!r}"
    calls = message.get("tool_calls")
    calls = [] if calls is None else calls
    if not isinstance(calls, list):
        return f"whose tool_calls are not a list: {str(calls)[:100]!r}"
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            form = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
            return f"with a tool call that is not {form}: {str(call)[:100]!r}"
        if not isinstance(call.get("id", ""), str | None):
            return f"with a tool call whose id is not text: {str(call['id'])[:100]!r}"
        arguments = function.get("arguments")
        try:  # arguments may be an object, JSON text of an object, or None
            fits = arguments is None or isinstance(
                json.loads(arguments) if isinstance(arguments, str) else arguments, dict
            )
        except ValueError:
            fits = False
        if not fits:
            return f"with a tool call whose arguments are not an object: {str(arguments)[:100]!r}"
    return ""


def type_name(value: object) -> str:
    """Return a value's type name, with the length for a tuple or list."""
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__


def text_of_error(error: BaseException) -> str:
    """Return the type and the text of an error, for the model."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # `__str__` of the error is user code and may raise anything
        return error_text(error)


def prompt_of(row: dict) -> list[dict]:
    """Return a row's prompt messages. A string is converted to a user message."""
    prompt = row.get(OPENING) or row.get("prompt") or []
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(each) for each in prompt]


def opening(row: dict, seen: str | list[dict]) -> list[dict]:
    """Return the row's prompt, followed by the first observation `seen`, which is text or a list of parts.

    The observation is appended to the last prompt message if that message is a user message. Otherwise it becomes a
    separate message.
    """
    messages = prompt_of(row)
    if messages and messages[-1].get("role") == "user" and isinstance(messages[-1].get("content"), str | list):
        messages[-1]["content"] = added(messages[-1]["content"], seen, "\n\n")
        return messages
    return [*messages, {"role": "user", "content": seen}]


def added(content: str | list[dict], more: str | list[dict], between: str = "") -> str | list[dict]:
    """Return the content of a message followed by more content. between: stands between two texts."""
    if isinstance(content, str) and isinstance(more, str):
        return between.join(text for text in (content, more) if text)
    if not content or not more:
        return content or more
    first, then = ([{"type": "text", "text": x}] if isinstance(x, str) else x for x in (content, more))
    joint = [{"type": "text", "text": between}] if first[-1].get("type") == then[0].get("type") == "text" else []
    return [*first, *(joint if between else []), *then]


def seed_of(row: dict, seed: int) -> int:
    """Return an episode's seed, below 2^31: the row's `seed` column if present, otherwise the sample's own seed.

    All samples of a prompt share the row, so with that column they start in the same state. seed: the sample's seed.
    """
    own = row.get("seed")
    if own is None:
        return seed % 2**31
    if isinstance(own, bool) or not isinstance(own, int):
        raise ValueError(f"the column seed of a row must hold a whole number, not {own!r}")
    return own % 2**31
