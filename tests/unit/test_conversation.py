"""Tokens between an assistant's turns: proved in every template, equal to what the template writes; or refused."""

import json
import random
from collections import Counter
from functools import cache
from os.path import commonprefix

import pytest

from spmdrl.data.chat import CHATML
from spmdrl.data.controls import Controls
from spmdrl.data.conversation import Conversation, Next
from spmdrl.data.rendering import Dialogue, TemplateError
from spmdrl.data.turn_tail import linked
from spmdrl.data.turns import sequences_of
from tests.unit.dialogues import TOOLS, dialogue, plain_tokenizer, said, templates, tokenizer_for

TEMPLATES = templates()
DIALOGUES = 4
"""Dialogues for each template and kind of history."""
PLAIN = (
    "Conversation roles must alternate",
    "System role not supported",
    "Only user and assistant roles",
    "it does not show",
)
"""Refusals that a template gives a reason for: it has no place for a message of a tool or of the system."""
REORDERS = ("gemma4", "diffusion_gemma")
"""Templates that put the text of a turn with a call behind the tool's answer."""


def told(seed: int, tools: bool, thoughts: bool) -> list[dict]:
    """A random dialogue, in which some turns have two calls, and some answers lack their name or id."""
    draw, out = random.Random(-seed), []
    for message in dialogue(seed, tools, thoughts):
        out.append(message)
        if message["role"] == "tool" and draw.random() < 0.4:
            call = {"name": "add", "arguments": {"a": 1, "b": said(draw)}}
            out[-2]["tool_calls"].append({"id": "call54321", "type": "function", "function": call})
            out.append(message | {"tool_call_id": "call54321", "content": draw.choice([said(draw), ""])})
        if message["role"] == "tool" and draw.random() < 0.3:
            out[-1].pop(draw.choice(["name", "tool_call_id"]))
    return out


@cache
def conversation(name: str, history: str) -> Conversation:
    return Conversation(tokenizer_for(TEMPLATES[name]), TEMPLATES[name], history)


def tokens_of(talk: Conversation, text: str) -> list[int]:
    return talk.tokenizer(text, add_special_tokens=False).input_ids


def text_of(talk: Conversation, tokens: list[int]) -> str:
    """The text; a turn that ended with gpt-oss's token for the last turn is shown with that for earlier ones."""
    text = talk.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    return text.replace("<|return|>", "<|end|>")


def turn_of(talk: Conversation, messages: list[dict], tools: list | None, draw: random.Random) -> tuple[bool, str]:
    """Text that a policy could sample as the last message, with its end: what SFT trains, or any words."""
    try:
        sequence = sequences_of(talk.render, Dialogue(linked(messages), tools))[-1]
        return True, sequence.text[sequence.turns[-1].start : sequence.turns[-1].end]
    except TemplateError:
        return False, said(draw) + talk.tokenizer.eos_token


def check(name: str, seed: int, history: str) -> Counter:
    """Holds one conversation under a template; returns counts of what became of it."""
    talk, tools, draw = conversation(name, history), TOOLS if seed % 2 else None, random.Random(seed)
    messages = told(seed, bool(tools), seed % 4 > 1)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        context = talk.begin(messages[: turns[0]], tools, hidden=not talk.render.shows_tools)
    except ValueError as error:
        assert any(reason in str(error) for reason in PLAIN), error
        return Counter(["refused by the template"])
    assert context == tokens_of(talk, text_of(talk, context))
    mask, sampled, rendered, counts = [False] * len(context), [], True, Counter(["conversations"])
    for i, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        shown, text = turn_of(talk, messages[: i + 1], tools, draw)
        made, before = tokens_of(talk, text), list(context)
        ends = list(talk.controls.pattern.finditer(text))
        ended = bool(ends) and ends[-1].end() == len(text)
        rendered = rendered and shown
        context, mask, sampled = context + made, mask + [True] * len(made), sampled + made
        if following == len(messages):
            break
        new = messages[i + 1 : following]
        answer = talk.next(messages[:i], messages[i], tools, made, ended, new)
        told_now = Dialogue(linked(messages[:following]), tools)
        if answer.fork is not None:
            whole = talk.render(told_now, True)
            assert history == "branch" and not answer.tokens
            assert answer.fork == tokens_of(talk, whole) and text_of(talk, answer.fork) == whole
            # The context is left no earlier than its text is left.
            assert len(commonprefix([answer.fork, context])) > 0
            context, mask, sampled, rendered = answer.fork, [False] * len(answer.fork), [], True
            counts["forks"] += 1
            continue
        assert answer.tokens and context == before + made
        context, mask = context + answer.tokens, mask + [False] * len(answer.tokens)
        counts["appended"] += 1
        if counts["appended"] == 1:
            ends_alike(talk, messages, i, tools, made, ended, shown, new, answer)
        try:
            whole = talk.render(told_now, True)
        except TemplateError:
            counts["appended though the template refuses the turn"] += 1
            rendered = False
            continue
        if history == "branch" and rendered:
            assert text_of(talk, context) == whole
        if not (name.startswith(REORDERS) and messages[i].get("tool_calls") and messages[i]["content"]):
            assert whole.endswith(text_of(talk, answer.tokens))
        if text_of(talk, context) == whole:
            counts["text of the template"] += 1
        else:
            assert talk.rewrites or not rendered
    assert [token for token, own in zip(context, mask, strict=True) if own] == sampled
    if history == "keep":
        counts["tokens of the proof for SFT"] += same_as_sft(talk, messages[: turns[-1] + 1], tools, context, mask)
    return counts


def ends_alike(talk, messages, i, tools, made, ended, shown, new, answer) -> None:
    """What follows depends neither on the text of the turn nor on its tokens, and an end that is missing is made up."""
    if talk.history == "keep":
        calls = {key: messages[i][key] for key in ("tool_calls",) if key in messages[i]}
        other = {"role": "assistant", "content": "other <b>words</b>\n"} | calls
        assert talk.next(messages[:i], other, tools, [901, 902, *made[-1:]], ended, new) == answer
    if not ended:
        return
    unended = talk.next(messages[:i], messages[i], tools, made[:-1], False, new)
    if unended.fork is None and shown and talk.tokenizer.decode(made[-1]) != "<|return|>":
        assert made[:-1] + unended.tokens == made + answer.tokens
    assert unended.fork or unended.tokens[-len(answer.tokens) :] == answer.tokens
    # Another end token stands for that of the template.
    other = talk.next(messages[:i], messages[i], tools, [*made[:-1], 0], True, new)
    assert other.fork or other.tokens in (answer.tokens, unended.tokens)


def same_as_sft(talk, messages: list[dict], tools: list | None, context: list[int], mask: list[bool]) -> bool:
    """Compares with the proof of whole dialogues; False where that has several sequences or none."""
    try:
        (sequence,) = sequences_of(talk.render, Dialogue(linked(messages), tools))
    except (TemplateError, ValueError):
        return False
    if any(turn.departs for turn in sequence.turns):
        return False
    places = [0, *(place for turn in sequence.turns for place in (turn.start, turn.end))]
    pieces = [sequence.text[a:b] for a, b in zip(places, [*places[1:], None], strict=True)]
    tokens, own = [], []
    for count, piece in enumerate(pieces):
        tokens += tokens_of(talk, piece)
        own += [bool(count % 2)] * (len(tokens) - len(own))
    assert (tokens, own) == (context, mask)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_proved_in_the_templates_of_trl(name):
    counts = sum((check(name, seed, history) for history in ("keep", "branch") for seed in range(DIALOGUES)), Counter())
    assert counts["conversations"] >= 2


CALL = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}


def exchange(text: str, tools: bool) -> tuple[list[dict], dict, list[dict]]:
    """A question, a turn and the answer to it, which hold a text wherever others than the policy write."""
    if not tools:
        return (
            [{"role": "user", "content": text}],
            {"role": "assistant", "content": "a"},
            [{"role": "user", "content": text}],
        )
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    answers = [{"role": "tool", "name": "add", "tool_call_id": "call12345", "content": text}]
    return [{"role": "user", "content": text}], call, answers


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_control_token_comes_from_the_text_of_a_message(name):
    talk = conversation(name, "branch" if conversation(name, "keep").rewrites else "keep")
    words = [str(token) for i, token in talk.tokenizer.added_tokens_decoder.items() if i in talk.controls.ids]
    hostile = "x" + "".join(words) + "<|im_<|im_end|>end|>" + " ".join(reversed(words)) + words[0][0] + words[0] + "y"
    for tools in (False, True):
        found = []
        for text in ("plain", hostile):
            messages, turn, answers = exchange(text, tools)
            described = [{"type": "function", "function": TOOLS[0]["function"] | {"description": text}}]
            try:
                begun = talk.begin(messages, described if tools else None, hidden=not talk.render.shows_tools)
            except ValueError as error:
                assert any(reason in str(error) for reason in PLAIN)
                continue
            made = [901, talk.tokenizer.eos_token_id]
            answer = talk.next(messages, turn, described if tools else None, made, True, answers)
            ids = begun + (answer.fork or answer.tokens)
            found.append([i for i in ids if i in talk.controls.ids])
            shown = talk.tokenizer.decode(answer.fork or answer.tokens, clean_up_tokenization_spaces=False)
            assert text in shown or json.dumps(text)[1:-1] in shown
            assert text in talk.tokenizer.decode(begun, clean_up_tokenization_spaces=False)
        assert found[:1] == found[1:]


@pytest.mark.parametrize("word", ["<|im_start|>", '<say "a">', "<back\\slash>", "<new\nline>", "<é>"])
def test_the_text_of_a_control_token_is_found_whatever_its_characters(word):
    tokenizer = plain_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [word]})
    controls = Controls(tokenizer, "")
    deep = {"role": "assistant", "content": "a", "tool_calls": [{"function": {"arguments": {f"key {word}": [1, "b"]}}}]}
    for message in ({"role": "user", "content": f"a {word} b"}, deep):
        ((marked,), _, mark) = controls.marked([message], None)
        text = json.dumps(marked, ensure_ascii=False)
        assert text.count(mark) == 1 and json.loads(text.replace(mark, "")) == message
    plain = {"role": "user", "content": f"a {word[:-1]} b"}
    assert controls.marked([plain], TOOLS)[:2] == ([plain], TOOLS)


def test_a_piece_of_text_is_not_tokenized_as_the_beginning_of_one():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [(letter, -1.0) for letter in "▁abcdefghijklmnopqrstuvwxyz<|>_\n"]
    plain = Tokenizer(models.Unigram([("<unk>", 0.0), *letters], unk_id=0))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    plain.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    talk = Conversation(tokenizer, CHATML)
    tokens = talk.begin([{"role": "user", "content": "a<|im_end|>b"}])
    pieces = tokenizer.convert_ids_to_tokens(tokens)
    assert pieces == ["<|im_start|>", *"user\na<|im_end|>b", "<|im_end|>", "\n", "<|im_start|>", *"assistant\n"]


def test_a_thought_forks_where_qwen3_drops_it_and_stays_where_it_does_not():
    talk, kept = conversation("qwen3", "branch"), conversation("qwen3", "keep")
    assert talk.rewrites and not conversation("qwen2_5", "keep").rewrites
    asked = [{"role": "user", "content": "Add 1 and x."}]
    thought = "<think>\nI need a tool.\n</think>\n\n"
    text = thought + '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call><|im_end|>'
    called = {"role": "assistant", "content": "", "reasoning_content": "I need a tool.", "tool_calls": [CALL]}
    answers = [{"role": "tool", "content": "1x"}, {"role": "tool", "content": "again"}]
    context = talk.begin(asked, TOOLS)
    made = tokens_of(talk, text)
    answer = talk.next(asked, called, TOOLS, made, True, answers)
    shown = (
        "\n<|im_start|>user\n<tool_response>\n1x\n</tool_response>\n<tool_response>\nagain\n</tool_response><|im_end|>"
    )
    assert answer == Next(tokens_of(talk, shown + "\n<|im_start|>assistant\n"))
    context += made + answer.tokens
    said_now = {"role": "assistant", "content": "It is 1x.", "reasoning_content": "Easy."}
    made, more = (
        tokens_of(talk, "<think>\nEasy.\n</think>\n\nIt is 1x.<|im_end|>"),
        [{"role": "user", "content": "Thanks."}],
    )
    history = [*asked, called, *answers]
    forked = talk.next(history, said_now, TOOLS, made, True, more)
    assert forked.fork and not forked.tokens
    whole = talk.tokenizer.decode(forked.fork)
    assert (
        "I need a tool." not in whole
        and "Easy." not in whole
        and whole.endswith("Thanks.<|im_end|>\n<|im_start|>assistant\n")
    )
    shared = len(commonprefix([forked.fork, context]))
    assert talk.tokenizer.decode(context[:shared]).endswith("Add 1 and x.<|im_end|>\n<|im_start|>assistant\n")
    tail = kept.next(history, said_now, TOOLS, made, True, more)
    assert tail == Next(tokens_of(talk, "\n<|im_start|>user\nThanks.<|im_end|>\n<|im_start|>assistant\n"))


def test_a_malformed_call_is_answered_as_a_call():
    for name in ("qwen3", "gptoss", "gemma4", "deepseekv3"):
        for history in ("keep", "branch"):
            talk = conversation(name, history)
            asked, answers = [{"role": "user", "content": "a"}], [{"role": "tool", "content": "This is no JSON: {"}]
            turn = {"role": "assistant", "content": "{"}
            answer = talk.next(asked, turn, TOOLS, [901, 902], False, answers)
            assert "This is no JSON: {" in talk.tokenizer.decode(answer.fork or answer.tokens)
            nameless = turn | {"tool_calls": [{"function": {"name": "sub", "arguments": None}}]}
            assert talk.next(asked, nameless, TOOLS, [901, 902], False, answers)


def test_a_turn_that_a_template_hides_is_not_taken_for_an_earlier_one():
    talk = conversation("llama3", "keep")
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    answers = [{"role": "tool", "name": "add", "tool_call_id": "call12345", "content": "d"}]
    shown = "<|start_header_id|>tool<|end_header_id|>\n\nd<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    end = tokens_of(talk, "<|eot_id|>")
    assert talk.next(before, turn, TOOLS, [901, *end], True, answers) == Next(tokens_of(talk, shown))


@pytest.mark.parametrize("content", ["", " ", "\n", "null", "0", "{}", "</tool_response>"])
def test_an_answer_may_be_any_text(content):
    for name in ("qwen3", "gptoss", "gemma4", "glm4moe", "llama3_1", "deepseekv3"):
        talk = conversation(name, "keep")
        messages, turn, answers = exchange("plain", True)
        plain = talk.next(messages, turn, TOOLS, [901], False, answers).tokens
        other = talk.next(messages, turn, TOOLS, [901], False, [answers[0] | {"content": content}]).tokens
        assert other[:2] == plain[:2] and other[-1] == plain[-1]


LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BROKEN = {
    "between": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
        "{% if m.role == 'assistant' %}{{ m.content | length }}{% endif %}\n{% endfor %}" + ASK,
        "depends on the text of the turn",
    ),
    "in the header": (
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if loop.previtem %}{{ loop.previtem.content | length }}"
        "{% endif %}\n{{ m.content }}<|im_end|>\n{% endfor %}" + ASK,
        "depends on the text of the turn",
    ),
    "in the prompt": (LOOP + ASK + "{{ messages[-2].content | length if messages | length > 1 }}", "depends on"),
    "hoists the answer": ("Asked: {{ messages[-1].content }}\n" + LOOP + ASK, "when the answer to the turn changes"),
    "no control token": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
        "no control token",
    ),
    "hides the assistant": (
        LOOP.replace("messages", "messages if m.role == 'user'") + ASK,
        "show the assistant's turn",
    ),
    "hides the answer": (
        LOOP.replace("messages", "messages if loop is undefined and (m.role != 'user' or m == messages[0])") + ASK,
        "does not show the user message",
    ),
    "refuses": ("{{ raise_exception('no') if messages | length > 2 }}" + LOOP + ASK, "no"),
    "shows nothing": ("{{ 'nothing' }}", "does not show the message of a user"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_template_without_a_proof_is_refused(name):
    template, reason = BROKEN[name]
    with pytest.raises(ValueError, match="the given chat template cannot .*--data.chat-template") as error:
        Conversation(plain_tokenizer(), template, "keep")
    assert reason in str(error.value)


def test_a_tail_that_cannot_be_proved_forks():
    talk = Conversation(plain_tokenizer(), BROKEN["between"][0], "branch")
    answer = talk.next(
        [{"role": "user", "content": "a"}],
        {"role": "assistant", "content": "bc"},
        None,
        [65],
        False,
        [{"role": "user", "content": "d"}],
    )
    whole = "<|im_start|>user\na<|im_end|><|im_start|>assistant\nbc<|im_end|>2<|im_start|>user\nd<|im_end|>"
    assert answer == Next([], tokens_of(talk, whole + "<|im_start|>assistant\n"))
    assert talk.rewrites


def test_another_end_token_stands_for_that_of_the_template():
    other = "<|endoftext|>"
    ended = Conversation(plain_tokenizer(), CHATML)
    follows = [{"role": "user", "content": "b"}]
    rest = tokens_of(ended, "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")
    question, turn = [{"role": "user", "content": "a"}], {"role": "assistant", "content": "x"}
    (stop,) = tokens_of(ended, other)
    assert ended.next(question, turn, None, [65, stop], True, follows) == Next(rest)
    assert ended.next(question, turn, None, [65], False, follows) == Next([*tokens_of(ended, "<|im_end|>"), *rest])
    # A template that ends no turns, and writes a token at the end of a text: the next message begins with its own.
    endless = (
        "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<repo_name>' }}{{ m.content }}{% endfor %}"
    )
    endless += "{{ '<repo_name>' if add_generation_prompt else '<|endoftext|>' }}"
    talk = Conversation(plain_tokenizer(), endless)
    rest = tokens_of(talk, "b<repo_name>")
    start = tokens_of(talk, "<|im_start|>")
    assert talk.next(question, turn, None, [65, stop], True, follows) == Next([*start, *rest])
    assert talk.next(question, turn, None, [65, *start], True, follows) == Next(rest)
    assert talk.next(question, turn, None, [65], False, follows) == Next([*start, *rest])


HIDES = (
    *("deepseek_r1_distill", "deepseekv3", "idefics3", "llama3", "qwen2_5_vl", "smolvlm"),
    *("deepseek_r1_distill_training", "deepseekv3_training", "idefics3_training", "llama3_training"),
    *("qwen2_5_vl_training", "smolvlm_training", "chatml"),
)
"""Templates that show no tools, as docs/conversations.md lists them."""


def test_tools_that_a_template_does_not_show_are_refused_unless_they_may_be_hidden():
    """Shown is a tool whose name stands in the tokens of the prompt."""
    asked, hiding = [{"role": "user", "content": "a"}], []
    hidden = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"name": name}} for name in ("qqfirst", "qqother")]
    for name in (*TEMPLATES, "chatml"):
        talk = conversation(name, "keep") if name in TEMPLATES else Conversation(tokenizer_for(CHATML), CHATML)
        try:
            prompt = talk.tokenizer.decode(talk.begin(asked, hidden, hidden=True))
        except ValueError as error:
            assert any(reason in str(error) for reason in PLAIN), (name, error)
            continue
        if "qqfirst" in prompt and "qqother" in prompt:
            assert talk.render.shows_tools and talk.tokenizer.decode(talk.begin(asked, hidden)) == prompt
            continue
        hiding.append(name)
        with pytest.raises(
            ValueError, match=r"does not show the tools: choose with --data.chat-template one that does, or set `calls`"
        ):
            talk.begin(asked, hidden)
        assert not talk.render.shows_tools
    assert sorted(hiding) == sorted(HIDES)
    first = "{{ tools[0]['function']['name'] if tools else '' }}" + LOOP + ASK
    with pytest.raises(ValueError, match="does not show the tools"):
        Conversation(plain_tokenizer(), first).begin(asked, hidden)
    assert Conversation(plain_tokenizer(), first).begin(asked, hidden[:1])


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="choose keep or branch"):
        Conversation(plain_tokenizer(), CHATML, "fork")
    talk = Conversation(plain_tokenizer(), CHATML)
    with pytest.raises(ValueError, match="must begin with messages"):
        talk.begin([])
    with pytest.raises(ValueError, match="must begin with messages"):
        talk.begin([{"role": "assistant", "content": "a"}])
    with pytest.raises(ValueError, match="the last one must not be an assistant's"):
        talk.next([{"role": "user", "content": "a"}], {"role": "assistant", "content": "b"}, None, [65], False, [])
    only_users = Conversation(plain_tokenizer(), LOOP.replace("messages", "messages if m.role != 'tool'") + ASK)
    with pytest.raises(ValueError, match=r"the given chat template cannot continue .* does not show the tool message"):
        only_users.begin([{"role": "user", "content": "a"}], TOOLS)
    with pytest.raises(ValueError, match=r"cannot begin .* does not show message 2 \(tool\)"):
        only_users.begin([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}])
