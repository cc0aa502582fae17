"""Plays an environment by hand, in the terminal."""

import ast
import json
from collections.abc import Callable
from typing import Any

from spmdrl.env.base import Call, Reply
from spmdrl.env.conversation_text import ANEW, end_lines, message_line, reward_line, tool_line
from spmdrl.env.play import Play

HELP = """\
You are the assistant. Write a text, or a call of a tool: name(key=value), or as JSON
{"name": ..., "arguments": {...}}, a list of these for several calls at once.
A line that ends with \\ goes on in the next one. /quit ends."""


def by_hand(
    play: Play,
    row: dict[str, Any],
    seed: int,
    read: Callable[[str], str] = input,
    write: Callable[[str], None] = print,
) -> float:
    """Play an episode, and return the sum of its rewards.

    read: asks for a line, given what to show before it; it raises EOFError at the end. write: shows a line.

    Raises:
        PlayError: the environment failed.
    """
    opened = play.open(row, seed)
    write(HELP)
    for tool in opened.tools:
        write(f"tool: {tool_line(tool)}")
    _show(opened, write)
    names = {tool["function"]["name"] for tool in opened.tools}
    total, done = 0.0, False
    while not done:
        try:
            line = _line(read)
        except EOFError:
            break
        if line.strip() == "/quit":
            break
        try:
            content, calls = understood(line, names)
        except ValueError as error:
            write(f"not understood: {error}")
            continue
        reply = play.say(content, *calls)
        _show(reply, write)
        total += reply.reward or 0.0
        done = reply.done
    final = play.score()
    for line in end_lines(final, total, "" if done else " early"):
        write(line)
    return total + (final.reward or 0.0)


def understood(line: str, names: set[str]) -> tuple[str, list[Call]]:
    """Return (text, calls) of a line. names: of the tools.

    Raises:
        ValueError: it begins as a call does, and is none.
    """
    text = line.strip()
    if text.startswith(("{", "[{")):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ValueError(f"no JSON ({error})") from None
        calls = found if isinstance(found, list) else [found]
        if all(isinstance(c, dict) and isinstance(c.get("name"), str) and _is_dict(c.get("arguments")) for c in calls):
            return "", [Call(c["name"], c["arguments"], f"call{i:05}") for i, c in enumerate(calls)]
        raise ValueError('a call is {"name": "...", "arguments": {...}}')
    name, opened, _ = text.partition("(")
    if not opened or name not in names:
        return line, []
    try:
        node = ast.parse(text, mode="eval").body
        if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
            raise ValueError("arguments are given by name")
        given = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
        return "", [Call(name, json.loads(json.dumps(given)), "call00000")]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"a call is {name}(key=value) with plain values ({error})") from None


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _line(read: Callable[[str], str]) -> str:
    line = read("> ")
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{read('. ')}"
    return line


def _show(reply: Reply, write: Callable[[str], None]) -> None:
    if reply.anew:
        write(ANEW)
    for message in reply.messages:
        write(message_line(message))
    if shown := reward_line(reply):
        write(shown)
