"""Reads preference rows: two responses to one prompt, or one labelled response.

- A pair has two sides, `chosen` and `rejected`, both text or both messages. The prompt is a separate column, or the
  common prefix of both sides (TRL, UltraFeedback, HH-RLHF).
- A labelled response has `prompt`, `completion` and `label`; the label is true for a good response (KTO).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spmdrl.data.dialogues import (
    COMPLETIONS,
    PROMPTS,
    Columns,
    Example,
    check_text_only,
    column_of,
    dialogue_of,
    earlier,
    illustrated_example,
    messages_of,
    pair_of,
)
from spmdrl.data.row_columns import Row, RowError, check_text, kind_of, listed

CHOSEN, REJECTED = 0, 1
"""Sample indices of a pair's two sides. A response labelled true counts as chosen, and a response labelled false as
rejected.
"""
SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class PreferenceColumns(Columns):
    """Column names of preference data."""

    chosen: str = "chosen"
    rejected: str = "rejected"
    label: str = "label"
    margin: str = "margin"


@dataclass
class Preference:
    """One preference row: a pair, or a labelled response."""

    sides: dict[int, Example] = field(default_factory=dict)
    """Maps CHOSEN and REJECTED to the examples on these sides; a labelled response has only one side."""
    margin: float | None = None
    """Margin in favor of the chosen side, or None if the row has none."""


def preference_of(row: dict, columns: PreferenceColumns, system: str = "", text_only: str = "this job") -> Preference:
    """Read one preference row. The images of a row belong to all of its sides.

    system: system message for dialogues that have none. text_only: as in `example_of`.

    Raises RowError if the row is neither a pair nor a labelled response, if its sides are equal or answer different
    prompts, or if a column is malformed.
    """
    row = Row(row)
    check_text(row)
    check_text_only(row, columns, text_only)
    found = _preference(row, columns, system, not text_only)
    if not text_only:
        sides = {side: illustrated_example(row, each, columns, system) for side, each in found.sides.items()}
        found = Preference(sides, found.margin)
    return found


def _preference(row: Row, columns: PreferenceColumns, system: str, images: bool) -> Preference:
    if columns.chosen in row and columns.rejected in row:
        return Preference(_pair(row, columns, system, images), _margin(row, columns.margin))
    prompt, completion = column_of(row, columns.prompt, PROMPTS), column_of(row, columns.completion, COMPLETIONS)
    if prompt is not None and completion is not None and columns.label in row:
        example = pair_of(row, prompt, completion, columns, system, images)
        return Preference({CHOSEN if _wanted(row[columns.label]) else REJECTED: example})
    raise RowError(
        f"its columns are {', '.join(map(str, row)) or 'none'}: it needs {columns.chosen} and {columns.rejected}, or a "
        f"prompt ({', '.join(PROMPTS)}) with a completion ({', '.join(COMPLETIONS)}) and {columns.label}; other names "
        "are given by --data.chosen-column, --data.rejected-column, --data.prompt-column, --data.completion-column, "
        "--data.label-column"
    )


def _wanted(label: Any) -> bool:
    if label not in (0, 1):
        raise RowError(f"its label is {kind_of(label)}: it must be true or false")
    return bool(label)


def _margin(row: dict, column: str) -> float | None:
    margin = row.get(column)
    number = isinstance(margin, int | float) and not isinstance(margin, bool) and math.isfinite(margin)
    if margin is not None and not number:
        raise RowError(f"its {column} is {kind_of(margin)}, not a number")
    return None if margin is None else float(margin)


def _pair(row: dict, columns: PreferenceColumns, system: str, images: bool) -> dict[int, Example]:
    given = [listed(row[name]) for name in (columns.chosen, columns.rejected)]
    prompt = listed(column_of(row, columns.prompt, PROMPTS))
    if prompt is None and earlier(row):
        raise RowError("its history needs a prompt to follow it, but no column holds one (--data.prompt-column)")
    if isinstance(given[0], list) != isinstance(given[1], list):
        raise RowError(
            f"its chosen side is {kind_of(given[0])} and its rejected side {kind_of(given[1])}: give both as text, or "
            "both as messages"
        )
    if not isinstance(given[0], list | str):
        raise RowError(f"its sides are {kind_of(given[0])}: they must be text or messages")
    if given[0] == given[1]:
        raise RowError("its chosen and rejected sides are equal")
    if isinstance(given[0], list) and (prompt is None or _whole(given, images)):
        return _dialogues(row, prompt, given, columns, system, images)
    plain = prompt is None
    if plain:
        prompt, given = _split(given)
    out = _examples(given, lambda text: pair_of(row, prompt, text, columns, system, images))
    for example in out.values():
        example.plain = plain
    return out


def _examples(sides: list, read: Callable[[Any], Example]) -> dict[int, Example]:
    """Read both sides of a pair. Raises RowError with the name of the malformed side."""
    out = {}
    for i, (name, side) in enumerate(zip(SIDES, sides, strict=True)):
        try:
            out[i] = read(side)
        except RowError as e:
            raise RowError(f"its {name} side: {e}") from e
    return out


def _whole(given: list, images: bool) -> bool:
    """Return True if both sides are complete dialogues rather than just answers."""
    return all(messages_of(side, images)[0]["role"] != "assistant" for side in given)


def _dialogues(
    row: dict, prompt: Any, given: list, columns: PreferenceColumns, system: str, images: bool
) -> dict[int, Example]:
    """Return both sides as dialogues. Their common leading messages are the prompt, which is not trained on."""
    chosen, rejected = (messages_of(side, images) for side in given)
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    if not common and chosen[0]["role"] == rejected[0]["role"] == "assistant":
        raise RowError("it has no prompt: no column holds one, and its sides have no message in common")
    for side, messages in zip(SIDES, (chosen, rejected), strict=True):
        if common == len(messages):
            raise RowError(f"its {side} side ends where the other continues")
        if messages[common]["role"] != "assistant":
            raise RowError(
                f"its sides answer different prompts: message {common + 1} ({messages[common]['role']}) differs"
            )
    if isinstance(prompt, str) and not any(m["content"] == prompt for m in chosen[:common]):
        raise RowError(f"its sides do not answer its prompt {prompt[:40]!r}, which is not a message that they share")
    if isinstance(prompt, list) and chosen[: len(before := messages_of(prompt, images))] != before:
        raise RowError("its sides do not begin with its prompt")
    out = _examples([chosen, rejected], lambda messages: dialogue_of(row, messages, columns, system))
    for i, messages in enumerate((chosen, rejected)):
        # `dialogue_of` might have prepended a system message, which is not trained on either.
        before = common + len(out[i].trained) - len(messages)
        out[i].trained[:before] = [False] * before
    return out


def _split(given: list[str]) -> tuple[str, list[str]]:
    """Split two texts into their common prefix and the remainder of each.

    The split is before the space in front of a word, because most tokenizers encode a word together with that space.
    """
    common = 0
    while common < min(map(len, given)) and given[0][common] == given[1][common]:
        common += 1
    while common and not given[0][common - 1].isspace():
        common -= 1
    common -= given[0][:common].endswith(" ")
    if not given[0][:common].strip():
        raise RowError("it has no prompt: no column holds one, and its chosen and rejected texts begin differently")
    return given[0][:common], [text[common:] for text in given]
