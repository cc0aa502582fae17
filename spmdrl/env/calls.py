"""Reads tool calls from the text of an assistant turn, in one of the formats in `call_formats.py`."""

import os
from types import SimpleNamespace
from typing import Any

from spmdrl.env.base import AssistantTurn, Call
from spmdrl.env.call_formats import FORMATS
from spmdrl.env.call_reading import Tools

__all__ = ["FORMATS", "Call", "AssistantTurn", "as_message", "format_of", "parse_turn", "parse"]

_THOUGHT_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_PROBE = "zq7probe"


def parse(text: str, format: str, tools: Tools = ()) -> tuple[str, list[Call], str]:
    """Return the content, calls and thought of an assistant turn. Any text is accepted.

    Args:
        text: the turn, decoded with special tokens but without its end token, which is optional for `gpt_oss`.
        format: a name of `FORMATS`.
        tools: OpenAI function schemas, which supply argument types for formats that write arguments as plain text.

    Raises:
        ValueError: no format has this name.
    """
    if format not in FORMATS:
        raise ValueError(f"there is no form of tool calls {format!r}: use one of {', '.join(FORMATS)}")
    text = text.encode("utf-8", "replace").decode()
    form = FORMATS[format]
    thought, rest = (form.thought(text), text) if form.thought else _apart(text, form.begins)
    content, calls = form.read(rest, tools)
    for i, call in enumerate(calls):
        call.id = call.id or f"call{i:05}"
    return content if content == text else content.strip(), calls, thought.strip()


def _apart(text: str, mark: str) -> tuple[str, str]:
    """Return (thought, remaining text). A thought that starts in the prompt has only a closing tag in the text.

    mark: the tag that starts calls, or an empty string. If a thought's closing tag comes after a call and there is no
    opening tag, the text has no thought.
    """
    for begin, end in _THOUGHT_MARKS:
        start = text.find(begin)
        if start >= 0 and not text[:start].strip():
            start += len(begin)
            close = text.find(end, start)
            if close < 0:
                close = text.find(mark, start) if mark else -1
                return (text[start:close], text[close:]) if close >= 0 else (text[start:], "")
            return text[start:close], text[close + len(end) :]
        close = text.find(end)
        if close >= 0 and (start < 0 or close < start) and not (mark and 0 <= text.find(mark) < close):
            return text[:close], text[close + len(end) :]
    return "", text


def parse_turn(text: str, format: str, tools: Tools = ()) -> AssistantTurn:
    """Parse an assistant turn and add the message for chat templates. Arguments and errors are as in `parse`."""
    content, calls, thought = parse(text, format, tools)
    turn = AssistantTurn(content, calls, thought=thought)
    turn.message = as_message(turn)
    return turn


def as_message(turn: AssistantTurn) -> dict[str, Any]:
    """Return a turn as a message in OpenAI's format, for chat templates.

    Arguments are objects, not JSON text. A malformed call appears in the message without arguments, because the tool
    message that reports the error must follow a call. Tool calls parsed from code blocks are omitted, since `content`
    already contains the code.
    """
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.thought:
        message["reasoning_content"] = turn.thought
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name or "malformed_call", "arguments": call.arguments or {}},
        }
        for call in turn.calls
        if not call.inline
    ]
    return message | {"tool_calls": calls} if calls else message


def format_of(template: str) -> str:
    """Return the tool-call format of a chat template (Jinja text), or `none` if it shows no calls.

    A call is rendered with the template, and the first format whose parser reads it back correctly is returned. If the
    rendered text does not contain the call, the format is identified by its tag (`CallFormat.shown`).

    Raises:
        ValueError: the template renders calls in a format that no parser reads.
    """
    shown = _rendered_call(template)
    for name, form in FORMATS.items():
        if _PROBE in shown and shown.lstrip().startswith(form.opens):
            calls = parse(shown, name)[1]
            if [(call.name, call.arguments) for call in calls] == [(_PROBE, {"a": _PROBE})]:
                return name
    if _PROBE in shown:
        raise ValueError(
            f"the chat template shows tool calls in an unknown form ({shown.strip()[:80]!r}): "
            f"name the form in which the model writes them, one of {', '.join(FORMATS)}"
        )
    return next((name for name, form in reversed(FORMATS.items()) if form.shown and form.shown in template), "none")


def _rendered_call(template: str) -> str:
    """Return the text that a template adds for an assistant turn with one call, or "" if rendering fails."""
    from spmdrl.data.rendering import Dialogue, Renderer, TemplateError

    call = {"id": "call00000", "type": "function", "function": {"name": _PROBE, "arguments": {"a": _PROBE}}}
    question = [{"role": "user", "content": "a"}]
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
    try:
        render = Renderer(SimpleNamespace(chat_template=template, special_tokens_map=tokens), template)
        before, whole = render(Dialogue(question), ask=True), render(Dialogue([*question, turn]))
    except TemplateError:
        return ""
    added = whole[len(os.path.commonprefix([before, whole])) :]
    return added if _PROBE in added else whole
