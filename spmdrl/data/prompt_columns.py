"""Inserts row columns into the prompt: columns that chat templates read, and columns that `--data.template` names.

The columns that templates read have ordinary names: `documents` might be reward data, and `history` a patient record.
Such a column goes into the prompt only if a chat template renders the prompt, the column's value has the expected
format, and no setting uses the column for something else. All other columns are left to reward functions.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from spmdrl.data.chat import as_messages
from spmdrl.data.dialogues import earlier
from spmdrl.data.row_columns import (
    DEVELOPER,
    EMPTY,
    HISTORY,
    KWARGS,
    SYSTEMS,
    TOOLS,
    VARIABLES,
    Row,
    RowError,
    kind_of,
    listed,
    system_of,
    tools_of,
    variables_of,
    with_system,
)


def _check_documents(row: dict) -> None:
    found = listed(row["documents"])
    if not (isinstance(found, list) and all(isinstance(each, dict) for each in found)):
        raise RowError(f"its documents are {kind_of(found)}, not a list of objects")


READERS: dict[str, Callable[[dict], Any]] = {
    **dict.fromkeys((*SYSTEMS, DEVELOPER), system_of),
    HISTORY: earlier,
    TOOLS: tools_of,
    **dict.fromkeys((KWARGS, *VARIABLES), variables_of),
    "documents": _check_documents,
}
"""Maps a column to a function that reads it and raises RowError if the value does not have the expected format."""
OF_EPISODES = (*SYSTEMS, DEVELOPER, HISTORY, KWARGS, *VARIABLES)
"""Columns that are read even if an environment starts the episodes."""


def rendered_columns(row: Row, named: Iterable[str], template: bool, begun: bool) -> tuple[Row, dict[str, str]]:
    """Return a row without the columns to keep out of its prompt, and the reasons by column name.

    named: columns that settings name; they are kept out without a reason. template: True if a chat template renders the
    prompt. begun: True if an environment starts the episodes.
    """
    left = dict[str, str]()
    for name, read in READERS.items():
        if name in named or row.get(name) is None or (begun and name not in OF_EPISODES):
            continue
        if not template:
            left[name] = "no chat template renders it (--data.chat-template)"
            continue
        try:
            read({name: row[name]})
        except RowError as error:
            left[name] = str(error)
    shown = Row({name: value for name, value in row.items() if name not in left and name not in named})
    return shown, {name: why for name, why in left.items() if row[name] not in EMPTY}


def left_lines(left: Iterable[dict[str, str]]) -> tuple[str, ...]:
    """Return a sentence about each column that was kept out of prompts. left: each row's reasons by column."""
    counts, reasons = Counter[str](), dict[str, str]()
    for row in left:
        counts.update(row.keys())
        reasons |= {name: why for name, why in row.items() if name not in reasons}
    return tuple(
        f"the column {name!r} stays out of the prompt and is left to rewards (rows: {counts[name]}): {why}"
        for name, why in reasons.items()
    )


def with_columns(prompt: str | list, row: Row) -> str | list:
    """Prepend the messages from other columns of the row to a prompt."""
    whole = with_system(row, [*earlier(row), *as_messages(prompt)])
    return whole if isinstance(prompt, list) or len(whole) > 1 else prompt


def around_prompt(prompt: str | list, row: dict, template: str) -> str | list:
    """Apply `--data.template` to a text prompt, or to the last user message of a chat prompt."""
    if isinstance(prompt, str):
        return with_values("--data.template", template, {**row, "prompt": prompt})
    for i in reversed(range(len(prompt))):
        if prompt[i].get("role") == "user":
            text = with_values("--data.template", template, {**row, "prompt": prompt[i].get("content")})
            return [*prompt[:i], {**prompt[i], "content": text}, *prompt[i + 1 :]]
    raise ValueError("--data.template is put around a message of the user, but the prompt has none")


def column_names(text: str) -> list[str]:
    """Return the columns that `with_values` inserts into a text, or an empty list if the text is invalid."""
    try:
        return [re.split(r"[\[.]", name)[0] for name in _fields(text)]
    except ValueError:
        return []


def _fields(text: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]


def with_values(flag: str, text: str, row: dict) -> str:
    """Replace `{name}` and `{name[key]}` in a text with the row's values; all other braces must be doubled.

    Raises ValueError, which names the flag, if the text is malformed or the row lacks a column or key.
    """
    try:
        for name in _fields(text):
            base = re.split(r"[\[.]", name)[0]
            if "." in re.sub(r"\[[^\]]*\]", "", name):
                raise ValueError(f"{name!r} reads an attribute of a value; write {{name}} or {{name[key]}}")
            if base not in row:
                raise ValueError(f"no column {base!r}; there are {', '.join(map(str, row))} (--data.prompt-column)")
        return text.format(**row)
    except (ValueError, LookupError, AttributeError, TypeError) as e:
        raise ValueError(f"{flag} {text!r}: {e}; write braces that do not name a column as {{{{ and }}}}") from e
