"""Checks that a chat template shows all parts of a dialogue's turns, its tools and its variables.

A variable counts as read if changing its value changes the rendering, so a row may also set it to its default value.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from spmdrl.data.rendering import PROBE, THOUGHT_KEYS, Dialogue, Renderer, TemplateError, tool_call
from spmdrl.data.row_columns import TOOLS

END_OF_THOUGHT = "</think>"
LOOKED = 20
"""Maximum number of rows per source whose tools and variables are checked against the template."""
UNSHOWN = "not shown by the chat template"
"""Suffix of tool and variable names; it marks counts of rows in which the template does not show them."""


def check_turn_shown(controls: re.Pattern[str], message: dict, turn: str, before: str = "", last: bool = True) -> None:
    """Raise TemplateError if a turn's text omits a part of its message.

    controls: pattern that matches control tokens. turn: the rendered text to train on. before: the text before the
    turn, which may contain the tag `</think>`. last: True for the last turn of a dialogue, which changes the advice in
    the error.

    The whitespace around a part may be missing, because templates strip it. Each piece of the turn's text counts for
    only one part, so a thought does not count as shown if only the answer repeats it.
    """
    marks = re.compile(f"{controls.pattern}|</?think>")
    rest = marks.sub("\0", turn)
    parts = sorted(_parts(marks, message), key=lambda part: -len(part[1][0]))
    for what, forms in parts:
        found = next((form for form in forms if form in rest), None)
        if found is None:
            raise TemplateError(_refusal(what, last))
        rest = rest.replace(found, "\0", 1)
    content = message.get("content")
    if isinstance(content, str) and END_OF_THOUGHT in content and END_OF_THOUGHT not in before + turn:
        raise TemplateError(_refusal("thought", last))


def without_thought(message: dict) -> dict | None:
    """Return a message without its thought, or None if it has no thought."""
    content = message.get("content")
    inline = isinstance(content, str) and END_OF_THOUGHT in content
    if not inline and not any(message.get(key) for key in THOUGHT_KEYS):
        return None
    brief = {key: value for key, value in message.items() if key not in THOUGHT_KEYS}
    return brief | ({"content": str(content).rpartition(END_OF_THOUGHT)[2]} if inline else {})


def _refusal(what: str, last: bool) -> str:
    helps = (
        'use another template with --data.chat-template, or leave this turn untrained ("loss": 0 in the message'
        f"{'' if last else ', or --sft.train-on last'})"
    )
    if what == "tool calls":
        return (
            "the chat template does not show its tool calls completely: use another template with --data.chat-template"
        )
    if what == "thought":
        return (
            "the chat template drops the thought before </think> in its content: put the thought into "
            f"`reasoning_content`, {helps}"
        )
    if what == "reasoning_content":
        return f"the chat template does not show its thought (reasoning_content): {helps}"
    return f"the chat template does not show its content completely: {helps}"


def _parts(marks: re.Pattern[str], message: dict) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each message part that must be shown, and the texts that count as showing it."""
    content = message.get("content")
    for text in _content_texts(content):
        thought, mark, answer = text.rpartition(END_OF_THOUGHT)
        for what, words in (("thought", thought if mark else ""), ("content", answer)):
            yield from ((what, [piece]) for piece in _pieces(marks, words))
    thought = next((message[key] for key in THOUGHT_KEYS if message.get(key)), None)
    for text in _content_texts(thought):
        yield from (("reasoning_content", [piece]) for piece in _pieces(marks, text))
    for call in message.get("tool_calls") or []:
        function = call.get("function") or call
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = {}
        for value in (str(function.get("name")), *_leaves(arguments)):
            # Control tokens in the turn's text were replaced, so replace those in names and arguments as well.
            forms = [marks.sub("\0", form) for form in _forms(value)]
            if all(form.strip("\0") for form in forms) and forms:
                yield "tool calls", forms


def _content_texts(content: Any) -> list[str]:
    if isinstance(content, list):
        return [str(part.get("text") or "") for part in content if isinstance(part, dict)]
    return [content] if isinstance(content, str) else []


def _pieces(marks: re.Pattern[str], text: str) -> list[str]:
    return [piece.strip() for piece in marks.split(text) if piece.strip()]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield all keys and values of a call's arguments, except keys whose value is None, which templates may omit."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if inner is not None:
                yield key
                yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif value is not None:
        yield value


def _forms(value: Any) -> list[str]:
    """Return the formats in which templates write a call's keys and values: plain, JSON and Python literals."""
    plain = str(value).strip()
    written = [json.dumps(value, ensure_ascii=ascii) for ascii in (False, True)]
    quoted = [text.strip('"').strip() if isinstance(value, str) else text for text in written]
    # Unlike repr, templates that write calls as Python (LFM2) put every string in single quotes.
    apart = [text.replace("'", "\\'") for text in (plain, plain.replace("\\", "\\\\"))]
    apart.append(apart[-1].replace("\n", "\\n").replace("\r", "\\r"))
    forms = dict.fromkeys([plain, *quoted, repr(value).strip("'\"").strip(), *apart])
    return sorted((form for form in forms if form), key=lambda form: -len(form))


def unshown(render: Renderer, dialogue: Dialogue) -> list[str]:
    """List the variables of a dialogue that the template does not read, and `tools` if it does not show the tools."""
    out = [TOOLS] if dialogue.tools and _alike(render, dialogue, [replace(dialogue, tools=None)]) else []
    return out + [name for name in dialogue.more if _unread(render, dialogue, name)]


def unshown_line(names: Iterable[str]) -> str:
    """Return a sentence about tools and variables that the template does not show, if any."""
    names = list(dict.fromkeys(names))
    return f"the chat template does not show {', '.join(names)}, which rows give" if names else ""


def check_read(render: Renderer, more: dict[str, Any]) -> None:
    """Raise ValueError if a variable in `--data.template-kwargs` does not affect the rendering of any test dialogue."""
    probes = [replace(each, more=more) for each in _probes()]
    for name in more:
        if all(_unread(render, each, name) for each in probes):
            raise ValueError(
                f"--data.template-kwargs: the chat template renders the same text without {name!r}: leave it out, or "
                "use a template that reads it (--data.chat-template)"
            )


def _unread(render: Renderer, dialogue: Dialogue, name: str) -> bool:
    value, rest = dialogue.more[name], {key: each for key, each in dialogue.more.items() if key != name}
    others = [not value, PROBE] if isinstance(value, bool) else [PROBE]
    return _alike(
        render, dialogue, [replace(dialogue, more=more) for more in (rest, *(rest | {name: o} for o in others))]
    )


def _alike(render: Renderer, dialogue: Dialogue, others: list[Dialogue]) -> bool:
    here = _texts(render, dialogue)
    return all(_texts(render, other) == here for other in others)


def _texts(render: Renderer, dialogue: Dialogue) -> list[str]:
    """Render a dialogue, and the part before its last turn, each with and without a generation prompt."""
    count = len(dialogue.messages)
    last = next((i for i in range(count - 1, 0, -1) if dialogue.messages[i]["role"] == "assistant"), count)
    out = []
    for part in (dialogue, dialogue.upto(last)):
        for ask in (False, True):
            try:
                out.append(render(part, ask))
            except TemplateError:
                out.append("")
    return out


def _probes() -> list[Dialogue]:
    """Return test dialogues with tools, calls, thoughts and a system message: variables might affect only these."""
    user, system = {"role": "user", "content": PROBE}, {"role": "system", "content": PROBE}
    assistant = {"role": "assistant", "content": PROBE} | dict.fromkeys(THOUGHT_KEYS, PROBE)
    function = {"name": PROBE, "description": PROBE, "parameters": {"type": "object", "properties": {}}}
    calling = assistant | {"content": "", "tool_calls": [tool_call(PROBE, {})]}
    answer = {"role": "tool", "name": PROBE, "tool_call_id": "call00000", "content": PROBE}
    tools = [{"type": "function", "function": function}]
    return [
        Dialogue([*begun, *messages], given)
        for begun in ([], [system])
        for messages, given in (
            ([user], None),
            ([user, assistant, user, assistant], None),
            ([user], tools),
            ([user, calling, answer, assistant, user, assistant], tools),
        )
    ]
