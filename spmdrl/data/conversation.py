"""Renders the messages between a policy's turns as tokens, to append to the tokens that the policy sampled.

After an assistant turn, the context continues with the text that the chat template puts between the turn and the next
generation prompt (`turn_tail.py` finds it and checks that it does not depend on the assistant's words). This text
starts with the control token that ends the turn, and is tokenized separately.

Some templates render earlier turns differently once a message follows (those of Qwen3 and gpt-oss drop the thinking).
With history "keep" the context continues as sampled, and no sampled token is rendered again. With "branch" the whole
prompt is re-rendered if the template changes earlier text.

Control tokens come only from the template and the policy, never from message text (`controls.py`).

A content is text or, if it shows images, a list of the parts {"type": "text", "text": ...} and {"type": "image"}. The
tokens have one placeholder for each image; the caller expands them.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spmdrl.data.chat import CHATML
from spmdrl.data.controls import Controls
from spmdrl.data.rendering import PROBE, THOUGHT_KEYS, Dialogue, Renderer, TemplateError, probed, tool_call
from spmdrl.data.turn_tail import SHAPES, STANDINS, Tail, linked, tail_of

QUESTION = {"role": "user", "content": "Xk" + PROBE}
ANSWER = {"role": "assistant", "content": STANDINS[0]}
CALL = {"role": "assistant", "content": "", "tool_calls": [tool_call("tool", {"a": "b"})]}
TOOL_ANSWER = {"role": "tool", "name": "tool", "tool_call_id": "call00000", "content": PROBE}
"""Test messages for checking a template before the first conversation."""


@dataclass
class Next:
    """The continuation of the context after an assistant turn."""

    tokens: list[int]
    """Observed tokens to append to the sampled tokens, up to and including the next generation prompt. Empty if `fork`
    is set."""
    fork: list[int] | None = None
    """The complete prompt of the next turn if the template renders earlier text differently, else None."""


@dataclass
class _Marked(Dialogue):
    """A dialogue with `mark` inserted into every control token in its text (`controls.py`)."""

    mark: str = ""


class Conversation:
    """Renders conversation messages as tokens, with one tokenizer and one chat template."""

    def __init__(self, tokenizer: Any, template: str = "", history: str = "keep", more: dict | None = None):
        """Check that the template can render conversations.

        template: jinja text that overrides the tokenizer's template. history: "keep" appends to the context as sampled;
        "branch" starts a branch if the template renders earlier messages differently. more: template variables.

        Raises ValueError for any other history value, or if the template cannot continue a test conversation. With
        "keep", it is also raised if the text that the template puts between two turns is ambiguous.
        """
        if history not in ("keep", "branch"):
            raise ValueError(f"the history of a conversation is {history!r}: choose keep or branch")
        self.tokenizer, self.template, self.history, self.more = tokenizer, template, history, more or {}
        self.name = "the given chat template" if template else f"the chat template of {tokenizer.name_or_path}"
        self._shapes: dict[tuple, str] = {}
        self._ends: dict[tuple, str] = {}
        self._shown: set[tuple] = set()
        self._tools_shown: set[tuple] = set()
        self._closings: dict[tuple[str, str], list[int]] = {}
        self._calls_proved = False
        self._others: dict[str, Conversation] = {}
        try:
            self.render = Renderer(tokenizer, template, self.more)
        except TemplateError as e:
            raise self._refused("render a conversation", e) from e
        self.controls = Controls(tokenizer, self.render.template + self.render.tool_template)
        self.next([QUESTION], ANSWER, None, [], False, [QUESTION])

    def of(self, more: dict[str, Any]) -> "Conversation":
        """Return the conversation renderer for a row's template variables `more`. Raises ValueError like `__init__`."""
        if not more:
            return self
        key = json.dumps(more, sort_keys=True, default=str)
        if key not in self._others:
            self._others[key] = Conversation(self.tokenizer, self.template, self.history, self.more | more)
        return self._others[key]

    @cached_property
    def rewrites(self) -> bool:
        """True if the template renders an earlier turn differently once a user or tool message follows."""
        thought = {"reasoning_content": STANDINS[1]}
        ends = [([QUESTION], answer, [QUESTION]) for answer in (ANSWER, ANSWER | thought)]
        ends += [([QUESTION], CALL | thought, [TOOL_ANSWER])]
        ends += [([QUESTION, CALL | thought, TOOL_ANSWER], answer, [QUESTION]) for answer in (ANSWER, ANSWER | thought)]
        return any(self._rewritten(*end) for end in ends)

    def _rewritten(self, messages: list[dict], assistant: dict, new: list[dict]) -> bool:
        marked, turn = self._marked([*messages, assistant, *new], None), len(messages)
        try:
            self._check_shown(marked)
            return self._changed(marked, turn, self._proved(marked, turn)[0], None) is not None
        except TemplateError:
            return False

    def _prove_calls(self) -> None:
        if not self._calls_proved:
            self.next([QUESTION], CALL, None, [], False, [TOOL_ANSWER])
            self._calls_proved = True

    @property
    def no_tools(self) -> str:
        """Advice for users whose template does not show the tools."""
        return (
            f"{self.name} does not show the tools: choose with --data.chat-template one that does, or set `calls` in "
            "the YAML file of --env to the form in which the policy calls tools without seeing them"
        )

    def begin(self, messages: list[dict], tools: list | None = None, hidden: bool = False) -> list[int]:
        """Return the tokens of the first prompt, which end with the generation prompt.

        messages: all messages so far; the policy answers the last one. tools: OpenAI function schemas. With tools, this
        method checks that the prompt shows each tool and that the conversation can continue after a call. hidden: True
        if the template may omit the tools.

        Raises ValueError if there are no messages, if the last one is an assistant message, or if the template rejects
        the messages, omits a tool or a non-assistant message, or cannot continue after a call.
        """
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError("a conversation must begin with messages, and the last one must not be an assistant's")
        marked = self._marked(messages, tools)
        try:
            self._check_shown(marked)
            text = self.render(marked, True)
        except TemplateError as e:
            raise self._refused("begin the conversation", e) from e
        if tools:
            self._prove_calls()
        if tools and not hidden:
            self._check_tools(marked)
        return self.controls.tokens(text, marked.mark)

    def next(
        self, messages: list[dict], assistant: dict, tools: list | None, tokens: list[int], ended: bool, new: list[dict]
    ) -> Next:
        """Return the tokens that follow an assistant turn.

        messages: all messages before the turn. assistant: the turn as a message, `{"role": "assistant", "content"}`
        with `tool_calls` and `reasoning_content` if it has any; history "keep" reads only the names and ids of the tool
        calls. tokens: the turn's sampled tokens. ended: True if the last sampled token ends the turn. new: the tool,
        user or system messages that follow.

        If the turn ended with a token other than the template's end token, the context continues after that token. If
        the turn did not end, the missing end is appended as observed tokens. If the template rejects the turn as a
        message, `Next.fork` is None.

        Raises ValueError if there are no new messages, if the last one is an assistant message, or if the template
        rejects the new messages or does not show them after the turn.
        """
        if not new or new[-1]["role"] == "assistant":
            raise ValueError("a turn must be followed by messages, and the last one must not be an assistant's")
        marked, turn = self._marked([*messages, assistant, *new], tools), len(messages)
        tail, refusal = self._proved(marked, turn)
        if self.history == "branch":
            try:
                text = self._changed(marked, turn, tail, self.text_of(tokens, ended))
                if text is not None:
                    self._check_shown(marked)
                    return Next([], self.controls.tokens(text, marked.mark))
            except TemplateError as e:
                refusal = refusal or e
        if tail is None:
            raise self._refused("continue after an assistant's turn", refusal) from refusal
        return Next(self._appended(tail, marked.mark, tokens, ended))

    def _refused(self, what: str, error: TemplateError | None) -> ValueError:
        helps = "<|im_end|>" in self.tokenizer.get_added_vocab() and self.template != CHATML
        example = " (for example chatml)" if helps else ""
        branch = ", or set history: branch in the YAML file of --env" if self.history == "keep" else ""
        return ValueError(
            f"{self.name} cannot {what}: {error}; choose with --data.chat-template one in which a token of the "
            f"tokenizer ends the turns{example}{branch}"
        )

    def _marked(self, messages: list[dict], tools: list | None) -> _Marked:
        messages, tools, mark = self.controls.marked(linked(messages), tools)
        return _Marked(messages, tools, self.more, mark)

    def _check_shown(self, marked: _Marked) -> None:
        """Raise TemplateError if the template omits a non-assistant message.

        Each combination of roles, call counts and parts is checked only once.
        """
        messages, tools = marked.messages, marked.tools
        key = (tuple((m["role"], len(m.get("tool_calls") or []), _types(m)) for m in messages), bool(tools))
        if key in self._shown:
            return
        probes = [probed(m.get("content"), f"{PROBE}{i:03d}") for i, m in enumerate(messages)]
        others = [m if m["role"] == "assistant" else m | {"content": p} for m, p in zip(messages, probes, strict=True)]
        text = self.render(Dialogue(others, tools, self.more), True)
        for i, message in enumerate(messages):
            if message["role"] != "assistant" and f"{PROBE}{i:03d}" not in text:
                raise TemplateError(f"it does not show message {i + 1} ({message['role']})")
        self._shown.add(key)

    def _check_tools(self, marked: _Marked) -> None:
        """Raise ValueError if the prompt omits a tool. Each combination of roles and tool count is checked once."""
        messages, tools = marked.messages, marked.tools or []
        key = (tuple((m["role"], _types(m)) for m in messages), len(tools))
        if key in self._tools_shown:
            return
        names = [f"{PROBE}{i:03d}" for i in range(len(tools))]
        named = [t | {"function": t["function"] | {"name": name}} for t, name in zip(tools, names, strict=True)]
        text = self.render(Dialogue(messages, named, self.more), True)
        if not all(name in text for name in names):
            raise ValueError(self.no_tools)
        self._tools_shown.add(key)

    def _proved(self, marked: _Marked, turn: int) -> tuple[Tail | None, TemplateError | None]:
        """Return the `Tail` for the first form in SHAPES that the template accepts, or None and the last error."""
        messages = marked.messages
        calls = max(len(m.get("tool_calls") or []) for m in messages)
        answers = any(m["role"] == "tool" for m in messages)
        shapes = SHAPES if calls or answers else SHAPES[-1:]
        key = (min(calls, 2), answers, tuple(m["role"] for m in messages[turn:]))
        refusal = None
        for shape in sorted(shapes, key=lambda shape: shape != self._shapes.get(key)):
            try:
                tail = tail_of(self.render, self.controls.pattern, marked, turn, shape, self._ends)
            except TemplateError as e:
                refusal = e
                continue
            self._shapes[key] = shape
            return tail, None
        return None, refusal

    def _changed(self, marked: _Marked, turn: int, tail: Tail | None, sampled_text: str | None) -> str | None:
        """Return the next prompt's text if the template renders earlier text differently in it, else None.

        Without a tail, the text is always returned.
        sampled_text: text of the sampled turn without its end token. A prompt that shows this text counts as unchanged.
        A prompt that does not show the turn's thought counts as changed.
        """
        text, before = self.render(marked, True), self.render(marked.upto(turn), True)
        if tail is None or not text.startswith(before):
            return text
        if sampled_text is not None:
            if text[len(before) :].replace(marked.mark, "").startswith(sampled_text):
                return None
            message = marked.messages[turn]
            thought = next((message[key] for key in THOUGHT_KEYS if message.get(key)), "")
            if thought.strip() not in text[len(before) :]:
                return text
        alone = self.render(marked.upto(turn + 1))
        unchanged = alone.endswith(tail.alone) and text.startswith(alone.removesuffix(tail.alone).rstrip())
        return None if unchanged else text

    def text_of(self, tokens: list[int], ended: bool) -> str:
        """Return the text of a sampled turn, with its control tokens but without the token that ends it.

        ended: True if the last token ends the turn.
        """
        tokens = tokens[:-1] if ended else tokens
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _appended(self, tail: Tail, mark: str, tokens: list[int], ended: bool) -> list[int]:
        """Return the tail tokens to append after a sampled turn, without those that the turn already has."""
        ids, end = self.controls.tokens(tail.text, mark), self._end(tail.text[: tail.closing], mark)
        leading = next((i for i, token in enumerate(ids) if token not in self.controls.ids), len(ids))
        if ended and tokens and tokens[-1] in ids[:leading]:
            return ids[ids.index(tokens[-1]) + 1 :]
        if ended:
            return ids[len(end) :]
        return ids[next((n for n in range(len(end), 0, -1) if tokens[-n:] == end[:n]), 0) :]

    def _end(self, text: str, mark: str) -> list[int]:
        """Tokenize the text that ends a turn. Results are cached, because a template has few such texts."""
        if (text, mark) not in self._closings:
            self._closings[text, mark] = self.controls.tokens(text, mark)
        return self._closings[text, mark]


def _types(message: dict) -> tuple[str, ...]:
    """Return the types of the parts of a message's content; an empty tuple if the content is text."""
    content = message.get("content")
    return tuple(part["type"] for part in content) if isinstance(content, list) else ()
