"""Reads the columns that rows may have besides their prompt or dialogue, and records which columns were read.

- `system`, `system_prompt`, `developer`: a message before the dialogue (OpenOrca, ShareGPT).
- `history`: exchanges before the prompt, as messages or as question-answer pairs (Alpaca).
- `tools`: JSON schemas. `chat_template_kwargs`, `enable_thinking`, `documents`: chat template variables.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

SYSTEMS = ("system", "system_prompt")
VARIABLES = ("enable_thinking", "documents")
KWARGS = "chat_template_kwargs"
HISTORY = "history"
DEVELOPER = "developer"
TOOLS = "tools"
EMPTY = ("", [], {})
"""Column values that count as missing."""


class RowError(ValueError):
    """A row cannot be used; the message gives the reason."""


class Row(dict):
    """A row's columns that are not None, with a record of the columns that were read."""

    def __init__(self, row: dict, folder: str = ""):
        """folder: folder of the row's file, from which relative paths in the row start; by default that of `row`."""
        super().__init__({k: v for k, v in row.items() if v is not None})
        self.read: set = getattr(row, "read", set())
        self.folder: str = folder or getattr(row, "folder", "")

    def __getitem__(self, key: Any) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a column's value or the default, and record that the column was read."""
        self.read.add(key)
        return super().get(key, default)

    @property
    def unread(self) -> list[str]:
        """Names of non-empty columns that have not been read."""
        return [str(key) for key, value in self.items() if key not in self.read and value not in EMPTY]


def unread_line(names: Iterable[str]) -> str:
    """Return a sentence about unread columns, or an empty string if there are none."""
    names = list(dict.fromkeys(names))
    return f"nothing reads these columns: {', '.join(names)}" if names else ""


def system_of(row: dict) -> list[dict]:
    """Return the system and developer messages from a row's columns.

    Raises RowError if one of them is not text, or if two columns give different system messages.
    """
    found = {name: row.get(name) for name in SYSTEMS if row.get(name)}
    if len({str(text).strip() for text in found.values()}) > 1:
        raise RowError(f"its columns {' and '.join(found)} differ: a dialogue has one system message")
    texts = [("system", text) for text in list(found.values())[:1]] + [("developer", row.get(DEVELOPER))]
    for role, text in texts:
        if text and not isinstance(text, str):
            raise RowError(f"its {role} message is {kind_of(text)}, not text")
    return [{"role": role, "content": text} for role, text in texts if text and str(text).strip()]


def with_system(row: dict, messages: list[dict], system: str = "") -> list[dict]:
    """Prepend the row's system message, or else `system` (`--data.system`), to messages that have none.

    Nothing is added if both are empty. Developer messages are treated like system messages. Raises RowError if a column
    contains a system message and the messages start with a different one.
    """
    own = [m for m in messages[:2] if m["role"] in ("system", "developer")]
    given = system_of(row)
    if own:
        if odd := [m for m in given if m not in own]:
            raise RowError(f"its column of the {odd[0]['role']} message and its messages differ: leave one of them out")
        return messages
    return [*(given or ([{"role": "system", "content": system}] if system else [])), *messages]


def tools_of(row: dict, column: str = TOOLS) -> list | None:
    """Return the tools of a row. Raises RowError if they are not a list of JSON schemas."""
    tools = row.get(column)
    if isinstance(tools, str):
        tools = json_of("tools", tools) if tools.strip() else None
    tools = listed(tools)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RowError(f"its tools are {kind_of(tools)}, not a list of JSON schemas")
    return tools or None


def variables_of(row: dict) -> dict[str, Any]:
    """Return a row's chat template variables. Raises RowError if `chat_template_kwargs` is not an object."""
    more = row.get(KWARGS, {}) or {}
    if isinstance(more, str):
        more = json_of(KWARGS, more)
    if not isinstance(more, dict):
        raise RowError(f"its chat_template_kwargs are {kind_of(more)}, not an object")
    return more | {name: row[name] for name in VARIABLES if name in row and row[name] is not None}


def listed(value: Any) -> Any:
    """Convert a numpy array, which tables might contain, to a list; return any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def kind_of(value: Any) -> str:
    """Describe a value by its type and its first characters, for an error message."""
    return f"{type(value).__name__} ({str(value)[:40]!r})"


def json_of(what: str, text: str) -> Any:
    """Parse text as JSON. Raises RowError if it is not JSON; the message calls the text `what`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise RowError(f"{what}: not JSON: {text[:80]!r}") from e


def check_text(value: Any) -> None:
    """Raise RowError if a string in a row contains an unpaired surrogate, which tokenizers cannot encode.

    JSON can contain an unpaired surrogate as an escape sequence if a character was cut in two.
    """
    for text in strings(value):
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise RowError(
                f"the text {text[max(0, e.start - 20) : e.start]!r} is followed by half of a surrogate pair "
                f"(\\u{ord(text[e.start]):04x}), which is not a character: correct or remove the row"
            ) from None


def strings(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, including object keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings(inner)
