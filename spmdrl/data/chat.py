"""Turns a prompt (text or chat messages) into the tokens that a policy continues."""

from pathlib import Path

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML template that renders exactly the messages given (templates of some models insert a system message)."""


def template_text(value: str) -> str:
    """Return the jinja text that `--data.chat-template` names: `chatml`, a `.jinja` file, or the text itself.

    Raises:
        ValueError: a file that cannot be read.
    """
    if value == "chatml":
        return CHATML
    if not value.endswith(".jinja"):
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except OSError as e:
        raise ValueError(f"--data.chat-template: cannot read {value!r} ({e.strerror})") from e


def encode(
    tokenizer,
    prompt: str | list[dict],
    *,
    system: str = "",
    prefill: str = "",
    chat: str = "auto",
    chat_template: str = "",
) -> tuple[list[int], str]:
    """Return the tokens of a prompt, and the text that they encode.

    prompt: text, or messages `{"role": ..., "content": ...}` that end with the one to answer. system: message put first
    when not empty. prefill: start of the reply, appended as text. chat: `on`, `off` or `auto` (on when there is a
    template). chat_template: a jinja text (`template_text`) that replaces the tokenizer's template.

    Through a template, the rendered text holds every special token and is tokenised without adding any. Without one,
    the tokenizer adds its own at the front; an end token that it would append is left off: the policy goes on there.
    Raises ValueError when prompt, template and settings do not fit together.
    """
    has_template = bool(chat_template or getattr(tokenizer, "chat_template", None))
    if chat not in ("auto", "on", "off"):
        raise ValueError(f"--data.chat is {chat!r}: choose auto, on or off")
    if chat == "on" and not has_template:
        raise ValueError("--data.chat on, but the tokenizer has no chat template: give one with --data.chat-template")
    if isinstance(prompt, list):
        _check_messages(prompt)
    if chat != "off" and has_template:
        text = _render(tokenizer, prompt, system, chat_template) + prefill
        return list(tokenizer(text, add_special_tokens=False).input_ids), text

    why = "--data.chat is off" if chat == "off" else "the tokenizer has no chat template"
    if system:
        raise ValueError(
            f"--data.system needs a chat template, and {why}: set --data.chat-template, or clear --data.system"
        )
    if isinstance(prompt, list):
        if len(prompt) != 1 or prompt[0]["role"] != "user" or not isinstance(prompt[0]["content"], str):
            roles = ", ".join(str(m["role"]) for m in prompt)
            raise ValueError(
                f"a prompt of messages ({roles}) needs a chat template, and {why}: set --data.chat-template "
                "(for example chatml); only a single user message can stand as plain text"
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
            raise ValueError(f"a chat message needs `role` and `content`, this one is {str(message)[:120]}")
    if messages[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant message: give the start of the reply with --data.prefill")


def _render(tokenizer, prompt: str | list[dict], system: str, chat_template: str) -> str:
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if system:
        if messages[0]["role"] == "system":
            raise ValueError("the prompt brings its own system message: leave --data.system empty")
        messages = [{"role": "system", "content": system}, *messages]
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, chat_template=chat_template or None
        )
    except Exception as e:  # jinja raises its own errors, and templates raise any
        named = "--data.chat-template" if chat_template else "the tokenizer's chat template"
        raise ValueError(f"{named} could not render the prompt ({type(e).__name__}: {e})") from e
