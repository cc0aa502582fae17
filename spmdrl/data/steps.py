"""Splits responses into steps, and reads rows of labelled steps for process reward models.

A row has a prompt, a list `completions` with the text of each step of one response, and a list `labels` with a number
in [0, 1] for each step. A label is true or false, or it estimates how often the final answer is correct after the steps
so far (https://arxiv.org/abs/2312.08935). Steps with a null label are not trained on. TRL uses this format.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from spmdrl.data.dialogues import PROMPTS, Columns, Example, check_text_only, column_of, illustrated_example, pair_of
from spmdrl.data.row_columns import Row, RowError, check_text, kind_of, listed

MARK = "\ufffd"
"""Replacement character that decoders return for invalid or incomplete bytes."""


def step_ends(text: str, separator: str) -> list[int]:
    """Return the end of each step in a text, as a number of characters. A text has at least one step.

    A step ends with the separator, and the text after the last separator is a step too. A piece that contains only
    whitespace before its separator belongs to the previous step, or to the first step if there is no previous one.
    """
    ends, at = [], 0
    while (found := text.find(separator, at)) >= 0:
        at = found + len(separator)
        ends.append(at)
    if at < len(text):
        ends.append(len(text))
    steps: list[int] = []
    begin = 0
    for end in ends:
        if text[begin:end].removesuffix(separator).strip():
            steps.append(end)
        elif steps:
            steps[-1] = end
        begin = end
    return steps or [len(text)]


def tokens_of_ends(decode: Callable[[list[int]], str], tokens: list[int], ends: list[int]) -> list[int]:
    """Return the index of the token that contains the last character before each end.

    decode: function that decodes tokens. The text of the first n tokens must be a prefix of the whole text, except for
    a last character with incomplete bytes. ends: character counts, ascending, from 1 to the length of the text.
    """
    text = decode(tokens)
    if reached := progress(decode, tokens, text):
        return [bisect_left(reached, end) for end in ends]

    # A token's text can depend on tokens far before it, so the text is decoded from the start each time.
    @cache
    def begun(count: int) -> str:
        return decode(tokens[:count])

    def first(end: int) -> int:
        return bisect_left(range(len(tokens)), True, key=lambda count: begun(count)[:end] == text[:end]) - 1

    return [first(end) for end in ends]


def progress(decode: Callable[[list[int]], str], tokens: list[int], text: str) -> list[int]:
    """Return each token's end as a number of characters, or an empty list if a token's text depends on distant tokens.

    Each token is decoded with only a few preceding tokens, so the cost is linear in the number of tokens.
    """
    out: list[int] = []
    pieces: list[str] = []
    before, begin, done = 0, 0, 0
    for i in range(len(tokens)):
        known, both = decode(tokens[before:begin]), decode(tokens[before : i + 1])
        if not both.startswith(known):
            return []
        # A character with incomplete bytes is decoded as MARK.
        whole = both.rstrip(MARK)
        out.append(done + max(len(whole) - len(known), 0))
        if len(whole) == len(both) > len(known):
            pieces.append(both[len(known) :])
            before, begin, done = begin, i + 1, out[-1]
    rest = decode(tokens[before:]).removeprefix(decode(tokens[before:begin]))
    if "".join(pieces) + rest != text:
        return []
    # An incomplete character at the end of the text belongs to the last token.
    return out[:-1] + [len(text)] if out else []


@dataclass(frozen=True)
class StepColumns(Columns):
    """Column names of labelled steps."""

    steps: str = "completions"
    labels: str = "labels"


@dataclass
class LabelledSteps:
    """One row of labelled steps."""

    example: Example
    """The prompt, and the response that consists of the steps."""
    text: str
    """The response: all steps, joined with the separator."""
    labels: list[float | None]
    """The label of each step, or None for steps that are not trained on."""


def has_steps(row: dict, columns: StepColumns) -> bool:
    """Return True if a row has the step and label columns."""
    return row.get(columns.steps) is not None and row.get(columns.labels) is not None


def steps_of(
    row: dict, columns: StepColumns, separator: str, system: str = "", text_only: str = "this job"
) -> LabelledSteps:
    """Read a row of labelled steps.

    separator: text that ends each step except the last. system: default system message. text_only: as in `example_of`.

    Raises RowError if the row has another format, or if one of its columns is malformed.
    """
    row = Row(row)
    check_text(row)
    check_text_only(row, columns, text_only)
    prompt = column_of(row, columns.prompt, PROMPTS)
    if prompt is None or not has_steps(row, columns):
        raise RowError(
            f"its columns are {', '.join(map(str, row)) or 'none'}: it needs a prompt ({', '.join(PROMPTS)}), the "
            f"steps of a response ({columns.steps}) and their labels ({columns.labels}); other names are given by "
            "--data.prompt-column, --data.steps-column, --data.labels-column"
        )
    steps = _steps(listed(row[columns.steps]), columns.steps)
    labels = _labels(listed(row[columns.labels]), columns, len(steps))
    text = _joined(steps, separator)
    example = pair_of(row, listed(prompt), text, columns, system, not text_only)
    if not text_only:
        example = illustrated_example(row, example, columns, system)
    return LabelledSteps(example, text, labels)


def _steps(found: Any, column: str) -> list[str]:
    if not isinstance(found, list):
        raise RowError(f"its {column} are {kind_of(found)}: they must be a list with a text for each step")
    if not found:
        raise RowError(f"its {column} are empty: give the text of each step, or leave the row out")
    for i, step in enumerate(found, 1):
        if not isinstance(step, str):
            raise RowError(f"step {i} of its {column} is {kind_of(step)}, not text")
        if not step.strip():
            raise RowError(f"step {i} of its {column} is empty: leave the step and its label out")
    return found


def _labels(found: Any, columns: StepColumns, steps: int) -> list[float | None]:
    if not isinstance(found, list):
        raise RowError(f"its {columns.labels} are {kind_of(found)}: they must be a list with a label for each step")
    if len(found) != steps:
        raise RowError(
            f"it does not have as many labels ({columns.labels}: {len(found)}) as steps ({columns.steps}: {steps}): "
            "give each step a label, or null if it is not trained on"
        )
    for i, label in enumerate(found, 1):
        if label is not None and not (isinstance(label, int | float) and 0 <= label <= 1):
            raise RowError(
                f"label {i} of its {columns.labels} is {kind_of(label)}: it must be true or false, a number in [0, 1], "
                "or null for a step that is not trained on"
            )
    return [None if label is None else float(label) for label in found]


def _joined(steps: list[str], separator: str) -> str:
    """Join steps into a response. Raises RowError if `step_ends` would split the response differently."""
    text, begins = "", []
    for i, step in enumerate(steps, 1):
        begins.append(len(text) + len(step) - len(step.lstrip()))
        text += step
        if i < len(steps) and not step.endswith(separator):
            text += separator
    ends = step_ends(text, separator)
    bounds = [*begins[1:], len(text)]
    if len(ends) != len(steps) or any(
        not begin < end <= bound for begin, end, bound in zip(begins, ends, bounds, strict=True)
    ):
        holds = next((i for i, step in enumerate(steps, 1) if len(step_ends(step, separator)) > 1), 0)
        which = f"step {holds} contains the separator" if holds else "a step begins or ends with a part of it"
        raise RowError(
            f"its response, divided at the separator {separator!r}, has other steps than the row ({len(ends)}, not "
            f"{len(steps)}), because {which}: choose another separator (--reward-model.separator), or divide the step"
        )
    return text
