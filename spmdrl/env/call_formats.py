"""Tool-call parsers, one for each format that models use: text -> (text without calls, calls).

Each parser's docstring shows the format and names its source. `tools` are OpenAI function schemas; parsers of formats
that write values as plain text need them to distinguish `1` from `"1"`.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from spmdrl.env.base import Call
from spmdrl.env.call_reading import (
    MOST_CALLS,
    MalformedError,
    Tools,
    arguments_at,
    arguments_of,
    between,
    broken,
    call_of,
    json_at,
    python_call,
    typed,
)

CODE = "python"
"""Name of the tool that a code block calls; the code is passed as its argument `code`."""


def hermes(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Hermes and Qwen 2.5 and 3: https://github.com/NousResearch/Hermes-Function-Calling
    """

    def read(text: str, at: int) -> tuple[list[Call], int]:
        value, at = json_at(text, at)
        return [call_of(value)], at

    return between(text, re.compile("<tool_call>"), "</tool_call>", read)


def qwen3_coder(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Read `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    Qwen3-Coder, Qwen3.5 and Nemotron 3: https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct. The outer pair of
    tags may be missing. One newline at each end of a value is removed.
    """

    def read(text: str, at: int) -> tuple[list[Call], int]:
        if not text.endswith("<function=", 0, at):
            raise MalformedError("there is no <function=NAME>")
        end = text.find("</function>", at)
        name, closed, body = text[at : end if end >= 0 else len(text)].partition(">")
        name = name.strip()
        if not closed or not name or end < 0:
            raise MalformedError("there is no <function=NAME> with its </function>", name if closed else "")
        arguments = {}
        parts = re.split(r"<parameter=", body)
        for i, part in enumerate(parts[1:], 1):
            key, closed, value = part.partition(">")
            value, ended, _ = value.partition("</parameter>")
            if not closed or (not ended and i == len(parts) - 1):
                raise MalformedError("a <parameter=NAME> is not closed by </parameter>", name)
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key.strip()] = typed(value, name, key.strip(), tools)
        if parts[0].strip():
            raise MalformedError("the function contains text outside of <parameter=NAME>", name)
        at = end + len("</function>")
        closing = re.compile(r"\s*</tool_call>").match(text, at)
        return [Call(name, arguments)], closing.end() if closing else at

    return between(text, re.compile(r"<tool_call>(?:\s*<function=)?|<function="), "", read)


def glm(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Read `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.

    GLM-4.5 to 4.7: https://huggingface.co/zai-org/GLM-4.5
    """

    def read(text: str, at: int) -> tuple[list[Call], int]:
        end = text.find("</tool_call>", at)
        parts = text[at : end if end >= 0 else len(text)].split("<arg_key>")
        name = parts[0].strip()
        if not name or end < 0:
            raise MalformedError("there is no </tool_call>" if name else "the call has no name", name)
        if re.search(r"[\s<>]", name):
            raise MalformedError("the name of the tool is not followed by <arg_key>")
        arguments = {}
        for part in parts[1:]:
            key, closed, rest = part.partition("</arg_key>")
            before, opened, value = rest.partition("<arg_value>")
            value, ended, _ = value.partition("</arg_value>")
            if not (closed and opened and ended) or before.strip():
                raise MalformedError("an <arg_key> is not followed by <arg_value>...</arg_value>", name)
            arguments[key.strip()] = typed(value, name, key.strip(), tools)
        return [Call(name, arguments)], end

    return between(text, re.compile("<tool_call>"), "</tool_call>", read)


def mistral(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Read `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and `[TOOL_CALLS]NAME[ARGS]{...}` of later models.

    Mistral: https://docs.mistral.ai/cookbooks/concept-deep-dive-tokenization-tool_calling
    """

    def read(text: str, at: int) -> tuple[list[Call], int]:
        named = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]([A-Za-z0-9]+))?(?:\[ARGS\])?").match(text, at)
        if named:
            arguments, at = arguments_at(text, named.end(), named[1])
            return [Call(named[1], arguments, named[2] or "")], at
        value, at = json_at(text, at)
        return [call_of(each) for each in (value if isinstance(value, list) else [value])], at

    return between(text, re.compile(r"\[TOOL_CALLS\]"), "", read)


def deepseek(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Read calls after `<｜tool▁calls▁begin｜>`: type, name and a JSON block (V3, R1), or name and JSON (V3.1).

    DeepSeek V3 and R1, and V3.1: https://huggingface.co/deepseek-ai/DeepSeek-V3-0324, https://huggingface.co/deepseek-ai/DeepSeek-V3.1
    """
    first, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"

    def read(text: str, at: int) -> tuple[list[Call], int]:
        lead = re.compile(r"([^<\n]{1,200})<｜tool▁sep｜>").match(text, at)
        if not lead:
            raise MalformedError("there is no name before <｜tool▁sep｜>")
        block = re.compile(r"([^\n<]{1,200})\n```json\n").match(text, lead.end())
        name = (block or lead)[1].strip()
        arguments, at = arguments_at(text, (block or lead).end(), name)
        if block:
            fence = re.compile(r"\s*```").match(text, at)
            at = fence.end() if fence else at
        return [Call(name, arguments)], at

    kept, calls = between(text, re.compile(first), end, read)
    return re.sub("<｜tool▁calls▁(begin|end)｜>", "", kept), calls


def llama3(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Read calls `{"name": ..., "parameters": {...}}`, separated by `;`, and calls after `<|python_tag|>`.

    Llama 3.1 to 3.3: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1. The tag is followed by JSON, a
    call to a built-in tool (`NAME.call(query="...")`), or a program for the tool `python`.
    """
    tag = "<|python_tag|>"
    before, tagged, rest = text.partition(tag)
    if tagged and not rest.lstrip().startswith("{"):
        return before, [_python_tag(rest.strip())]
    text = before + rest
    # Text with the tag, or text that starts like a call, must contain a call. Otherwise it counts as a malformed call.
    meant = len(before) if tagged else 0 if re.match(r'\s*\{\s*"name"\s*:', text) else -1
    kept: list[str] = []
    calls: list[Call] = []
    at, done, tries = 0, 0, 0
    while (start := text.find("{", at)) >= 0 and tries < MOST_CALLS:
        try:
            value, end = json_at(text, start)
            if meant < 0 and not ({"name"} < value.keys() and {"arguments", "parameters"} & value.keys()):
                raise MalformedError("some other object")
            calls.append(call_of(value))
        except MalformedError as error:
            if meant >= 0 and not calls and not text[meant:start].strip():
                return text[:meant], [broken(error)]
            tries, at = tries + 1, start + 1
            continue
        kept.append(text[done:start])
        at = done = end
    kept.append(text[done:])
    if not calls:
        return text, []
    return "".join(kept[:1] + [each for each in kept[1:] if each.strip(" \n\t;")]), calls


def _python_tag(text: str) -> Call:
    """Return the call in `text`, the text after `<|python_tag|>`."""
    if re.match(r"\w+\.call\(", text) and len(text) < 10_000:
        with suppress(ValueError):
            function, arguments = python_call(text)
            if (name := function.removesuffix(".call")).isidentifier():
                return Call(name, arguments)
        return broken(MalformedError("not NAME.call(KEY=VALUE)", text.partition(".")[0]))
    return Call(CODE, {"code": text}) if text else broken(MalformedError("nothing follows <|python_tag|>"))


def gpt_oss(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Read an answer in OpenAI's harmony format: calls are messages with a recipient, `to=functions.NAME`.

    gpt-oss: https://github.com/openai/harmony/blob/main/docs/format.md. The returned text omits the analysis channel,
    which the function `analysis` returns.
    """
    kept: list[str] = []
    calls: list[Call] = []
    for header, body in _messages(text):
        to = re.search(r"\bto=([^\s<]+)", header)
        if not to:
            if "<|channel|>analysis" not in header:
                kept.append(body)
            continue
        name = to[1].removeprefix("functions.")
        if len(calls) >= MOST_CALLS:
            calls.append(broken(MalformedError(f"more than {MOST_CALLS} calls in one turn")))
            break
        if name == CODE and not body.lstrip().startswith("{"):
            calls.append(Call(CODE, {"code": body}))
            continue
        try:
            value, end = json_at(body, 0)
            if body[end:].strip():
                raise MalformedError("text follows the JSON")
            calls.append(Call(name, arguments_of(value, name)))
        except MalformedError as error:
            calls.append(broken(MalformedError(str(error), name)))
    return "\n".join(kept), calls


def analysis(text: str) -> str:
    """Return the analysis channel of a harmony answer."""
    found = [body for header, body in _messages(text) if "<|channel|>analysis" in header and "to=" not in header]
    return "\n".join(found)


def _messages(text: str) -> list[tuple[str, str]]:
    """Return (header, body) for each message in a harmony answer. The first `<|start|>assistant` is in the prompt."""
    out = []
    for message in text.split("<|start|>"):
        header, found, body = message.partition("<|message|>")
        if not found:
            header, body = "", "" if "<|channel|>" in message else message
        body = re.split(r"<\|(?:end|call|return)\|>", body, maxsplit=1)[0]
        if found or body:
            out.append((header, body))
    return out


def python(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Read code blocks that start with ```` ```python ```` as calls to the tool `python`. The code blocks stay in the
    text.

    Recipes with a code interpreter, such as ReTool (https://arxiv.org/abs/2504.11536), use this format.
    """
    calls: list[Call] = []
    at = 0
    opening, closing = re.compile(r"^[ \t]*```(?:python|py)[ \t]*\n", re.MULTILINE), re.compile(r"^[ \t]*```", re.M)
    while (start := opening.search(text, at)) and len(calls) < MOST_CALLS:
        end = closing.search(text, start.end())
        if end is None:
            why = "The block of code is not closed by ```, so it was not run."
            calls.append(Call(CODE, None, error=why, inline=True))
            break
        calls.append(Call(CODE, {"code": text[start.end() : end.start()]}, inline=True))
        at = end.end()
    return text, calls


def none(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Read the whole text as plain text without calls, and leave the text unchanged."""
    return text, []


@dataclass(frozen=True)
class CallFormat:
    """A tool-call format. The docstring of `read` shows a call and names the source."""

    read: Callable[[str, Tools], tuple[str, list[Call]]]
    begins: str = ""
    """The tag that starts a turn's calls. It also ends a thought whose closing tag is missing."""
    shown: str = ""
    """A tag that identifies this format in chat templates that describe calls but do not render them."""
    opens: tuple[str, ...] = ("",)
    """A rendered call has this format only if it starts with one of these prefixes. The prefix "" matches any text."""
    thought: Callable[[str], str] | None = None
    """Function that returns a turn's thought, or None if the format puts thoughts between tags such as `<think>`."""


FORMATS: dict[str, CallFormat] = {
    "hermes": CallFormat(hermes, "<tool_call>", "<tool_call>"),
    "glm": CallFormat(glm, "<tool_call>", "<arg_key>"),
    "qwen3_coder": CallFormat(qwen3_coder, "<tool_call>", "<function="),
    "gpt_oss": CallFormat(gpt_oss, shown="<|channel|>commentary", thought=analysis),
    "mistral": CallFormat(mistral, "[TOOL_CALLS]", "[TOOL_CALLS]"),
    "deepseek": CallFormat(deepseek, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "llama3": CallFormat(llama3, "<|python_tag|>", opens=("{", "<|python_tag|>")),
    "python": CallFormat(python),
    "none": CallFormat(none),
}
"""Formats by name. `calls.format_of` tries the parsers in this order, but looks for the tags (`shown`) in the reverse
order, since the template of a later format may contain the tag of an earlier format."""
