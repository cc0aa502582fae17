"""Renders dialogues with a chat template, in the message format that the template expects.

Templates expect different input: the content is text or a list of parts, tool call arguments are a dict or JSON, and a
thought is stored under one of three keys. `Renderer` renders test messages once to detect which format a template
expects.
"""

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from spmdrl.data.chat import CHATML, chosen_template, variables

PROBE = "Zq7probe"
"""Text of test messages. No template contains it, so it appears in a rendering only if a message is shown."""
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which templates look for an assistant message's thought."""
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TemplateError(ValueError):
    """A template cannot render a dialogue, or omits a part of it; the message gives the reason."""


def tool_call(name: str, arguments: Any, place: int = 0) -> dict:
    """Return a tool call in the format that templates expect. place: index of the call in its turn."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{place:05d}", "type": "function", "function": function}


def probed(content: Any, probe: str) -> str | list[dict]:
    """Return a message's content with `probe` in place of its text. Images stay in their places."""
    if not isinstance(content, list):
        return probe
    texts = [i for i, part in enumerate(content) if part["type"] == "text"]
    text = {"type": "text", "text": probe}
    parts = [text if i in texts[:1] else part for i, part in enumerate(content) if i not in texts[1:]]
    return parts if texts else [*parts, text]


@dataclass
class Dialogue:
    """Messages with the tools and template variables (`more`) for rendering them."""

    messages: list[dict]
    tools: list | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def upto(self, count: int) -> "Dialogue":
        """Return a dialogue with only the first `count` messages."""
        return Dialogue(self.messages[:count], self.tools, self.more)

    def then(self, message: dict) -> "Dialogue":
        """Return the dialogue with one message appended."""
        return Dialogue([*self.messages, message], self.tools, self.more)


class Renderer:
    """Renders dialogues with a tokenizer's chat template, or with a given template."""

    def __init__(self, tokenizer: Any, template: str = "", more: dict[str, Any] | None = None):
        """Detect the template's message format by rendering test messages.

        template: jinja text that overrides the tokenizer's template, or the name of one of the tokenizer's templates.
        If it is empty and the tokenizer has no template, ChatML is used. more: default values of template variables.

        Raises TemplateError if the template cannot render a single user message, and ValueError like `chosen_template`.
        """
        self.tokenizer = tokenizer
        self.template: str = chosen_template(tokenizer, template) or CHATML
        self.tool_template: str = chosen_template(tokenizer, template, tools=True) or CHATML
        self.more = more or {}
        self.parts, self.json_arguments = False, False
        if not self._shows([{"role": "user", "content": PROBE}]):
            self.parts = True
            if not self._shows([{"role": "user", "content": PROBE}]):
                raise TemplateError("the chat template does not show the message of a user")
        call, question = tool_call(PROBE, {"a": PROBE}), {"role": "user", "content": "a"}
        self.json_arguments = not self._shows([question, {"role": "assistant", "content": "", "tool_calls": [call]}])

    def _shows(self, messages: list[dict], tools: list | None = None) -> bool:
        try:
            return PROBE in self(Dialogue(messages, tools), ask=bool(tools))
        except TemplateError:
            return False

    @cached_property
    def shows_tools(self) -> bool:
        """True if the template shows tools before a question, with or without a system message."""
        tool = {"type": "function", "function": {"name": PROBE, "description": "a", "parameters": {"type": "object"}}}
        question = [{"role": "system", "content": "a"}, {"role": "user", "content": "a"}]
        return any(self._shows(messages, [tool]) for messages in (question[1:], question))

    @cached_property
    def marked(self) -> bool:
        """True if the template marks the text that an assistant generates (`{% generation %}`)."""
        return bool(MARKS.search(self.template) and MARKS.search(self.tool_template))

    @cached_property
    def controls(self) -> re.Pattern[str]:
        """A pattern that matches control tokens in a text: all tokens that were added to the tokenizer's vocabulary."""
        words = sorted(map(str, self.tokenizer.get_added_vocab()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, words)) or r"(?!)")

    @cached_property
    def call_ends(self) -> frozenset[str]:
        """Control tokens between two tool calls of one turn, without those that also end a plain-text turn.

        After such a token a model can continue with another call, so it does not end the turn. Empty if the template
        rejects two calls or shows only one.
        """
        names = [PROBE + letter for letter in "ab"]
        calls = [tool_call(name, {"a": "1" + name}, i) for i, name in enumerate(names)]
        question = {"role": "user", "content": "a"}
        try:
            text = self(Dialogue([question, {"role": "assistant", "content": "", "tool_calls": calls}]))
            plain = self(Dialogue([question, {"role": "assistant", "content": PROBE}]))
        except TemplateError:
            return frozenset()
        start, end = text.rfind("1" + names[0]), text.find(names[1])
        between = text[start:end] if 0 <= start < end else ""
        ends = set(self.controls.findall(plain.rpartition(PROBE)[2]))
        return frozenset(self.controls.findall(between)) - ends

    def __call__(self, dialogue: Dialogue, ask: bool = False) -> str:
        """Render a dialogue as text. Raises TemplateError if the template rejects it.

        ask: True to end the text with the generation prompt.
        """
        return self._render(dialogue, add_generation_prompt=ask)[0]

    def marks(self, dialogue: Dialogue) -> tuple[str, list[tuple[int, int]]]:
        """Render a dialogue; return the text and the character ranges that the template marks as generated."""
        text, places = self._render(dialogue, return_assistant_tokens_mask=True)
        return text, [(start, end) for start, end in places if end > start]

    def _render(self, dialogue: Dialogue, **options: bool) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            found: Any = render_jinja_template(
                [[self.shaped(m) for m in dialogue.messages]],
                tools=dialogue.tools or None,
                chat_template=self.tool_template if dialogue.tools else self.template,
                **(self.tokenizer.special_tokens_map | variables(self.more | dialogue.more) | options),
            )
        except Exception as e:  # jinja and templates raise errors of many types
            raise TemplateError(
                f"the chat template refuses the messages ({type(e).__name__}: {' '.join(str(e).split())})"
            ) from e
        texts, marks = found
        return texts[0], (marks[0] if marks else [])

    def shaped(self, message: dict) -> dict:
        """Convert a message to the format that the template expects."""
        out = {k: v for k, v in message.items() if v is not None}
        content = out.get("content", "")
        out["content"] = [{"type": "text", "text": content}] if self.parts and isinstance(content, str) else content
        thought = next((out[k] for k in THOUGHT_KEYS if out.get(k)), None)
        if thought:
            out |= dict.fromkeys(THOUGHT_KEYS, thought)
        if calls := out.get("tool_calls"):
            out["tool_calls"] = [self._call(call) for call in calls]
        return out

    def _call(self, call: dict) -> dict:
        function = dict(call.get("function") or {k: v for k, v in call.items() if k in ("name", "arguments")})
        arguments = function.get("arguments")
        if self.json_arguments and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        elif not self.json_arguments and isinstance(arguments, str):
            try:
                function["arguments"] = json.loads(arguments)
            except ValueError as e:
                raise TemplateError(f"the arguments of a tool call are not JSON: {arguments[:80]!r}") from e
        return {"type": "function", **call, "function": function}
