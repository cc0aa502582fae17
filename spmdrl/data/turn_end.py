"""Finds what ends a turn of an assistant in rendered text, for supervised rows and for conversations of agents."""

import re
from typing import Literal

Ends = Literal["own", "last", "next", "none"]


def end_of_turn(
    controls: re.Pattern[str], call_ends: frozenset[str], alone: str, followed: str
) -> tuple[Ends, re.Match[str] | None]:
    """Return how a turn ends, and the control token that ends it.

    controls: finds control tokens. call_ends: those that end a call but not the turn (`Renderer.call_ends`): the policy
    may go on with another call after them. alone: the text after what the assistant said, where nothing follows the
    turn. followed: the same where a message follows, without the text of that message or with it.

    - own: a token that stands there with and without a message that follows; its place is in `followed`.
    - last: the turn ends with another token where nothing follows (gpt-oss); its place is in `alone`.
    - next: the template ends no turns, so a model stops with the token by which the next message begins (GLM); its
      place is in `followed`.
    """
    ours, others = list(controls.finditer(followed)), list(controls.finditer(alone))
    same = 0
    while same < min(len(ours), len(others)) and followed[: ours[same].end()] == alone[: others[same].end()]:
        same += 1
    if same and ours[same - 1].group() not in call_ends:
        return "own", ours[same - 1]
    if len(others) > same:
        return "last", others[-1]
    if len(ours) > same:
        length = ours[same - 1].end() if same else len(alone.rstrip())
        if followed[:length] == alone[:length] and not followed[length : ours[same].start()].strip():
            return "next", ours[same]
    return "none", None
