"""Turns of an assistant in rendered dialogues: found in every template, proved, tokenized exactly; or refused."""

import re
from collections import Counter
from contextlib import nullcontext
from os.path import commonprefix

import pytest

from spmdrl.data.conversation import Conversation
from spmdrl.data.rendering import Dialogue, Renderer, TemplateError
from spmdrl.data.shown import check_turn_shown
from spmdrl.data.template_ends import end_of_turn_tokens
from spmdrl.data.tokens import masked
from spmdrl.data.turns import sequences_of, trained_sequences
from tests.unit.dialogues import TOOLS, dialogue, plain_tokenizer, templates, tokenizer_for

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
LOST = ("drops the thought", "does not show its tool calls", "does not show its thought", "does not show its content")
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
    if name.removesuffix("_training") in REORDERS and "differently once the turn is there" in refusal:
        return True
    return any(part in refusal for part in PLAIN + LOST)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (i % 6 > 0)) for i, n in enumerate(TEMPLATES)]
)
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


def talk(first: dict, second: dict) -> list[dict]:
    """Two questions, each with an answer."""
    return [{"role": "user", "content": "q"}, first, {"role": "user", "content": "r"}, second]


def said(text: str, **more) -> dict:
    """A turn of the assistant."""
    return {"role": "assistant", "content": text} | more


CALL = [{"id": "call12345", "type": "function", "function": {"name": "add", "arguments": {"a": 31, "b": "wörd\nx"}}}]
TURNS = {
    "thoughts in the content": (
        talk(said("<think>\nponder one\n</think>\n\nanswer one"), said("<think>ponder two</think>answer two")),
        ("ponder one", "answer one", "ponder two", "answer two"),
    ),
    "thoughts beside it": (
        talk(said("answer one", reasoning_content="ponder one"), said("answer two", reasoning_content="ponder two")),
        ("ponder one", "answer one", "ponder two", "answer two"),
    ),
    "a thought that the answer repeats": (
        talk(said("answer one"), said("it is forty", reasoning_content="forty")),
        ("answer one", "it is forty"),
    ),
    "calls": (
        [
            {"role": "user", "content": "q"},
            said("", tool_calls=CALL),
            {"role": "tool", "name": "add", "tool_call_id": "call12345", "content": "seven"},
            said("answer two"),
        ],
        ("add", "31", "answer two"),
    ),
}
"""Dialogues, and words of which each must be trained."""


def trained_text(name: str, messages: list[dict], trained: set[int] | None = None) -> str:
    """The trained text of a dialogue, by the marks of the template where it has them, or why it is refused."""
    render = Renderer(tokenizer_for(TEMPLATES[name]), TEMPLATES[name])
    turns = trained or {i for i, message in enumerate(messages) if message["role"] == "assistant"}
    found = trained_sequences(render, Dialogue(messages, TOOLS if "calls" in str(messages) else None), turns)
    return "\n".join(s.text[turn.start : turn.end] for s in found for turn in s.turns if turn.message in turns)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_is_trained_whole_or_refused_in_the_templates_of_trl(name):
    for kind, (messages, words) in TURNS.items():
        try:
            text = trained_text(name, messages)
        except TemplateError as error:
            assert excused(name, str(error)) or "must alternate" in str(error), (kind, error)
            continue
        assert [word for word in words if word not in text] == [], kind
        if kind == "a thought that the answer repeats":
            assert text.count("forty") == 2


USER_SAYS, SYSTEM_SAYS = {"role": "user", "content": "uword"}, {"role": "system", "content": "sword"}
ORDERS = {
    "answers": [USER_SAYS, said("aword"), USER_SAYS, said("bword")],
    "an opening": [said("aword"), USER_SAYS, said("bword")],
    "an opening after the system": [SYSTEM_SAYS, said("aword"), USER_SAYS, said("bword")],
    "an opening with a thought": [said("aword", reasoning_content="tword"), USER_SAYS, said("bword")],
    "two turns of one assistant": [USER_SAYS, said("aword"), said("bword")],
    "an opening of two turns": [said("aword"), said("bword")],
}
"""Dialogues in orders in which templates write what they leave out elsewhere."""
OWN = re.compile(r"think|thought|final|analysis|to=user|to=self")
"""Words that a model generates around what it says."""


@pytest.mark.parametrize("order", ORDERS)
def test_a_trained_turn_holds_nothing_that_another_message_or_the_template_wrote(order):
    proved, messages = 0, ORDERS[order]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for name, template in TEMPLATES.items():
        render = Renderer(tokenizer_for(template), template)
        # Training templates mark what they take for generated, and are taken at their word.
        if render.marked:
            continue
        try:
            found = sequences_of(render, Dialogue(messages))
        except TemplateError:
            continue
        proved += 1
        assert sorted(turn.message for s in found for turn in s.turns) == turns
        for sequence in found:
            for turn in sequence.turns:
                text, message = sequence.text[turn.start : turn.end], messages[turn.message]
                inner = OWN.sub(" ", render.controls.sub(" ", text))
                # Templates of channels generate the header of an answer after a thought.
                words = set(re.findall(r"\w{3,}", inner)) - ({"assistant"} if "tword" in text else set())
                assert words == {message["content"], message.get("reasoning_content", message["content"])}, name
                assert not text.endswith("<|assistant|>"), name
    assert proved >= {"answers": 38, "an opening with a thought": 5}.get(order, 20)


def test_a_turn_that_opens_a_dialogue_begins_after_the_default_message_of_the_system():
    tokenizer = plain_tokenizer()
    (sequence,) = sequences_of(Renderer(tokenizer), Dialogue(ORDERS["an opening"]))
    first, second = sequence.turns
    assert sequence.text[: first.start].startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert sequence.text[first.start : first.end] == "aword<|im_end|>" and not first.departs
    assert sequence.text[second.start : second.end] == "bword<|im_end|>"


def test_an_opening_whose_beginning_is_not_that_of_an_answer_is_refused_by_name():
    template = (
        "{% for m in messages %}{% if loop.first and m.role == 'assistant' %}<|im_start|>greeting: {{ m.content }}!"
        "{% else %}<|im_start|>{{ m.role }}: {{ m.content }}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    render = Renderer(tokenizer_for(template), template)
    with pytest.raises(TemplateError, match=r"message 1 \(assistant\): .* the turn begins; the dialogue begins with"):
        sequences_of(render, Dialogue(ORDERS["an opening"]))


DROPPED = {
    **dict.fromkeys(["deepseek_r1_distill", "deepseekv3", "deepseekv3_training"], "thoughts in the content"),
    **dict.fromkeys(["lfm2", "lfm2_training", "deepseekv3", "qwen2_5_training"], "thoughts beside it"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_a_thought_that_the_template_drops_is_refused_unless_its_turn_is_not_trained(name):
    with pytest.raises(TemplateError, match=r"message [24] \(assistant\): .*(drops|does not show its) .*thought"):
        trained_text(name, TURNS[DROPPED[name]][0])
    shown = set[int]()
    for turn in (1, 3):
        with pytest.raises(TemplateError) as refused:
            trained_text(name, TURNS[DROPPED[name]][0], {turn})
        shown |= {turn} if "--sft.train-on last" in str(refused.value) else set()
        assert '("loss": 0 in the message' in str(refused.value)
    assert shown == {1}, "of the last turn that setting changes nothing"
    first, last = TURNS[DROPPED[name]][0][1], said("answer two")
    assert "answer two" in trained_text(name, talk(first, last), {3})


@pytest.mark.parametrize("name", ["glm4moe_training", "nemotron_3_nano_training"])
def test_marks_that_leave_out_an_earlier_thought_give_its_turn_a_sequence_of_its_own(name):
    text = trained_text(name, TURNS["thoughts beside it"][0])
    assert text.count("ponder one") == text.count("answer one") == text.count("ponder two") == 1


@pytest.mark.parametrize("name", ["glm4moe", "glm4moe_training"])
def test_a_turn_of_glm_ends_with_the_token_by_which_the_next_message_begins(name):
    assert trained_text(name, TURNS["calls"][0]).count("</tool_call><|observation|>\n") == 1
    assert trained_text(name, TURNS["thoughts in the content"][0]).count("<|user|>") == 2
    tokenizer, (asked, called, answer, _) = tokenizer_for(TEMPLATES[name]), TURNS["calls"][0]
    made = tokenizer("</tool_call><|observation|>", add_special_tokens=False).input_ids
    after = Conversation(tokenizer).next([asked], called, TOOLS, made, True, [answer]).tokens
    assert tokenizer.decode(after).startswith("\n<tool_response>\nseven")


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


ENDS = {
    "gemma3": ["<end_of_turn>"],
    "gemma4_v5": ["<turn|>", "<|tool_response>"],
    "diffusion_gemma_training": ["<turn|>"],
    "glm4moe_training": ["<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "gptoss_training": ["<|return|>", "<|call|>"],
    "llama3_1": ["<|eot_id|>"],
    "deepseekv3": ["<｜end▁of▁sentence｜>"],
    "qwen3": ["<|im_end|>"],
    "nemotron_3_nano": ["<|im_end|>"],
}
"""Tokens that end turns, as model cards name them. None stands within a turn, as gpt-oss's `<|end|>` does."""


@pytest.mark.parametrize("name", ENDS)
def test_the_tokens_that_end_turns_are_those_that_are_trained_last(name):
    template = TEMPLATES[name]
    tokenizer = tokenizer_for(template)
    assert tokenizer.convert_ids_to_tokens(end_of_turn_tokens(tokenizer, template)) == ENDS[name]


def test_a_template_that_ends_no_turns_names_no_token():
    tokenizer = tokenizer_for(TEMPLATES["qwen3"])
    assert end_of_turn_tokens(tokenizer, "") == ()
    assert end_of_turn_tokens(tokenizer, "{{ raise_exception('no') }}") == ()
    assert end_of_turn_tokens(tokenizer, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}") == ()


@pytest.mark.parametrize(("turn", "shown"), [(">calculate|12*34|", True), (">calculate|12*35|", False)])
def test_the_name_of_a_tool_may_be_a_token_of_its_own(turn, shown):
    """recipes/retool gives `calculate` a token; tokens beside the vocabulary are cut out before a turn is searched."""
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "calculate", "arguments": {"|": "12*34"}}}]}
    with nullcontext() if shown else pytest.raises(TemplateError, match="does not show its tool calls completely"):
        check_turn_shown(re.compile(r"calculate|\|"), message, turn)


@pytest.mark.parametrize("text", ["it's", "it's\nC:\\new", 'it\'s "so"'])
def test_a_call_whose_text_has_an_apostrophe_is_shown_with_a_backslash_before_it(text):
    """Templates of LFM2 set texts between apostrophes, and have a backslash before those inside."""
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": text}}}],
    }
    render = Renderer(tokenizer_for(TEMPLATES["lfm2_v2"]), TEMPLATES["lfm2_v2"])
    shown = render(Dialogue([{"role": "user", "content": "q"}, message]))
    assert "it\\'s" in shown
    check_turn_shown(render.controls, message, shown)
    with pytest.raises(TemplateError, match="does not show its tool calls completely"):
        check_turn_shown(render.controls, message, shown.replace("it", "at"))
