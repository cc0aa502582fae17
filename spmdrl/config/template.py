"""Reads `--data.template-kwargs`, the chat template variables for all rows in a run."""

from datetime import date
from typing import Any

from spmdrl.config.yaml_file import read_json

RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize")
"""Variables that the renderer sets itself and a user may not set."""
DATE = "strftime_now"
"""Name of the function that templates call to get the date. A user can set it to a fixed date, such as 2026-01-31."""


def template_kwargs(data: Any) -> dict[str, Any]:
    """Return the chat template variables for all rows; each row can override them.

    Raises:
        ValueError: `--data.template-kwargs` is not a JSON object, or contains a reserved name or an invalid date.
    """
    flag = "--data.template-kwargs"
    found = read_json(flag, data.template_kwargs, '{"enable_thinking": false}')
    if odd := [name for name in RESERVED if name in found]:
        raise ValueError(f"{flag}: {odd[0]} is set by the rendering itself; leave it out")
    if DATE in found:
        try:
            date.fromisoformat(found[DATE])
        except (TypeError, ValueError):
            raise ValueError(f"{flag}: {DATE} is the date that templates show, such as 2026-01-31") from None
    return found
