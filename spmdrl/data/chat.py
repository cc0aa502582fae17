"""Chooses the chat template, and renders and tokenizes prompts (text or chat messages)."""

from datetime import date, datetime
from pathlib import Path
from typing import Any

from spmdrl.config.template import DATE

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML template that renders exactly the given messages (some models' templates insert a system message)."""


def template_text(value: str) -> str:
    """Resolve the name `chatml` or the path of a `.jinja` file to jinja text; return any other value unchanged.

    value: the setting `--data.chat-template`, which can also be a template's text or the name of a tokenizer template.

    Raises ValueError if the file cannot be read.
    """
    if value == "chatml":
        return CHATML
    if not value.endswith(".jinja"):
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except OSError as e:
        raise ValueError(f"--data.chat-template: cannot read {value!r} ({e.strerror})") from e


def chosen_template(tokenizer: Any, given: str = "", tools: bool = False) -> str:
    """Return the chat template, or an empty string if there is none. Named templates are chosen as in transformers.

    given: a template's text or the name of a tokenizer template; empty for the tokenizer's default.
    tools: True if the dialogue has tools.

    Raises ValueError if there are only named templates and none is the default, or if `given` is neither a name nor a
    template.
    """
    own = getattr(tokenizer, "chat_template", None)
    if given:
        return _given_template(own, given)
    if not isinstance(own, dict):
        return own or ""
    name = "tool_use" if tools and "tool_use" in own else "default"
    if name not in own:
        raise ValueError(
            f"the tokenizer has the chat templates {', '.join(sorted(own))} and none named default: name one of them "
            "with --data.chat-template"
        )
    return own[name]


def _given_template(templates: str | dict[str, str] | None, given: str) -> str:
    if isinstance(templates, dict) and given in templates:
        return templates[given]
    # Templates insert parts of a dialogue with braces, so a string without a brace is not a template.
    if "{" in given:
        return given
    if isinstance(templates, dict):
        own = f"the tokenizer names {', '.join(sorted(templates))}; give one of these names, "
    else:
        own = f"the tokenizer has {'one template, without a name' if templates else 'no template'}; give "
    raise ValueError(
        f"--data.chat-template {given[:40]!r} is not a chat template: {own}chatml, a .jinja file or the text of a "
        "template"
    )


class Today:
    """The date that chat templates show as the current date, unless a template variable overrides it."""

    first: date | None = None
    """Day on which the run first started; a resumed run uses it to render the same tokens. None means the current
    day."""


def variables(more: dict[str, Any]) -> dict[str, Any]:
    """Return the template variables `more`, and a date function if the date is fixed."""
    given = more.get(DATE)
    day = date.fromisoformat(given) if isinstance(given, str) else Today.first
    return more | ({DATE: datetime(day.year, day.month, day.day).strftime} if day else {})


def as_messages(prompt: str | list[dict]) -> list[dict]:
    """Return a prompt as chat messages: a string becomes one user message."""
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


def encode(
    tokenizer,
    prompt: str | list[dict],
    *,
    system: str = "",
    prefill: str = "",
    chat: str = "auto",
    chat_template: str = "",
    tools: list | None = None,
    more: dict[str, Any] | None = None,
) -> tuple[list[int], str]:
    """Tokenize a prompt; return its tokens and the text that they encode.

    prompt: text, or messages `{"role": ..., "content": ...}`; the policy answers the last one. system: text of a system
    message to prepend, or empty for none. prefill: beginning of the reply, appended as text. chat: `on`, `off` or
    `auto` (on if there is a template). chat_template: jinja text (`template_text`) that overrides the tokenizer's
    template. tools: JSON schemas of tools, for the template. more: template variables.

    Text rendered by a template already contains all special tokens, so none are added. Without a template, the
    tokenizer prepends special tokens; an end token that it appends is removed, because the policy continues the text.
    Raises ValueError if prompt, template and settings are incompatible.
    """
    has_template = bool(chat_template or getattr(tokenizer, "chat_template", None))
    if chat not in ("auto", "on", "off"):
        raise ValueError(f"--data.chat is {chat!r}: choose auto, on or off")
    if chat == "on" and not has_template:
        raise ValueError("--data.chat on, but the tokenizer has no chat template: give one with --data.chat-template")
    if isinstance(prompt, list):
        _check_messages(prompt)
    if chat != "off" and has_template:
        text = _render(tokenizer, prompt, system, chat_template, tools, more or {}) + prefill
        return list(tokenizer(text, add_special_tokens=False).input_ids), text

    why, cure = "the tokenizer has no chat template", "set --data.chat-template (for example chatml)"
    if chat == "off":
        why, cure = "--data.chat is off", "set --data.chat to auto"
    if tools or more:
        what = "a row's tools are" if tools else "variables of the template are"
        raise ValueError(f"{what} given, which only a chat template reads, and {why}: {cure}")
    if system:
        raise ValueError(f"--data.system needs a chat template, and {why}: {cure}, or clear --data.system")
    if isinstance(prompt, list):
        if any(isinstance(message["content"], list) for message in prompt):
            raise ValueError(f"a prompt with images or parts needs a chat template, and {why}: {cure}")
        if len(prompt) != 1 or prompt[0]["role"] != "user" or not isinstance(prompt[0]["content"], str):
            roles = ", ".join(str(m["role"]) for m in prompt)
            raise ValueError(
                f"a prompt of messages ({roles}) needs a chat template, and {why}: {cure}; only a single user "
                "message can be used as plain text"
            )
        prompt = prompt[0]["content"]
    text = prompt + prefill
    tokens = list(tokenizer(text).input_ids)
    eos = tokenizer.eos_token_id
    if len(tokens) > 1 and tokens[-1] == eos and not text.endswith(tokenizer.eos_token):
        tokens.pop()
    return tokens, text


def _check_messages(messages: list[dict]) -> None:
    if not messages:
        raise ValueError("the prompt is an empty list of messages")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"a chat message needs `role` and `content`; this one is {str(message)[:120]}")
    if messages[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant message: give the start of the reply with --data.prefill")


def _render(
    tokenizer, prompt: str | list[dict], system: str, chat_template: str, tools: list | None, more: dict[str, Any]
) -> str:
    messages = as_messages(prompt)
    if system:
        if messages[0]["role"] == "system":
            raise ValueError("the prompt already has a system message: leave --data.system empty")
        messages = [{"role": "system", "content": system}, *messages]
    try:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            chat_template=chosen_template(tokenizer, chat_template, bool(tools)),
            tools=tools,
            **variables(more),
        )
    except Exception as e:  # jinja and templates raise errors of many types
        named = "--data.chat-template" if chat_template else "the tokenizer's chat template"
        raise ValueError(f"{named} could not render the prompt ({type(e).__name__}: {e})") from e
