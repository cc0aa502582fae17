"""Divides the start of a reply that the prompt gives (`--data.prefill`) where it opens the mark of an answer."""

import re

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
MARK = re.compile(
    r"####[^\n]*$|<answer>(?:(?!</answer>).)*$|```[^`]*$"
    r"|answer[*_]*\s*(?:is)?\s*:[^\n]*$",
    re.IGNORECASE | re.DOTALL,
)
"""A mark of an answer, but for a box, that is open at the end of a text: `####`, `<answer>`, a fence, or `Answer:`."""


def _is_open(inside: str) -> bool:
    """Tells whether a brace that stands before a text is not closed in it. Escaped braces count for nothing."""
    depth = 1
    for brace in re.findall(r"\\.|[{}]", inside, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth == 0:
            return False
    return True


def divided(prefill: str) -> tuple[str, str]:
    """Return the start of a reply up to an open mark of an answer, and from there on.

    Graders look for marks in a response. They read the open one with it, so that what follows an open box is an answer;
    of the rest, such as the numbers of a task that it repeats, they read nothing.
    """
    fences = [found.start() for found in re.finditer("```", prefill)]
    found = next((m for m in MARK.finditer(prefill) if m.group()[0] != "`" or len(fences) % 2), None)
    box = next((m.start() for m in reversed([*BOX.finditer(prefill)]) if _is_open(prefill[m.end() :])), len(prefill))
    at = min(box, found.start() if found else len(prefill))
    return prefill[:at], prefill[at:]
