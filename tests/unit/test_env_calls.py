"""Readers of tool calls against vLLM's parsers, transformers' response templates, and texts of any kind."""

import json
import random
from functools import cache
from importlib.util import find_spec

import pytest

from spmdrl.env.calls import FORMATS, as_message, format_of, parse, parse_turn
from tests.unit.dialogues import templates

CONTROL = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_start|>", "<|im_end|>", "<|python_tag|>"),
    *("[TOOL_CALLS]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "<｜tool▁sep｜>",
]
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "x",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "flag": {"type": "boolean"},
                    "items": {"type": "array"},
                    "more": {"type": "object"},
                    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                },
            },
        },
    }
    for name in ("look_up", "f", "web.search-2")
]
TEXTS = [
    *("", "a", "Zürich 漢字 😀", 'he said "no"', "two\nlines", "{x}", "[1]", "\\n \\ \t", "1", "true", "a < b > c"),
    *("```", "null"),
]


def arguments(draw: random.Random) -> dict:
    def value(depth: int):
        kind = draw.randrange(6 if depth else 4)
        if kind == 4:
            return [value(depth - 1) for _ in range(draw.randrange(3))]
        if kind == 5:
            return {draw.choice("abc"): value(depth - 1) for _ in range(draw.randrange(3))}
        return [draw.choice(TEXTS), draw.randrange(-99, 99), draw.random(), draw.random() < 0.5][kind]

    make = {
        "text": lambda: draw.choice(TEXTS),
        "count": lambda: draw.randrange(-(10**12), 10**12),
        "ratio": lambda: round(draw.uniform(-9, 9), 3),
        "flag": lambda: draw.random() < 0.5,
        "items": lambda: [value(2) for _ in range(draw.randrange(4))],
        "more": lambda: {"k": value(2)},
        "maybe": lambda: draw.choice([None, 7]),
    }
    return {key: make[key]() for key in draw.sample(sorted(make), draw.randrange(len(make)))}


def as_text(value) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def written(format: str, calls: list[tuple[str, dict]]) -> str:
    """The calls as the model cards of these models write them."""
    named = [{"name": name, "arguments": given} for name, given in calls]
    dumped = [json.dumps(given, ensure_ascii=False) for _, given in calls]
    if format == "hermes":
        return "\n".join(f"<tool_call>\n{json.dumps(each, ensure_ascii=False)}\n</tool_call>" for each in named)
    if format == "llama3":
        return "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in calls)
    if format == "mistral":
        return "[TOOL_CALLS]" + json.dumps(named, ensure_ascii=False)
    if format == "mistral_args":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{given}" for (name, _), given in zip(calls, dumped, strict=True))
    if format == "deepseek":
        each = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
        inner = "\n".join(each.format(name, given) for (name, _), given in zip(calls, dumped, strict=True))
        return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
    if format == "deepseek_31":
        each = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        inner = "".join(each.format(name, given) for (name, _), given in zip(calls, dumped, strict=True))
        return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
    if format == "qwen3_coder":
        inner = [
            "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in given.items())
            for _, given in calls
        ]
        return "\n".join(
            f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"
            for (name, _), body in zip(calls, inner, strict=True)
        )
    assert format == "glm"
    inner = [
        "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n" for key, value in given.items())
        for _, given in calls
    ]
    return "\n".join(f"<tool_call>{name}\n{body}</tool_call>" for (name, _), body in zip(calls, inner, strict=True))


VLLM = {
    "hermes": "hermes",
    "llama3": "llama3_json",
    "mistral": "mistral",
    "mistral_args": "mistral",
    "deepseek": "deepseek_v3",
    "deepseek_31": "deepseek_v31",
    "qwen3_coder": "qwen3_coder",
    "glm": "glm45",
}


class Vocabulary:
    """The part of a tokenizer that vLLM's parsers of text read."""

    def __init__(self, words: list[str]):
        self.words = {word: i for i, word in enumerate(words)}
        self.all_special_ids, self.all_special_tokens, self.chat_template = [], [], ""

    def get_vocab(self) -> dict[str, int]:
        return self.words


@cache
def theirs(format: str):
    if not find_spec("vllm"):
        pytest.skip("vLLM is not installed")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], model="m", tools=SCHEMAS)
    vocabulary = Vocabulary(CONTROL + ["[ARGS]"] * (format == "mistral_args"))
    kind = ToolParserManager.get_tool_parser(VLLM[format])

    def read(text: str) -> tuple[str, list[tuple[str, object]]]:
        found = kind(vocabulary, request.tools).extract_tool_calls(text, request)
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return (found.content or "").strip(), [(name, json.loads(given or "{}")) for name, given in calls]

    return read


def ours(text: str, format: str) -> tuple[str, list[tuple[str, object]], list[str]]:
    content, calls, _ = parse(text, format.partition("_args")[0].partition("_31")[0], SCHEMAS)
    return content, [(call.name, call.arguments) for call in calls], [call.error for call in calls if call.error]


def turn(draw: random.Random, format: str, most: int = 3) -> tuple[str, str, list]:
    calls = [(draw.choice(["look_up", "f", "web.search-2"]), arguments(draw)) for _ in range(draw.randint(1, most))]
    lead = draw.choice(["", "Let me see.", "Ich prüfe das: 漢字\n"])
    return lead, lead + written(format, calls), calls


@pytest.mark.slow
@pytest.mark.parametrize("format", VLLM)
def test_calls_are_those_that_were_written_and_those_that_vllm_reads(format):
    draw = random.Random(7)
    for _ in range(150):
        lead, text, calls = turn(draw, format)
        content, read, errors = ours(text, format)
        assert (content, read, errors) == (lead.strip(), calls, []), text
        content, read = theirs(format)(text)
        assert read == calls, text
        # vLLM drops the text before bare JSON.
        assert content == ("" if format == "llama3" else lead.strip())


@pytest.mark.slow
@pytest.mark.parametrize("format", VLLM)
def test_where_vllm_reads_calls_in_a_damaged_text_they_are_ours(format):
    """Ours may say that a call is malformed where vLLM completes or drops it, and never reads another call."""
    draw = random.Random(11)
    both = 0
    for _ in range(300):
        _, text, calls = turn(draw, format, 2)
        for _ in range(draw.randint(1, 2)):
            a = draw.randrange(len(text))
            b = min(len(text), a + draw.choice([1, 1, 2, 12]))
            text = (
                draw.choice(
                    [text[:a] + text[b:], text[:a] + draw.choice('{}[]"\\<>,:x \n漢') + text[a:], text[:a], text + "!"]
                )
                or "x"
            )
        content, read, errors = ours(text, format)
        try:
            _, wanted = theirs(format)(text)
        except ValueError:
            continue
        if wanted and not errors and all(isinstance(given, dict) for _, given in wanted):
            both += 1
            # vLLM passes over calls whose JSON holds a newline (DeepSeek) and over unknown names (GLM).
            if format.startswith(("deepseek", "glm")):
                read = [each for each in read if each in wanted]
            assert read == wanted, text
    assert both > 20


def harmony(calls: list[tuple[str, dict]], thought: str) -> str:
    lead = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    inner = [
        f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(given, ensure_ascii=False)}<|call|>"
        for name, given in calls
    ]
    return lead + "<|start|>assistant".join(inner)


def test_calls_of_gpt_oss_are_those_that_transformers_reads_by_trls_template():
    from transformers.utils.chat_parsing import parse_response
    from trl.chat_template_utils import gptoss_template

    draw = random.Random(3)
    for _ in range(60):
        calls = [(draw.choice(["look_up", "f"]), arguments(draw)) for _ in range(draw.randint(0, 2))]
        thought = draw.choice(["", "I look.", "漢字 first,\nthen {this}"])
        text = harmony(calls, thought) if calls else f"<|channel|>analysis<|message|>{thought}<|end|>"
        if not calls:
            text += "<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>"
        found = parse_response(text, gptoss_template, prefix="<|start|>assistant")
        content, read, said = parse(text, "gpt_oss")
        wanted = [(call["function"]["name"], call["function"]["arguments"]) for call in found.get("tool_calls", [])]
        assert [(call.name, call.arguments) for call in read] == wanted == calls
        assert said == found.get("thinking", "").strip() == thought
        assert content == found.get("content", "") == ("" if calls else "It is 4.")


def test_gpt_oss_forms_of_headers_and_tools_of_its_own():
    text = (
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
        "<|start|>assistant<|channel|>analysis to=python code<|message|>print(1)<|call|>"
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{a}"
    )
    content, calls, thought = parse(text, "gpt_oss")
    assert (content, thought) == ("I look.", "think")
    assert [(call.name, call.arguments) for call in calls[:2]] == [("f", {"a": 1}), ("python", {"code": "print(1)"})]
    assert calls[2].name == "g" and calls[2].arguments is None and "JSON" in calls[2].error
    assert parse("no channel at all", "gpt_oss") == ("no channel at all", [], "")


CALL = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    "text, content, names, thought",
    [
        (f"<think>hm</think>\n<tool_call>{CALL}</tool_call> done", "done", ["f"], "hm"),
        (f"the prompt began it</think><tool_call>{CALL}</tool_call>", "", ["f"], "the prompt began it"),
        (f"<think>a call: <tool_call>{CALL}</tool_call></think>no", "no", [], f"a call: <tool_call>{CALL}</tool_call>"),
        (f"<think>never closed <tool_call>{CALL}</tool_call>", "", ["f"], "never closed"),
        ("<think>cut off", "", [], "cut off"),
        ('<tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call>', "", ["f"], ""),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', "", ["f"], ""),
        (f"one<tool_call>{CALL}</tool_call>two<tool_call>{CALL}", "onetwo", ["f", "f"], ""),
        ("[THINK]hm[/THINK]  text ", "text", [], "hm"),
        ("  text ", "  text ", [], ""),
    ],
)
def test_text_calls_and_thoughts_are_kept_apart(text, content, names, thought):
    found = parse(text, "hermes")
    assert (found[0], [call.name for call in found[1]], found[2]) == (content, names, thought)
    assert not any(call.error for call in found[1])


@pytest.mark.parametrize(
    "format, text, name, why",
    [
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "", "Expecting property name"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "f", 'no "arguments"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "f", "not a JSON object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "", "NaN"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "", "too large"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "", 'no "name"'),
        ("hermes", f"<tool_call>{CALL} and more</tool_call>", "f", "text between the call and </tool_call>"),
        ("hermes", "<tool_call>" + "[" * 100_000, "", "nested too deeply"),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 9999 + "}}</tool_call>",
            "",
            "not valid JSON",
        ),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1", "f", "</function>"),
        ("qwen3_coder", "<tool_call>hello</tool_call>", "", "<function=NAME>"),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</tool_call>", "f", "is not followed by"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ', "f", "not valid JSON"),
        ("mistral", "[TOOL_CALLS][1]", "", "not a JSON object"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{a}<｜tool▁call▁end｜>", "f", "JSON"),
        ("llama3", '{"name": "f", "parameters": {"a": }}', "", "not valid JSON"),
        ("llama3", "<|python_tag|>f.call(a=open('x'))", "f", "NAME.call"),
        ("llama3", "<|python_tag|>", "", "nothing follows"),
        ("python", "```python\nprint(1)", "python", "not closed"),
    ],
)
def test_malformed_calls_say_what_is_wrong(format, text, name, why):
    (call,) = parse(text, format)[1]
    assert call.arguments is None and call.name == name
    assert why in call.error and call.error.endswith(".") and len(call.error) < 200


def test_forms_without_marks():
    assert parse('The set {1, 2} and {"name": "Bob"} are no calls', "llama3")[1] == []
    content, calls, _ = parse('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "llama3")
    assert content == "" and calls[0].arguments == {"a": 1}
    (call,) = parse('<|python_tag|>brave_search.call(query="x y")', "llama3")[1]
    assert (call.name, call.arguments) == ("brave_search", {"query": "x y"})
    (call,) = parse("<|python_tag|>print(1)\n", "llama3")[1]
    assert (call.name, call.arguments) == ("python", {"code": "print(1)"})

    text = "First:\n```python\nx = '```'\nprint(x)\n```\nthen\n```py\n1\n```\n```\nno code\n```"
    content, calls, _ = parse(text, "python")
    assert content == text
    assert [call.arguments for call in calls] == [{"code": "x = '```'\nprint(x)\n"}, {"code": "1\n"}]
    assert parse(f"<tool_call>{CALL}</tool_call>", "none")[:2] == (f"<tool_call>{CALL}</tool_call>", [])
    with pytest.raises(ValueError, match="use one of hermes"):
        parse("", "xml")


def test_values_without_schemas_are_json_or_text_and_lone_surrogates_go():
    text = "<tool_call><function=f><parameter=a>1</parameter><parameter=b>one</parameter></function></tool_call>"
    assert parse(text, "qwen3_coder")[1][0].arguments == {"a": 1, "b": "one"}
    text = r'<tool_call>{"name": "f", "arguments": {"a": "\ud800 \ud83d\ude00"}}</tool_call>'
    assert parse(text, "hermes")[1][0].arguments == {"a": "? 😀"}
    assert parse("a\udc80", "none")[0] == "a?"


def test_messages_show_every_call_by_which_an_answer_comes():
    said = parse_turn(f"<think>hm</think>I look.<tool_call>{CALL}</tool_call><tool_call>nothing</tool_call>", "hermes")
    assert said.message == as_message(said)
    assert said.message["content"] == "I look." and said.message["reasoning_content"] == "hm"
    assert [call["function"] for call in said.message["tool_calls"]] == [
        {"name": "f", "arguments": {"a": 1}},
        {"name": "malformed_call", "arguments": {}},
    ]
    assert [call["id"] for call in said.message["tool_calls"]] == ["call00000", "call00001"]
    assert parse_turn("hello", "hermes").message == {"role": "assistant", "content": "hello"}
    code = "```python\n1\n```"
    assert parse_turn(code, "python").message == {"role": "assistant", "content": code}
    named = parse_turn('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}]', "mistral")
    assert named.message["tool_calls"][0]["id"] == "abcdefghi"


GARBAGE = [
    *(mark * (1_000_000 // len(mark)) for mark in (*CONTROL, "{", '{"', "[", " ", "\n", "```python\n", "```", "<")),
    *(mark * (1_000_000 // len(mark)) for mark in ("<function=", "<function=f>", "<parameter=a>", "<arg_key>")),
    *(
        mark * (1_000_000 // len(mark))
        for mark in ('<tool_call>{"', "<tool_call>[[", "<tool_call>   ", "[TOOL_CALLS][")
    ),
    *(mark * (1_000_000 // len(mark)) for mark in ("<|start|>", "<|channel|>", "<|message|>", "to=", "<|start|>to=f")),
    '{"a":' * 200_000,
    '{"a": [' + "{}," * 300_000,
    "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 30_000,
    "<｜tool▁call▁begin｜>" + "x" * 1_000_000,
    "<|python_tag|>f.call(" + "(" * 1_000_000,
    "[TOOL_CALLS]" + "x" * 1_000_000,
    "<tool_call>" + " " * 1_000_000,
]


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("format", FORMATS)
def test_a_megabyte_of_garbage_is_read(format):
    """In time in proportion to its length: a second power would take hours."""
    for text in GARBAGE:
        content, calls, thought = parse(text, format)
        assert len(calls) <= 65
        assert all(call.error for call in calls if call.name not in ("", "f", "python", "x" * 1_000_000))


def test_random_texts_of_marks_are_read():
    words = [
        *CONTROL,
        *"{}[]\"':, \nx1",
        "[ARGS]",
        '"name"',
        '"arguments"',
        "<function=f>",
        "<parameter=a>",
        "</function>",
    ]
    words += [
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<|channel|>",
        "<|message|>",
        "to=f",
        "```python\n",
    ]
    draw = random.Random(5)
    for _ in range(400):
        text = "".join(draw.choice(words) for _ in range(draw.randint(1, 60)))
        for format in FORMATS:
            said = parse_turn(text, format, SCHEMAS)
            json.dumps(said.message, allow_nan=False).encode()
            assert all((call.arguments is None) == bool(call.error) for call in said.calls)


EXPECTED = {
    "deepseek": ["deepseek_r1_distill", "deepseekv3"],
    "glm": ["glm4moe"],
    "gpt_oss": ["gptoss"],
    "hermes": ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"],
    "llama3": ["llama3_1", "llama3_2"],
    "qwen3_coder": [
        *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
        *("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"),
    ],
    "none": [
        *("cohere", "cohere2", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next", "phi3", "phi3_5"),
        *("qwen2_5_vl", "smolvlm"),
    ],
    "ValueError": [
        *("diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "lfm2_2_5", "lfm2_2_5_v2"),
        *("lfm2_2_5_vl", "lfm2_v2", "muse_glimmer"),
    ],
}


def test_formats_of_the_templates_of_trl():
    found: dict[str, list[str]] = {}
    for name, template in templates().items():
        try:
            format = format_of(template)
        except ValueError as error:
            assert "name the form" in str(error)
            format = "ValueError"
        found.setdefault(format, []).append(name.removesuffix("_training"))
    assert {format: sorted(set(names)) for format, names in found.items()} == EXPECTED


def test_a_template_that_describes_calls_without_rendering_them_is_known_by_its_marks():
    describes = "{{ 'Write <tool_call>{...}</tool_call>.' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert format_of(describes) == "hermes"
    assert format_of(describes.replace("{...}", "<function=x> or <arg_key>")) == "qwen3_coder"
    mistral = (
        "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
        "{% endfor %}]</s>{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"
    )
    assert format_of(mistral) == "mistral"
