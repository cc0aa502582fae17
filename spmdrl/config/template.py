"""Variables of the chat template that hold for a whole run: `--data.template-kwargs`."""

import json
from datetime import date
from typing import Any

RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize")
"""Names that a rendering gives itself."""
DATE = "strftime_now"
"""Name of the function by which templates ask for the date; its value is a date such as 2026-01-31."""


def template_kwargs(data: Any) -> dict[str, Any]:
    """Return `--data.template-kwargs`, the variables of the chat template that hold for every row without its own.

    Raises:
        ValueError: it is no JSON object, or names what a rendering gives itself.
    """
    flag = "--data.template-kwargs"
    try:
        found = json.loads(data.template_kwargs or "{}")
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{flag}: is no JSON ({e})") from None
    if not isinstance(found, dict):
        raise ValueError(f'{flag}: a JSON object is wanted, as {{"enable_thinking": false}}')
    if odd := [name for name in RESERVED if name in found]:
        raise ValueError(f"{flag}: {odd[0]} is given by the rendering itself; leave it out")
    if DATE in found:
        try:
            date.fromisoformat(found[DATE])
        except (TypeError, ValueError):
            raise ValueError(f"{flag}: {DATE} is the date that templates show, such as 2026-01-31") from None
    return found


def template_problems(data: Any) -> list[str]:
    """One line if the variables of the template cannot be read, or nothing reads them."""
    try:
        found = template_kwargs(data)
    except ValueError as e:
        return [str(e)]
    if found and data.chat == "off":
        return ["--data.chat off: nothing reads --data.template-kwargs then; leave one of the two out"]
    return []
