"""Reads `--data.template-kwargs`, the variables of the chat template that apply to all rows of a run."""

from datetime import date
from typing import Any

from spmdrl.config.yaml_file import read_json

RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize")
"""Names of variables that the renderer itself sets, so that a user may not set them."""
DATE = "strftime_now"
"""Name of the function by which templates read the date. A user may set it to a fixed date, such as 2026-01-31."""


def template_kwargs(data: Any) -> dict[str, Any]:
    """Return the variables of the chat template that apply to every row; a row may override them.

    Raises:
        ValueError: `--data.template-kwargs` is not a JSON object, or has a name in RESERVED or a date that is invalid.
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
