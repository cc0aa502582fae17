"""Reads the settings and the paper of a function of algos/ from it, and finds functions by name in a table."""

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

F = TypeVar("F")


def settings_of(function: Callable) -> dict[str, object]:
    """Keyword-only parameters of a function of algos/, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def paper_of(function: Callable) -> str:
    """The first address in a function's docstring, "" where there is none."""
    found = re.search(r"https?://[^\s,;)]+", function.__doc__ or "")
    return found[0].rstrip(".") if found else ""


def find(name: str, table: Mapping[str, F], what: str) -> F:
    """table[name]. ValueError: no such name; the message has the nearest one and the list."""
    if name in table:
        return table[name]
    raise ValueError(f"unknown {what} {name!r}{nearest(name, table)}: choose one of {', '.join(table)}")


def nearest(name: str, known) -> str:
    """`, did you mean ...?` for a name that is close to a known one, else nothing."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
