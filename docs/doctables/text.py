"""Formats paragraphs, tables and links for the pages of docs/."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable

WIDTH = 128


def filled(text: str, indent: str = "") -> str:
    """Return a paragraph wrapped into lines. indent: of all lines but the first."""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, expand_tabs=False
    )


def table(*rows: Iterable[str]) -> str:
    """Return a Markdown table. The first row is its head."""
    head, *rest = (list(row) for row in rows)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rest)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def names(found: list[str], page: str = "") -> str:
    """Return names as links to their sections on a page, separated by commas."""
    return ", ".join(f"[`{name}`]({page}#{name})" for name in found)


def linked(text: str, known: set[str]) -> str:
    """Return the text of a docstring in which the names of `known` and references to pages of docs/ are links."""
    text = re.sub(r"`(\w+)`", lambda m: f"[`{m[1]}`](#{m[1]})" if m[1] in known else m[0], text)
    return re.sub(r"\bdocs/((\w+\.md)(?:#[\w-]+)?)", r"[\2](\1)", text)


def paragraphs(function: Callable) -> list[str]:
    """Return the paragraphs of a docstring. Each is joined into one line, unless it is indented."""
    parts = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    return [part if part.startswith("    ") else " ".join(part.split()) for part in parts]
