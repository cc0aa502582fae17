"""Conversations as lines for the terminal."""

import json
from typing import Any

from spmdrl.env.answers import CONTROLS
from spmdrl.env.base import Call, Reply

ANEW = "the conversation goes on from these messages alone:"


def plain(text: str) -> str:
    """Return text that is safe to print."""
    return CONTROLS.sub("\ufffd", text.encode("utf-8", "replace").decode())


def message_line(message: dict[str, Any]) -> str:
    """Return a message with its role, a tool's with its name."""
    name = f" {message['name']}" if message.get("name") else ""
    return plain(f"{message['role']}{name}: {message.get('content') or ''}")


def call_line(call: Call) -> str:
    """Return a call as `name(key=value)`."""
    if call.arguments is None:
        return plain(f"{call.name or 'a call'}: {call.error}")
    given = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in call.arguments.items())
    return plain(f"{call.name}({given})")


def tool_line(tool: dict[str, Any]) -> str:
    """Return a tool as `name(key: type)`, with the first line of its description."""
    about = tool["function"]
    parameters = about.get("parameters", {})
    kinds = {key: each.get("type", "any") for key, each in parameters.get("properties", {}).items()}
    shown = [f"{key}: {kind if isinstance(kind, str) else ' or '.join(kind)}" for key, kind in kinds.items()]
    first = (about.get("description") or "").strip().partition("\n")[0]
    return plain(f"{about['name']}({', '.join(shown)})  {first}")


def reward_line(reply: Reply, what: str = "reward") -> str:
    """Return a reward with its parts; empty if there is none."""
    if reply.reward is None:
        return ""
    parts = ", ".join(f"{name} {value:g}" for name, value in reply.parts.items())
    return plain(f"{what} {reply.reward:g}{f' ({parts})' if parts else ''}")


def end_lines(final: Reply, before: float, how: str) -> list[str]:
    """Return the lines at the end of an episode: its final reward and the sum of all.

    before: rewards of its turns. how: the words after "the episode has ended", such as " early".
    """
    shown, total = reward_line(final, "final reward"), before + (final.reward or 0.0)
    return [*([shown] if shown else []), f"the episode has ended{how}, with {total:g} in all"]
