"""Finds the control token that ends a turn of an assistant, in supervised rows and in conversations of agents."""

import re
from collections.abc import Callable
from typing import Literal

from spmdrl.data.rendering import PROBE, Dialogue, Renderer, TemplateError
from spmdrl.data.shown import without_thought

Ends = Literal["own", "last", "next", "none"]


def end_of_turn(
    controls: re.Pattern[str], call_ends: frozenset[str], alone: str, followed: str
) -> tuple[Ends, re.Match[str] | None]:
    """Return how a turn ends, and the control token that ends it.

    controls: matches control tokens. call_ends: those that end a call but not the turn (`Renderer.call_ends`). alone:
    the text after the assistant's words if nothing follows the turn. followed: the same if a message follows; it may
    include the text of that message.

    - own: a token ends the turn with and without a message that follows; its place is in `followed`.
    - last: another token ends the turn if nothing follows (gpt-oss); its place is in `alone`.
    - next: the template does not end turns, so a model stops with the token that begins the next message (GLM); its
      place is in `followed`.
    - none: no such token is found.
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


def turn_with_end(render: Renderer, dialogue: Dialogue, i: int, upto: Callable[[int], str]) -> tuple[str, bool]:
    """Return the rendering up to message i, cut after the control token that ends it, and True if there is one.

    upto: renders the first messages of the dialogue.
    """
    after = [m for m in dialogue.messages[i + 1 : i + 2] if m["role"] != "assistant"]
    if not after:
        after = [{"role": "tool" if dialogue.messages[i].get("tool_calls") else "user", "content": PROBE}]
    written = upto(i + 1)
    kind, end, follows, tail = _end_before(render, dialogue.upto(i + 1), after[0], written)
    if end is None and (brief := without_thought(dialogue.messages[i])):
        # The template may drop the thought as soon as a message follows; what begins that message stays the same.
        shorter = dialogue.upto(i).then(brief)
        kind, end, _, _ = _end_before(render, shorter, after[0], render(shorter))
        return (written + end.group(), True) if kind == "next" and end else (written, False)
    if end is None:
        return written, False
    return (written if kind == "last" else follows)[: tail + end.end()], True


def _end_before(render: Renderer, dialogue: Dialogue, after: dict, written: str):
    """Return `end_of_turn` of a dialogue's last turn, the rendering with the message `after` it, and a place.

    written: the rendering without that message. The place is where the control tokens at the end of `written` begin.
    """
    tail = len(written)
    for found in reversed(list(render.controls.finditer(written))):
        if written[found.end() : tail].strip():
            break
        tail = found.start()
    try:
        follows = render(dialogue.then(after))
    except TemplateError:
        follows = written
    followed = follows[tail:] if follows.startswith(written[:tail]) else ""
    return *end_of_turn(render.controls, render.call_ends, written[tail:], followed), follows, tail
