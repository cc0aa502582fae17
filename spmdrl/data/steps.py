"""Steps of a response: where each ends in the text, and which token holds the last character of each."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache

MARK = "\ufffd"
"""The character that decoders give for bytes that are none."""


def step_ends(text: str, separator: str) -> list[int]:
    """Return the number of characters up to the end of each step of a text, the separator included; at least one.

    A step ends with the separator, and what follows the last separator is a step too. A piece without anything but
    white space belongs to the step before it, or at the beginning to the first one.
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
    """Return the index of the token with which the text has reached each end: it holds the last character before it.

    decode: gives the text of tokens; that of the first few must begin as that of all does, but for a character which
    is cut in two. ends: ascending, each at least 1 and at most the number of characters.
    """
    text = decode(tokens)
    if reached := progress(decode, tokens, text):
        return [bisect_left(reached, end) for end in ends]

    # The text of some tokens depends on those far before them.
    @cache
    def begun(count: int) -> str:
        return decode(tokens[:count])

    def first(end: int) -> int:
        return bisect_left(range(len(tokens)), True, key=lambda count: begun(count)[:end] == text[:end]) - 1

    return [first(end) for end in ends]


def progress(decode: Callable[[list[int]], str], tokens: list[int], text: str) -> list[int]:
    """Return how many characters of a text are there with each of its tokens; empty if neighbours do not tell.

    A token is decoded behind the few before it, so the work grows with the number of tokens and not with its square.
    """
    out: list[int] = []
    pieces: list[str] = []
    before, begin, done = 0, 0, 0
    for i in range(len(tokens)):
        known, both = decode(tokens[before:begin]), decode(tokens[before : i + 1])
        if not both.startswith(known):
            return []
        # A character of which bytes are missing is shown as a mark until they come.
        whole = both.rstrip(MARK)
        out.append(done + max(len(whole) - len(known), 0))
        if len(whole) == len(both) > len(known):
            pieces.append(both[len(known) :])
            before, begin, done = begin, i + 1, out[-1]
    rest = decode(tokens[before:]).removeprefix(decode(tokens[before:begin]))
    if "".join(pieces) + rest != text:
        return []
    # Marks at the end are of the text.
    return out[:-1] + [len(text)] if out else []
