"""Finds the text that a chat template puts between an assistant turn and the next generation prompt.

The dialogue is rendered twice with the answers that follow the turn, and twice without them. All assistant texts are
replaced by stand-ins that differ between the two renderings, so their common suffix does not depend on the assistant's
words. The control token that ends the turn is the last one that occurs both with and without the answers; for
exceptions see `end_of_turn`. A rendering with other answers shows whether the text up to this token is independent of
the answers, and whether each answer is shown; if not, an error is raised.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

from spmdrl.data.rendering import PROBE, Dialogue, Renderer, TemplateError, probed, tool_call
from spmdrl.data.turn_end import end_of_turn

STANDINS = ("Xk" + PROBE + "a", "9wm" + PROBE + "b")
"""Stand-ins for the text of a turn; they differ in the first and the last character and in length."""
EARLIER = ("Xk" + PROBE + "c", "9wm" + PROBE + "d")
"""Stand-ins for earlier turns. They differ from STANDINS, so that templates that hide the last turn are detected."""
THOUGHT = PROBE + "e"
SHAPES = ("calls", "first call", "text and calls", "text")
"""Forms of the stand-in for a turn with tool calls, from the most informative to the least.

Some templates refuse several calls in one turn, and some show no calls. The next form is then tried.
"""


@dataclass(frozen=True)
class Tail:
    """The text from the token that ends an assistant turn up to and including the next generation prompt."""

    text: str
    """The text, which starts with a control token."""
    closing: int
    """Number of leading characters of `text` that belong to the turn, or 0 if the template does not end turns."""
    alone: str
    """The text that starts with the turn's end token, as rendered if nothing follows the turn."""


def linked(messages: list[dict]) -> list[dict]:
    """Add the names and ids that templates need in tool calls and their answers.

    An answer takes a missing name or `tool_call_id` from its call, which is the call with the answer's id, or else the
    first unanswered call. A call without an id gets an id of nine letters and digits, and a call without arguments gets
    an empty object.
    """
    out: list[dict] = []
    waiting: list[dict] = []
    for message in messages:
        message = dict(message)
        calls = message.pop("tool_calls", None) or []
        if message["role"] == "tool":
            called = next((call for call in waiting if call["id"] == message.get("tool_call_id")), None)
            called = called or next(iter(waiting), tool_call("tool", {}, len(out)))
            waiting = [call for call in waiting if call is not called]
            message["tool_call_id"] = message.get("tool_call_id") or called["id"]
            message["name"] = message.get("name") or called["function"]["name"]
        else:
            waiting = [_call(call, place) for place, call in enumerate(calls)]
            message |= {"tool_calls": waiting} if waiting else {}
        out.append(message)
    return out


def _call(call: dict, place: int) -> dict:
    function = dict(call.get("function") or {key: call.get(key) for key in ("name", "arguments")})
    function["name"] = str(function.get("name") or "tool")
    function["arguments"] = {} if function.get("arguments") is None else function["arguments"]
    return {"id": call.get("id") or f"call{place:05d}", "type": "function", "function": function}


def tail_of(
    render: Renderer, controls: re.Pattern[str], whole: Dialogue, turn: int, shape: str, ends: dict[tuple, str]
) -> Tail:
    """Return the text that follows the assistant's turn at index `turn` of a dialogue; messages after it are answers.

    ends: cache of the text after a last turn, which depends only on the template and the stand-in's form.

    Raises TemplateError, which gives the reason, if the template rejects the stand-ins, omits the turn or an answer to
    it, or renders the turn differently when its answers change.
    """
    new = whole.messages[turn + 1 :]
    past = [Dialogue(_standins(whole.messages, turn, which, shape), whole.tools, whole.more) for which in (0, 1)]
    texts = [render(_and(dialogue, new), True) for dialogue in past]
    if not all(standin in text for standin, text in zip(STANDINS, texts, strict=True)):
        raise TemplateError("it does not show the assistant's turn")
    after = _after_standins(texts)
    with_call = bool(past[0].messages[-1].get("tool_calls"))
    if (shape, with_call) not in ends:
        ends[shape, with_call] = _after_standins([render(dialogue) for dialogue in past])
    alone = ends[shape, with_call]
    probes = [f"{PROBE}{i:03d}" for i in range(len(new))]
    changed = [m | {"content": probed(m["content"], probe)} for m, probe in zip(new, probes, strict=True)]
    other = render(_and(past[0], changed), True)
    before = texts[0].removesuffix(after)
    if not other.startswith(before):
        raise TemplateError("it renders a turn differently when the answer to the turn changes")
    for message, probe in zip(new, probes, strict=True):
        if probe not in other[len(before) :]:
            raise TemplateError(f"it does not show the {message['role']} message after the turn")
    first = min(other.index(probe, len(before)) for probe in probes) - len(before)
    if after[:first] != other[len(before) :][:first]:
        raise TemplateError("it renders the end of a turn differently when the answer to the turn changes")
    if any(isinstance(m["content"], list) for m in new):
        # An image may stand before the first text, and the template writes control tokens for it.
        changed = [m | {"content": [{"type": "text", "text": probe}]} for m, probe in zip(new, probes, strict=True)]
        first = min(first, len(commonprefix([after, render(_and(past[0], changed), True).removeprefix(before)])))
    return _cut(controls, render.call_ends, after, first, alone, with_call)


def _and(dialogue: Dialogue, new: Sequence[dict]) -> Dialogue:
    return Dialogue([*dialogue.messages, *new], dialogue.tools, dialogue.more)


def _standins(messages: list[dict], turn: int, which: int, shape: str) -> list[dict]:
    """Return the messages up to the turn, with assistant messages replaced by stand-in `which` (0 or 1).

    If tools answered an assistant message without calls, its call was malformed, and the stand-in gets calls.
    """
    out: list[dict] = []
    for i, message in enumerate(messages[: turn + 1]):
        if message["role"] != "assistant":
            out.append(message)
            continue
        text = (STANDINS if i == turn else EARLIER)[which]
        calls = [(call["id"], call["function"]["name"]) for call in message.get("tool_calls") or []]
        for answer in messages[i + 1 :]:
            if message.get("tool_calls") or answer["role"] != "tool":
                break
            calls.append((answer["tool_call_id"], answer["name"]))
        calls = calls[: 1 if shape == "first call" else None] if shape != "text" else []
        fake = [tool_call(name, {"a": text}) | {"id": key} for key, name in calls]
        standin = {"role": "assistant", "content": "" if fake and shape != "text and calls" else text}
        # Only the second stand-in has a thought, so that the tail does not depend on thoughts either.
        thought = {"reasoning_content": THOUGHT} if which and not (fake and standin["content"]) else {}
        out.append(standin | ({"tool_calls": fake} if fake else {}) | thought)
    return out


def _after_standins(texts: list[str]) -> str:
    """Return the renderings' common suffix. Raises TemplateError unless it starts where the stand-ins end."""
    shared = commonprefix([text[::-1] for text in texts])[::-1]
    if not all(text.removesuffix(shared).endswith(standin) for text, standin in zip(texts, STANDINS, strict=True)):
        raise TemplateError("the text that it puts after an assistant's turn depends on the text of the turn")
    return shared


def _cut(
    controls: re.Pattern[str], call_ends: frozenset[str], after: str, first: int, alone: str, with_call: bool
) -> Tail:
    """Return the tail. It starts with the control token that ends the turn, or else with the first one after the turn.

    call_ends: as in `end_of_turn`. after, alone: text after the stand-in with and without answers. first: index of the
    first answer's text in `after`. with_call: True if a call ends the turn.
    """
    kind, end = end_of_turn(controls, call_ends, alone, after[:first])
    found, other = list(controls.finditer(after, 0, first)), list(controls.finditer(alone))
    if not found:
        raise TemplateError("it writes no control token between an assistant's turn and the next message")
    if kind == "own" and end:
        whole = not with_call and not controls.sub("", after[: end.end()]).strip()
        start = found[0].start() if whole else end.start()
        return Tail(after[start:], end.end() - start, alone[start:])
    # gpt-oss ends the last turn with a different token than earlier turns. If `found` has a single token, it belongs to
    # the answer, because no token ends the turn.
    if kind == "last" and len(found) > 1 and after[: found[0].start()] == alone[: other[0].start()]:
        return Tail(after[found[0].start() :], len(found[0].group()), alone[other[0].start() :])
    begins = end if kind == "next" and end else found[0]
    return Tail(after[begins.start() :], 0, "")
