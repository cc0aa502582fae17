"""Turns of an assistant in rendered dialogues: found in every template, proved, tokenized exactly; or refused."""

from collections import Counter
from os.path import commonprefix

import pytest

from spmdrl.data.rendering import Dialogue, Renderer, TemplateError
from spmdrl.data.tokens import masked
from spmdrl.data.turns import sequences_of
from tests.unit.dialogues import TOOLS, dialogue, templates, tokenizer_for

TEMPLATES = templates()
DIALOGUES = 8
"""Dialogues for each template."""
PLAIN = (
    "Conversation roles must alternate",
    "System role not supported",
    "Only user and assistant roles",
    "Cannot pass both content and thinking",
)
"""Refusals that a template makes itself."""
LOST = ("does not show its tool calls", "does not show its thought", "does not show its content")
"""Parts of a message that a template leaves out."""
REORDERS = {"diffusion_gemma", "gemma4_v5"}
"""Templates that put the text of a turn with a call behind the tool's answer."""


def check(name: str, seed: int) -> str:
    """Checks one dialogue under a template; returns why it was refused, or how it was accepted."""
    template, tools, thoughts = TEMPLATES[name], bool(seed % 2), seed % 4 > 1
    tokenizer, messages = tokenizer_for(template), dialogue(seed, tools, thoughts)
    render = Renderer(tokenizer, template)
    told = Dialogue(messages, TOOLS if tools else None)
    try:
        sequences = sequences_of(render, told)
    except TemplateError as error:
        return str(error)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert sorted(turn.message for s in sequences for turn in s.turns) == turns
    for sequence in sequences:
        places = [(turn.start, turn.end) for turn in sequence.turns]
        for turn in sequence.turns:
            before, text = sequence.text[: turn.start], sequence.text[turn.start : turn.end]
            asked = render(Dialogue(messages[: turn.message], told.tools), ask=True)
            if turn.departs:
                # Up to where the template leaves its own generation prompt.
                plain = render(Dialogue(messages[: turn.message], told.tools))
                assert asked.startswith(before) and len(before) >= len(commonprefix([asked, plain]))
            else:
                assert before == asked
            message = messages[turn.message]
            assert message["content"].strip() in text
            assert message.get("reasoning_content", "").strip() in sequence.text
            if turn.stops:
                assert render.controls.search(text) and list(render.controls.finditer(text))[-1].end() == len(text)
        tokens = masked(tokenizer, sequence.text, places)
        trained = tokenizer.decode(tokens.tokens[tokens.mask], clean_up_tokenization_spaces=False)
        assert trained == "".join(sequence.text[start:end] for start, end in places)
        assert tokenizer.decode(tokens.tokens, clean_up_tokenization_spaces=False) == sequence.text
    kinds = [len(sequences) > 1, any(t.departs for s in sequences for t in s.turns)]
    kinds += [not all(t.stops for s in sequences for t in s.turns)]
    return " ".join(["accepted", *(w for w, yes in zip(("split", "departs", "unstopped"), kinds, strict=True) if yes)])


def excused(name: str, refusal: str) -> bool:
    """Tells whether a template may refuse a dialogue so."""
    if name.removesuffix("_training") in REORDERS and "otherwise once the turn is there" in refusal:
        return True
    return any(part in refusal for part in PLAIN + LOST)


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_are_proved_in_the_templates_of_trl(name):
    found = Counter(check(name, seed) for seed in range(DIALOGUES))
    refused = [said for said in found if not said.startswith("accepted") and not excused(name, said)]
    assert not refused
    assert sum(n for said, n in found.items() if said.startswith("accepted"))
    # Two exchanges of text: every template of the wheel takes them.
    template = TEMPLATES[name]
    messages = [{"role": role, "content": f"{role} says {i}."} for i, role in enumerate(["user", "assistant"] * 2)]
    sequences = sequences_of(Renderer(tokenizer_for(template), template), Dialogue(messages))
    assert sum(len(s.turns) for s in sequences) == 2


HEADERS = {
    "deepseek_r1_distill": "<｜Assistant｜>",
    "deepseekv3": "<｜Assistant｜>",
    "gptoss": "<|start|>assistant",
    "muse_glimmer": "<|start|>assistant",
    "qwen2_5": "\n",
}
"""Text that a training template of trl marks as generated, though its generation prompt ends with it."""


@pytest.mark.parametrize("name", [name for name, text in TEMPLATES.items() if "endgeneration" in text])
def test_parity_turns_are_the_parts_that_trl_marks(name):
    template = TEMPLATES[name]
    tokenizer, agreed = tokenizer_for(template), 0
    render, header = Renderer(tokenizer, template), HEADERS.get(name.removesuffix("_training"), "")
    for seed in range(DIALOGUES):
        told = Dialogue(dialogue(seed, False, False))
        try:
            (sequence,) = sequences_of(render, told)
            text, marks = render.marks(told)
        except (TemplateError, ValueError):
            continue
        if not text.startswith(sequence.text):
            continue
        joined: list[list[int]] = []
        for start, end in marks:
            if joined and joined[-1][1] == start:
                joined[-1][1] = end
            else:
                joined.append([start, end])
        mine = [text[turn.start : turn.end] for turn in sequence.turns]
        theirs = [text[start:end].rstrip() for start, end in joined if text[start:end].strip()]
        for i, (ours, other) in enumerate(zip(mine, theirs, strict=True)):
            end = tokenizer.eos_token if name.startswith("phi3") and i == len(mine) - 1 else ""
            assert other.removesuffix(end).rstrip().endswith(ours)
            extra = other.removesuffix(end).rstrip().removesuffix(ours)
            assert extra in (header, "<think>", "<think>\n", "<think>\n\n</think>\n\n"), extra
        agreed += 1
    assert agreed >= 3
