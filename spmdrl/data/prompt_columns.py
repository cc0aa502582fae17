"""Columns beside a prompt that its chat template reads, and those of the same names that are left to rewards.

The names are ordinary words: `documents` may be data for a reward, `history` a patient record. A column goes
into the prompt only where a chat template renders it, its value has the form that is looked for, and no other setting
names it.
"""

from collections.abc import Callable, Iterable
from typing import Any

from spmdrl.data.dialogues import earlier, kind_of, listed
from spmdrl.data.row_columns import (
    DEVELOPER,
    HISTORY,
    KWARGS,
    SYSTEMS,
    TOOLS,
    VARIABLES,
    Row,
    RowError,
    system_of,
    tools_of,
    variables_of,
    with_system,
)


def documents_of(row: dict) -> None:
    """Raise RowError where the documents of a row are not a list of objects."""
    found = listed(row["documents"])
    if not (isinstance(found, list) and all(isinstance(each, dict) for each in found)):
        raise RowError(f"its documents are {kind_of(found)}, not a list of objects")


READERS: dict[str, Callable[[dict], Any]] = {
    **dict.fromkeys((*SYSTEMS, DEVELOPER), system_of),
    HISTORY: earlier,
    TOOLS: tools_of,
    **dict.fromkeys((KWARGS, *VARIABLES), variables_of),
    "documents": documents_of,
}
"""Column -> what reads it, which raises RowError where the value has not the form."""
OF_EPISODES = (*SYSTEMS, DEVELOPER, HISTORY, KWARGS, *VARIABLES)
"""Columns that are read where an environment begins the episodes."""


def rendered_columns(row: Row, named: Iterable[str], template: bool, begun: bool) -> tuple[Row, dict[str, str]]:
    """Return a row without the columns that stay out of its prompt, and why they do, by name.

    named: columns that settings name, which are left out without a word. template: a chat template renders the prompt.
    begun: an environment begins the episodes.
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
    kept = Row({name: value for name, value in row.items() if name not in left and name not in named})
    return kept, {name: why for name, why in left.items() if row[name] not in ("", [], {})}


def left_lines(left: Iterable[dict[str, str]]) -> tuple[str, ...]:
    """Return a sentence on each column that stayed out of prompts. left: of each row, names and reasons."""
    counts, reasons = dict[str, int](), dict[str, str]()
    for row in left:
        for name, why in row.items():
            counts[name] = counts.get(name, 0) + 1
            reasons.setdefault(name, why)
    return tuple(
        f"the column {name!r} stays out of the prompt in {counts[name]} rows, and is left to rewards: {why}"
        for name, why in reasons.items()
    )


def with_columns(prompt: str | list, row: Row) -> str | list:
    """Return a prompt with the messages that other columns of its row put before it."""
    before = earlier(row)
    messages = [*before, *(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])]
    whole = with_system(row, messages)
    return whole if isinstance(prompt, list) or len(whole) > 1 else prompt
