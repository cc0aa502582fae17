"""Descriptions in Google-style docstrings (https://google.github.io/styleguide/pyguide.html, section 3.8)."""

import re
from itertools import pairwise

_HEADER = re.compile(r"(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Examples?|Notes?):\s*$")
_ARGUMENTS = ("Args", "Arguments", "Parameters")
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def described(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the description of a function, and those of its arguments by name.

    docstring: without indentation, as `inspect.getdoc` gives it.
    """
    lines = docstring.strip().splitlines()
    heads = [i for i, line in enumerate(lines) if _HEADER.match(line)]
    description = "\n".join(lines[: heads[0]] if heads else lines).strip()
    arguments: dict[str, str] = {}
    for begin, end in pairwise([*heads, len(lines)]):
        if lines[begin].split(":")[0] in _ARGUMENTS:
            arguments |= _entries(lines[begin + 1 : end])
    return description, arguments


def _entries(lines: list[str]) -> dict[str, str]:
    """Read `name: text` or `name (type): text`, with further lines of a text indented deeper."""
    found: dict[str, list[str]] = {}
    depth, name = None, ""
    for line in lines:
        text = line.strip()
        if not text:
            continue
        indent = len(line) - len(line.lstrip())
        depth = indent if depth is None else depth
        entry = _ENTRY.match(text) if indent <= depth else None
        if entry:
            name = entry[1]
            found[name] = [entry[2].strip()]
        elif name:
            found[name].append(text)
    return {name: " ".join(part for part in parts if part) for name, parts in found.items()}
