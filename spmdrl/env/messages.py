"""Messages of an environment, checked, and the errors of its code in words."""

import json
from typing import Any

from spmdrl.config.user_code import said
from spmdrl.env.answers import cut_text, joined, raw_text

ROLES = ("system", "developer", "user", "assistant", "tool")


class FailedError(Exception):
    """The environment itself failed; the text says what and why."""


def said_type(value: object) -> str:
    """Name the type of a value, of a tuple with its length."""
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__


def messages_of(value: Any, what: str, longest: float, cut: str) -> tuple[list[dict[str, Any]], int]:
    """Return messages with valid text, and how many texts were cut. A text is a message of the user."""
    given = [{"role": "user", "content": value}] if isinstance(value, str | bytes) else value
    given = [given] if isinstance(given, dict) else given
    if not isinstance(given, list | tuple):
        raise FailedError(f"must return messages, a text or None from {what}, and returned {said_type(given)}")
    out, cuts = [], 0
    for message in given:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise FailedError(
                f'must return messages {{"role": ..., "content": ...}} with a role of {", ".join(ROLES)} from {what}, '
                f"and returned {str(message)[:100]!r}"
            )
        content = message.get("content")
        try:
            raw = joined(content) if isinstance(content, list) else raw_text(content)
            text, was_cut = cut_text(raw, int(min(longest, len(raw))), cut)
            cuts += was_cut
            out.append(json.loads(json.dumps({**message, "content": text})))
        except (TypeError, ValueError) as e:
            raise FailedError(f"returned a message from {what} that is neither text nor JSON: {e}") from None
    return out, cuts


def text_of_error(error: BaseException) -> str:
    """Return type and text of an error for the model."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # its text is its own code
        return said(error)
