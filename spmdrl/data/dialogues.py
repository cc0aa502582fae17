"""Reads supervised rows as dialogues or plain text, in the formats of published data sets.

- Messages: `{"role", "content"}` (OpenAI, Hugging Face, verl's multi-turn parquet) or ShareGPT's `{"from", "value"}`.
- A prompt and a completion, each text or messages (TRL, verl's single-turn parquet, Alpaca's `instruction`, `input`,
  `output`).
- One column of text.

Other columns (`row_columns.py`) hold a system message, earlier exchanges, tools, and chat template variables.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from spmdrl.data.images import has_items, illustrated
from spmdrl.data.rendering import THOUGHT_KEYS, Dialogue
from spmdrl.data.row_columns import (
    HISTORY,
    Row,
    RowError,
    check_text,
    json_of,
    kind_of,
    listed,
    tools_of,
    variables_of,
    with_system,
)

MESSAGES = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
PROMPTS = ("prompt", "instruction", "question", "query")
COMPLETIONS = ("completion", "response", "output", "answer")
TEXTS = ("text", "content")
"""Common column names; the first one that a row has is read."""
ROLES = {
    **{name: "user" for name in ("user", "human", "prompter")},
    **{name: "assistant" for name in ("assistant", "gpt", "chatgpt", "bot", "model", "bing", "function_call")},
    **{name: "tool" for name in ("tool", "observation", "function", "function_response", "ipython")},
    "system": "system",
    "developer": "developer",
}
"""Maps roles in data files to roles in templates."""
TRAINED = ("loss", "weight", "train", "trainable")
"""Message fields that determine whether the message is trained on: 1 or 0, true or false."""
FIELDS = ("tool_calls", "name", "tool_call_id", *THOUGHT_KEYS)
"""Other message fields that templates read."""


@dataclass(frozen=True)
class Columns:
    """Column names; an empty name stands for the common names (MESSAGES, PROMPTS, COMPLETIONS, TEXTS)."""

    messages: str = ""
    prompt: str = ""
    completion: str = ""
    text: str = ""
    tools: str = "tools"
    images: str = "images"
    """Column with a row's images; `videos` is always the name of a column of videos."""


@dataclass
class Example:
    """One supervised row: a dialogue, or plain text that may follow a prompt."""

    dialogue: Dialogue | None = None
    trained: list[bool | None] = field(default_factory=list)
    """One entry per message: whether the message is trained on, or None if the row does not specify it."""
    before: list[dict] = field(default_factory=list)
    """Messages that a template renders before the prompt: a system message and earlier exchanges."""
    tools: list | None = None
    more: dict[str, Any] = field(default_factory=dict)
    """Tools and template variables (`more`), if prompt and completion are both plain text."""
    images: list[Any] = field(default_factory=list)
    """Sources for `image_files.decode`, one for each {"type": "image"} in the dialogue, in order."""
    prompt: str = ""
    text: str = ""
    """The plain text, or the completion without the prompt."""
    plain: bool = False
    """True if the text is a transcript, which is rendered with a template only if `--data.chat` is on."""


def example_of(
    row: dict,
    columns: Columns = Columns(),  # noqa: B008 (frozen)
    system: str = "",
    text_only: str = "this job",
) -> Example:
    """Read one supervised row.

    system: system message for dialogues that have none. text_only: name of the reader that takes no images, for
    messages; empty if images are read.

    Raises RowError if the row has none of the supported forms, or if a field is malformed.
    """
    row = Row(row)
    check_text(row)
    check_text_only(row, columns, text_only)
    example = _example(row, columns, system, not text_only)
    return example if text_only else illustrated_example(row, example, columns, system)


def check_text_only(row: dict, columns: Columns, text_only: str) -> None:
    """Raise RowError if a row has images or videos, but its reader takes text only. text_only: as in `example_of`."""
    if text_only and has_items(row, columns.images, text_only=True):
        raise RowError(
            f"it has images or videos, and {text_only} reads text only: leave the column out, or use "
            "spmdrl.sft, spmdrl.preference or spmdrl.reward_model with a model that reads images"
        )


def illustrated_example(row: dict, example: Example, columns: Columns, system: str) -> Example:
    """Return an example of a row with the images that stand in it. A prompt with a completion becomes a dialogue.

    Raises RowError if images and their places disagree, or if an image stands in an assistant's turn.
    """
    if not example.dialogue and has_items(row, columns.images):
        if not example.prompt:
            raise RowError("it has images and plain text: give messages, or a prompt and a completion")
        example = as_dialogue(example, system)
    if not example.dialogue:
        return example
    found = illustrated(row, example.dialogue.messages, columns.images)
    if found.videos:
        raise RowError("it has videos, which are not supported: give their frames as images")
    for i, message in enumerate(found.messages, 1):
        if message["role"] == "assistant" and _shows_image(message["content"]):
            raise RowError(f"message {i} (assistant) has an image, which a model cannot write: put it before the turn")
    return replace(example, dialogue=replace(example.dialogue, messages=found.messages), images=found.images)


def _example(row: Row, columns: Columns, system: str, images: bool) -> Example:
    messages = column_of(row, columns.messages, MESSAGES)
    if messages is not None and not isinstance(messages, str):
        return dialogue_of(row, [*earlier(row), *messages_of(messages, images)], columns, system)
    prompt, completion = column_of(row, columns.prompt, PROMPTS), column_of(row, columns.completion, COMPLETIONS)
    if prompt is not None and completion is not None:
        return pair_of(row, prompt, completion, columns, system, images)
    text = column_of(row, columns.text, TEXTS)
    if isinstance(text, str):
        if not text.strip():
            raise RowError("its text is empty")
        return Example(text=text)
    if text is not None:
        raise RowError(f"its text is {kind_of(text)}, not text")
    if messages is not None:
        raise RowError(f"its messages are {kind_of(messages)}, not a list of messages")
    raise RowError(
        f"its columns are {', '.join(map(str, row)) or 'none'}: it needs messages ({', '.join(MESSAGES)}), a prompt "
        f"({', '.join(PROMPTS)}) with a completion ({', '.join(COMPLETIONS)}), or text ({', '.join(TEXTS)}); other "
        "names are given by --data.messages-column, --data.prompt-column, --data.completion-column, --data.text-column"
    )


def column_of(row: dict, name: str, usual: tuple[str, ...]) -> Any:
    """Return a column's value; `outer.inner` refers to a key in a column.

    name: the column to read. If the name is empty, the first column in `usual` that the row has is read, and the result
    is None if the row has none of these columns.

    Raises RowError if the row has no column of that name, or the column has no value.
    """
    if not name:
        return next((row[each] for each in usual if each in row), None)
    value: Any = row
    for key in [name] if name in row else name.split("."):
        if not isinstance(value, dict) or value.get(key) is None:
            raise RowError(f"it has no column {name!r}; its columns are {', '.join(map(str, row)) or 'none'}")
        value = value[key]
    return value


def pair_of(row: dict, prompt: Any, completion: Any, columns: Columns, system: str, images: bool = False) -> Example:
    """Return an example with a prompt and its completion; only the completion is trained on.

    Raises RowError if the prompt or the completion is neither text nor messages, or if the completion is empty.
    """
    if isinstance(prompt, list) or isinstance(completion, list):
        first = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        last = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
        before, after = [*earlier(row), *messages_of(first, images)], messages_of(last, images)
        example = dialogue_of(row, [*before, *after], columns, system)
        # The prompt might contain assistant turns, but only the completion is trained on.
        added = len(example.trained) - len(before) - len(after)
        example.trained[: added + len(before)] = [False] * (added + len(before))
        return example
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise RowError(f"its prompt is {kind_of(prompt)} and its completion {kind_of(completion)}: both must be text")
    if "instruction" in row and row.get("input"):
        prompt = f"{prompt}\n\n{row['input']}"
    if not completion.strip():
        raise RowError("its completion is empty")
    before = with_system(row, earlier(row))
    tools, more = tools_of(row, columns.tools), variables_of(row)
    return Example(before=before, tools=tools, more=more, prompt=prompt, text=completion)


def as_dialogue(example: Example, system: str = "") -> Example:
    """Convert a prompt and its completion to a dialogue for a template.

    Earlier answers in the dialogue are trained on, too.
    """
    messages = with_system({}, example.before, system)
    messages = [*messages, {"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.text}]
    return Example(Dialogue(messages, example.tools, example.more), [None] * len(messages))


def dialogue_of(row: dict, messages: list[dict], columns: Columns, system: str) -> Example:
    """Return a dialogue with its row's tools and variables, and whether each message is trained on.

    Raises RowError if an assistant turn is empty, or if a field in TRAINED, the tools or the variables are malformed.
    """
    messages = with_system(row, messages, system)
    tools, more = tools_of(row, columns.tools), variables_of(row)
    trained = [_trained(i, message) for i, message in enumerate(messages, 1)]
    for i, message in enumerate(messages, 1):
        if message["role"] == "assistant" and not message.get("tool_calls") and not _has_text(message["content"]):
            raise RowError(f"message {i} (assistant) is empty")
    plain = [{k: v for k, v in message.items() if k not in TRAINED} for message in messages]
    return Example(Dialogue(plain, tools, more), trained)


def earlier(row: dict) -> list[dict]:
    """Return the messages in the column `history`, or an empty list if the row has none.

    Raises RowError if the column contains neither messages nor question-answer pairs.
    """
    found = listed(row.get(HISTORY))
    if not found:
        return []
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        return messages_of(found)
    pairs = [list(each) if isinstance(each, list | tuple) else [] for each in found if isinstance(found, list)]
    if not pairs or not all(len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs):
        raise RowError("its history must be messages, or pairs of a question and its answer")
    turns = [turn for pair in pairs for turn in zip(("user", "assistant"), pair, strict=True)]
    return messages_of([{"role": role, "content": text} for role, text in turns])


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def _shows_image(content: Any) -> bool:
    return isinstance(content, list) and any(part.get("type") == "image" for part in content)


def _has_text(content: Any) -> bool:
    """Return True if a message's content has text, or an image or video in place of it."""
    if isinstance(content, list):
        return any(
            isinstance(part, dict) and (part.get("type") != "text" or str(part.get("text") or "").strip())
            for part in content
        )
    return bool(str(content).strip())


def messages_of(found: Any, images: bool = False) -> list[dict]:
    """Convert messages to the roles that templates use. Raises RowError if a message is malformed.

    images: whether contents may have parts that are images or videos.
    """
    found = listed(found)
    if not isinstance(found, list) or not found:
        raise RowError(f"its messages are {kind_of(found)}, not a list of messages")
    return [_message(i, message, images) for i, message in enumerate(found, 1)]


def _message(i: int, message: Any, images: bool) -> dict:
    if not isinstance(message, dict):
        raise RowError(f"message {i} is {kind_of(message)}, not an object with a role and a content")
    message = {k: v for k, v in message.items() if v is not None}
    given, content = message.get("role", message.get("from")), message.get("content", message.get("value", ""))
    if not isinstance(given, str) or given.lower() not in ROLES:
        raise RowError(f"message {i} has the role {given!r}; known roles are {', '.join(ROLES)}")
    role = ROLES[given.lower()]
    out = {"role": role} | {k: message[k] for k in (*FIELDS, *TRAINED) if k in message}
    if given.lower() == "function_call":
        call = json_of(f"message {i}", content)
        out["tool_calls"] = [
            {"type": "function", "function": each} for each in (call if isinstance(call, list) else [call])
        ]
        content = ""
    if isinstance(calls := out.get("tool_calls"), str):
        out["tool_calls"] = calls = json_of(f"the tool_calls of message {i}", calls) if calls.strip() else []
    if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise RowError(f"the tool_calls of message {i} are {kind_of(calls)}, not a list of calls")
    if not isinstance(content, str | list):
        raise RowError(f"the content of message {i} is {kind_of(content)}, not text")
    # With images, `illustrated` reads the parts.
    if isinstance(content, list) and not images and not all(_is_text(part) for part in content):
        raise RowError(f"message {i} has parts that are not text, which is not supported")
    # An assistant message may consist only of tool calls, and a tool's answer may be empty. All others need text.
    if role not in ("assistant", "tool") and not _has_text(content):
        raise RowError(f"message {i} ({role}) is empty")
    return out | {"content": content}


def _trained(i: int, message: dict) -> bool | None:
    flags = {key: message[key] for key in TRAINED if key in message}
    for key, value in flags.items():
        if value not in (0, 1):
            raise RowError(f"message {i} has {key} {value!r}: it must be 0 or 1")
        if value and message["role"] != "assistant":
            raise RowError(
                f"message {i} ({message['role']}) has {key} {value}: only an assistant's message is trained on"
            )
    if len(set(map(bool, flags.values()))) > 1:
        raise RowError(f"message {i} has {flags}, which disagree")
    return bool(next(iter(flags.values()))) if flags else None
