"""Tokens between turns beside those of the package `renderers`, which writes the templates of some models by hand.

python -m tests.long.test_conversation_renderers    prints the record

The package is not a requirement: `pip install --no-deps renderers==0.1.12 prime-pydantic-config` (openai, tiktoken and
openai-harmony come with vLLM).
"""

import json
import random
import sys
from collections import Counter
from importlib.util import find_spec

import pytest

from spmdrl.data.conversation import Conversation
from tests.long.apart import apart
from tests.long.test_turns_renderers import PAIRS, tokenizer_with_all
from tests.unit.dialogues import CONTROL, TOOLS, templates
from tests.unit.test_conversation import told

TEMPLATES = PAIRS | {
    "glm-4.5": ("glm4moe",),
    "gemma4": ("gemma4_v5",),
    "llama-3": ("llama3_2",),
    "deepseek-r1": ("deepseekv3",),
}
"""Renderer -> templates of trl."""
ENDS = {"llama-3": "<|eot_id|>", "deepseek-r1": "<｜end▁of▁sentence｜>"}
"""Tokens that end a turn, where it is not ChatML's."""
NO_TOOLS = ("deepseek-r1",)
"""The package goes on with a thought after the answer of a tool, which the template does not."""
DIALOGUES, LIMIT = 40, 60
"""Dialogues for each template, and seconds of computing for each renderer."""


def ends_of(name: str, turn: dict, following: dict) -> str:
    """The token with which a model ends such a turn."""
    if name == "glm-4.5":
        return "<|observation|>" if following["role"] == "tool" else "<|user|>"
    if name == "gemma4":
        return "<|tool_response>" if turn.get("tool_calls") else "<turn|>"
    return ENDS.get(name, "<|im_end|>")


def compared(name: str) -> dict:
    """Compares one renderer; returns counts of turns by what became of them, and the first that differ."""
    from renderers import config_from_name, create_renderer

    tokenizer = tokenizer_with_all()
    words = {word for one in TEMPLATES[name] for word in CONTROL.findall(templates()[one])}
    tokenizer.add_tokens(sorted(words | {"[gMASK]", "<sop>", "</think>"}), special_tokens=True)
    # The package bridges no turn that does not end the thought that the prompt opens.
    thought = tokenizer.convert_tokens_to_ids("</think>")
    config = config_from_name(name)
    if "thinking_retention" in type(config).model_fields:
        config = config.model_copy(update={"thinking_retention": "all"})
    theirs, counts, differ, draw = create_renderer(tokenizer, config), Counter(), [], random.Random(0)
    for template in TEMPLATES[name]:
        mine = Conversation(tokenizer, templates()[template])
        for seed in range(DIALOGUES):
            tools = TOOLS if seed % 2 and name not in NO_TOOLS else None
            # Space around a text is cut by some templates and kept by the package, or the other way round.
            messages = [m | {"content": m["content"].strip()} for m in told(seed, bool(tools), seed % 4 > 1)]
            turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            for i, following in zip(turns, turns[1:], strict=False):
                new = messages[i + 1 : following]
                try:
                    prompt = mine.begin(messages[: turns[0]], tools, hidden=True)
                    end = tokenizer.convert_tokens_to_ids(ends_of(name, messages[i], new[0]))
                    made = [*draw.sample(range(1000, 9000), 9), thought, *draw.sample(range(1000, 9000), 9), end]
                    answer = mine.next(messages[:i], messages[i], tools, made, True, new)
                except ValueError:
                    counts["refused"] += 1
                    continue
                given = [m | {"name": m.get("name", "add")} if m["role"] == "tool" else m for m in new]
                bridge = theirs.bridge_to_next_turn(prompt, made, given, tools=tools)
                if bridge is None:
                    counts["not bridged by the package"] += 1
                    continue
                ids = bridge.token_ids
                assert ids[: len(prompt) + len(made)] == prompt + made
                if ids[len(prompt) + len(made) :] == answer.tokens:
                    counts["same"] += 1
                else:
                    texts = tokenizer.decode(answer.tokens), tokenizer.decode(ids[len(prompt) + len(made) :])
                    counts["differ"] += 1
                    differ.append([template, seed, i, *texts])
    return {**counts, "first": differ[:2]}


@pytest.mark.skipif(find_spec("renderers") is None, reason="the package renderers is not installed")
@pytest.mark.timeout(7200)
def test_parity_tokens_between_turns_are_those_of_renderers():
    found = apart(compared, TEMPLATES, LIMIT)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    for name, counts in found.items():
        assert "error" not in counts and not counts.get("differ"), (name, counts)
        assert counts.get("same", 0) >= DIALOGUES, (name, counts)


if __name__ == "__main__":
    print(json.dumps(apart(compared, sys.argv[1:] or TEMPLATES, LIMIT), indent=1, ensure_ascii=False))
