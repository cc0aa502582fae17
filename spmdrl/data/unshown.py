"""Finds tools and variables that a chat template does not show, by rendering with and without them.

A variable counts as read where another value of it renders otherwise, so that one may say what the template does
anyway.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from spmdrl.data.rendering import PROBE, THOUGHT_KEYS, Dialogue, Renderer, TemplateError
from spmdrl.data.row_columns import TOOLS

LOOKED = 20
"""Rows of a source that are looked at."""
UNSHOWN = "not shown by the chat template"
"""End of the name under which a count of such rows is kept."""


def renderer_of(tokenizer: Any, template: str, more: dict[str, Any]) -> Renderer | None:
    """Return what renders by a template, with variables of the run; None: it shows no message of a user alone."""
    try:
        return Renderer(tokenizer, template, more)
    except TemplateError:
        return None


def unshown(render: Renderer, dialogue: Dialogue) -> list[str]:
    """Return the names of what a dialogue gives to the template and the template does not show in it."""
    out = [TOOLS] if dialogue.tools and _alike(render, dialogue, [replace(dialogue, tools=None)]) else []
    return out + [name for name in dialogue.more if _unread(render, dialogue, name)]


def unshown_line(names: Iterable[str]) -> str:
    """Return a sentence about what the template does not show; empty where there is nothing."""
    names = list(dict.fromkeys(names))
    return f"the chat template does not show {', '.join(names)}, which rows give" if names else ""


def check_read(render: Renderer, more: dict[str, Any]) -> None:
    """Refuse variables of the whole run that the template reads in none of the stand-ins that are looked at.

    more: `--data.template-kwargs`.

    Raises:
        ValueError: it does not read one of them; the message names the flag.
    """
    probes = [replace(each, more=more) for each in _probes()]
    for name in more:
        if all(_unread(render, each, name) for each in probes):
            raise ValueError(
                f"--data.template-kwargs: the chat template renders nothing otherwise because of {name!r}: leave it "
                "out, or take a template that reads it (--data.chat-template)"
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
    """Return the renderings of a dialogue and of what is before its last turn, with and without asking for a turn."""
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
    """Return dialogues in which templates read their variables: with tools, calls, thoughts and the system."""
    user, system = {"role": "user", "content": PROBE}, {"role": "system", "content": PROBE}
    assistant = {"role": "assistant", "content": PROBE} | dict.fromkeys(THOUGHT_KEYS, PROBE)
    function = {"name": PROBE, "description": PROBE, "parameters": {"type": "object", "properties": {}}}
    call = {"id": "call00000", "type": "function", "function": {"name": PROBE, "arguments": {}}}
    calling = assistant | {"content": "", "tool_calls": [call]}
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
