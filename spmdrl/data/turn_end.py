"""Finds the control token that ends an assistant turn, in supervised rows and in agent conversations."""

import re
from collections.abc import Callable
from typing import Literal

from spmdrl.data.rendering import PROBE, Dialogue, Renderer, TemplateError
from spmdrl.data.shown import without_thought

Ends = Literal["own", "last", "next", "none"]


def end_of_turn(
    controls: re.Pattern[str], call_ends: frozenset[str], alone: str, followed: str
) -> tuple[Ends, re.Match[str] | None]:
    """Determine how a turn ends, and which control token ends it.

    controls: pattern that matches control tokens. call_ends: tokens that end a call but not the turn
    (`Renderer.call_ends`). alone: the text after the assistant's words if nothing follows the turn. followed: the text
    after these words if a message follows; it may include the text of that message.

    - own: the same token ends the turn whether or not a message follows; the match is in `followed`.
    - last: a different token ends the turn if nothing follows (gpt-oss); the match is in `alone`.
    - next: the template does not end turns, so a model stops with the token that begins the next message (GLM); the
      match is in `followed`.
    - none: no token ends the turn; the match is None.
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
    """Return the text up to and including the control token that ends turn i, and whether there is such a token.

    upto: function that renders the first n messages of the dialogue.
    """
    after = [m for m in dialogue.messages[i + 1 : i + 2] if m["role"] != "assistant"]
    if not after:
        after = [{"role": "tool" if dialogue.messages[i].get("tool_calls") else "user", "content": PROBE}]
    written = upto(i + 1)
    kind, end, follows, tail = _end_before(render, dialogue.upto(i + 1), after[0], written)
    if end is None and (brief := without_thought(dialogue.messages[i])):
        # The template might drop the thought once a message follows. A rendering without the thought still shows which
        # token starts the next message.
        shorter = dialogue.upto(i).then(brief)
        kind, end, _, _ = _end_before(render, shorter, after[0], render(shorter))
        return (written + end.group(), True) if kind == "next" and end else (written, False)
    if end is None:
        return written, False
    return (written if kind == "last" else follows)[: tail + end.end()], True


def _end_before(render: Renderer, dialogue: Dialogue, after: dict, written: str):
    """Return the result of `end_of_turn` for a dialogue's last turn, the text with the message `after`, and an index.

    written: the text without the message `after`. The index marks where the control tokens at the end of `written`
    begin.
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
