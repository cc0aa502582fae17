"""Divides the start of a reply that the prompt gives (`--data.prefill`) where it opens the mark of an answer."""

import re

MARK = re.compile(
    r"\\(?:boxed|fbox)\s*\{[^{}]*$|####[^\n]*$|<answer>(?:(?!</answer>).)*$|```[^`]*$"
    r"|answer[*_]*\s*(?:is)?\s*:[^\n]*$",
    re.IGNORECASE | re.DOTALL,
)
"""A mark of an answer that is open at the end of a text: of a box, `####`, `<answer>`, a fence, or `Answer:`."""


def divided(prefill: str) -> tuple[str, str]:
    """Return the start of a reply up to an open mark of an answer, and from there on.

    Graders look for marks in a response. They read the open one with it, so that what follows an open box is an answer;
    of the rest, such as the numbers of a task that it repeats, they read nothing.
    """
    fences = [found.start() for found in re.finditer("```", prefill)]
    found = next((m for m in MARK.finditer(prefill) if m.group()[0] != "`" or len(fences) % 2), None)
    at = found.start() if found else len(prefill)
    return prefill[:at], prefill[at:]
