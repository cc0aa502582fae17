"""Reads prompt, ground truth and other values of a row, and converts values to JSON types."""

import json
from typing import Any

from spmdrl.data.row_columns import listed


def words_of(content: Any) -> str:
    """Return a message's content as text for logs."""
    if not isinstance(content, list):
        return str(content)
    return "".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)


def content_of(prompt: object) -> str | list:
    """Return a row's prompt: text, or messages without the None-valued keys that the table format added.

    Raises ValueError for any other value.
    """
    prompt = listed(prompt)
    if isinstance(prompt, list):
        if not all(isinstance(m, dict) for m in prompt):
            raise ValueError(f"the prompt is a list, but not of chat messages: {str(prompt)[:80]}")
        return [{k: v for k, v in m.items() if v is not None} for m in prompt]
    if not isinstance(prompt, str):
        raise ValueError(f"the prompt is {type(prompt).__name__}, not text or messages: change --data.prompt-column")
    return prompt


def verl_columns(row: dict) -> tuple[object, object, dict]:
    """Return prompt, ground truth and extra_info of a row in verl's layout. Raises ValueError if one is missing."""
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise ValueError(f"verl's schema needs reward_model with a ground_truth; this row has {str(reward_model)[:80]}")
    return column_of(row, "prompt", "the file"), reward_model["ground_truth"], row.get("extra_info") or {}


def column_of(row: dict, name: str, flag: str) -> object:
    """Return a column's value. Raises ValueError, which names the setting `flag`, if the row has no such column."""
    if name not in row:
        raise ValueError(f"no column {name!r}; there are {', '.join(map(str, row))}: change {flag}")
    return row[name]


def json_able(value: object) -> object:
    """Convert a value to JSON types: tuples and arrays become lists; keys, exact numbers and dates become strings.

    Values that JSON cannot represent (bytes) are returned unchanged.
    """
    if isinstance(value, dict):
        return {str(k): json_able(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_able(v) for v in value]
    if hasattr(value, "tolist"):  # in a table, only numpy values have this method
        return value.tolist()  # type: ignore[attr-defined]
    if type(value).__module__ in ("datetime", "decimal", "fractions"):
        return str(value)
    return value


def is_json(value: object) -> bool:
    """Return True if JSON can represent a value. Extra columns with other values, such as images, are dropped."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
