"""Tokens between an assistant's turns: proved in every template, equal to the text of the template; or refused."""

import random
from functools import cache

from spmdrl.data.conversation import Conversation
from spmdrl.data.rendering import Dialogue
from spmdrl.data.turns import sequences_of
from tests.unit.dialogues import dialogue, said, templates, tokenizer_for

TEMPLATES = templates()
DIALOGUES = 4
"""Dialogues for each template and kind of history."""
REFUSED = (
    "Conversation roles must alternate",
    "System role not supported",
    "Only user and assistant roles",
    "it does not show message",
    "it does not show the tool message",
    "only supports single tool-calls",
)
"""Reasons of a template that excuse it."""


def told(seed: int, tools: bool, thoughts: bool) -> list[dict]:
    """A random dialogue, in which some turns have two calls, and some answers lack their name or id."""
    draw, out = random.Random(-seed), []
    for message in dialogue(seed, tools, thoughts):
        out.append(message)
        if message["role"] == "tool" and draw.random() < 0.4:
            call = {"name": "add", "arguments": {"a": 1, "b": said(draw)}}
            out[-2]["tool_calls"].append({"id": "call54321", "type": "function", "function": call})
            out.append(message | {"tool_call_id": "call54321", "content": said(draw)})
        if message["role"] == "tool" and draw.random() < 0.3:
            out[-1] = {k: v for k, v in out[-1].items() if k not in draw.choice([["name"], ["tool_call_id"]])}
    return out


@cache
def conversation(name: str, history: str) -> Conversation:
    return Conversation(tokenizer_for(TEMPLATES[name]), TEMPLATES[name], history)


def turn_text(talk: Conversation, messages: list[dict], tools: list | None) -> str:
    """The text of the last message as the proof of turns for SFT finds it, with its end."""
    sequence = sequences_of(talk.render, Dialogue(messages, tools))[-1]
    return sequence.text[sequence.turns[-1].start : sequence.turns[-1].end]
