"""Reads the prompts of a run, formats them, turns them into tokens, and drops those that are too long.

Two layouts of rows are supported. Plain: a prompt column and an answer column, by name. verl's: `data_source, prompt
(chat messages), ability, reward_model {ground_truth, style}, extra_info`, recognized by its columns in any container.
Columns beside these (`prompt_columns.py`) give a message of the system, earlier exchanges, tools, and variables of the
chat template; what is left goes to reward functions.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from spmdrl.config.environment import COLUMN
from spmdrl.config.schema import DataConfig
from spmdrl.config.supervised import SupervisedDataConfig
from spmdrl.config.template import template_kwargs
from spmdrl.data.chat import encode, template_text
from spmdrl.data.dialogues import listed
from spmdrl.data.prompt_columns import left_lines, rendered_columns, with_columns
from spmdrl.data.prompt_text import around_prompt, column_names, with_values
from spmdrl.data.rendering import Dialogue
from spmdrl.data.row_columns import Row, RowError, check_text, tools_of, variables_of
from spmdrl.data.sources import Source, read_source
from spmdrl.data.unshown import LOOKED, check_read, renderer_of, unshown, unshown_line

REFUSED = SupervisedDataConfig.max_refused
"""Largest share of rows that may be left out because no tokenizer takes their text; the same limit as in SFT."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for the engine."""

    index: int
    """Position in its source: the key of every draw made for it."""
    tokens: list[int]
    ground_truth: object
    """The value with which the reward compares a response (JSON-able)."""
    data_source: str
    extra: dict
    """verl's extra_info, or the row's other columns (JSON-able)."""
    text: str
    """The text that the model sees, for logs."""
    content: str | list = ""
    """The prompt before the chat template: text, or chat messages (JSON-able)."""
    reply: str = ""
    """The start of the reply, with which the prompt ends (`--data.prefill`)."""
    chat: bool = False
    """True if a chat template rendered it."""
    tools: list | None = None
    """JSON schemas that its row gives."""
    more: dict = field(default_factory=dict)
    """Variables of the chat template: those of its row over those of the run."""
    opening: list | None = None
    """Messages with which an environment begins an episode: those of other columns (a system message, earlier
    exchanges), then the prompt's; None if no column gives any."""


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one source that are short enough."""

    prompts: list[Prompt]
    dropped: int
    """Rows left out because their prompt is longer than `--rollout.max-prompt-tokens`."""
    source: str
    beside: tuple[str, ...] = ()
    """Columns that only reward functions and environments can read."""
    unread: tuple[str, ...] = ()
    """Columns that nothing can read."""
    left: tuple[str, ...] = ()
    """Sentences on columns that stayed out of prompts though a chat template would read them, and on rows left out."""
    place: Callable[[int], str] = str
    """The place of a row, by its index, for messages."""

    def __len__(self) -> int:
        return len(self.prompts)

    def digest(self) -> str:
        """Return a hash of indices, tokens and truths: equal on two ranks if they read the same prompts."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        h = hashlib.sha256()
        for p in self.prompts:
            read = p.tokens or [p.content, p.extra]
            h.update(json.dumps([p.index, read, p.ground_truth]).encode())
        return h.hexdigest()


def load_prompts(
    spec: str,
    data: DataConfig,
    tokenizer,
    max_prompt_tokens: int,
    limit: int = 0,
    begun: bool = False,
    teacher: bool = False,
) -> PromptSet:
    """Read a source (forms: `sources.FORMS`), at most `limit` rows of it (0: all), and encode its prompts.

    begun: an environment begins the episodes: prompts are not encoded, and may be empty. teacher: the template is
    a teacher's, which need not read the variables of the run.

    Indices stay those of the source when long prompts are dropped. Raises ValueError naming the flag to change: no such
    source or column, nothing in it, a row that cannot be read (with its place), nothing short enough.
    """
    source = read_source(spec, data.prompt_column, data.answer_column, limit)
    if not source.rows:
        raise ValueError(f"{spec!r} holds no rows (--data.train, --data.eval)")
    # An environment speaks in messages, whatever its rows are.
    raw = source.raw and not begun
    if raw and data.chat_template:
        raise ValueError(
            f"--data.chat-template {data.chat_template[:40]!r}: the prompts of {spec} are plain text without a chat, "
            "so nothing would read it; leave it out"
        )
    data = replace(
        data,
        prompt_column=source.prompt_column,
        answer_column=source.answer_column if data.answer_column else "",
        chat="off" if raw else data.chat,
        chat_template=template_text(data.chat_template),
    )
    shows = _renders(data, tokenizer)
    render = renderer_of(tokenizer, data.chat_template, template_kwargs(data)) if shows else None
    if render and not teacher:
        check_read(render, render.more)
    verl = {"prompt", "reward_model"} <= source.rows[0].keys()
    prompts, shortest, over = [], 0, dict[str, None]()
    left, looked, hidden, refused = list[dict[str, str]](), 0, list[str](), list[str]()
    for index, row in enumerate(source.rows):
        try:
            check_text(row)
        except RowError as e:
            refused.append(f"{source.where(index)}: {e}")
            continue
        try:
            prompt, more, without = _from_row(index, row, data, tokenizer, source, verl, begun)
        except ValueError as e:
            raise ValueError(f"{source.where(index)}: {e}") from e
        over |= dict.fromkeys(more)
        left.append(without)
        if render and not begun and (prompt.tools or prompt.more) and looked < LOOKED:
            looked += 1
            messages = (
                prompt.content if isinstance(prompt.content, list) else [{"role": "user", "content": prompt.content}]
            )
            hidden += unshown(render, Dialogue(messages, prompt.tools, prompt.more))
        n = len(prompt.tokens)
        shortest = min(shortest or n, n)
        if n <= max_prompt_tokens:
            prompts.append(prompt)
    if len(refused) > REFUSED * len(source.rows):
        raise ValueError(refused[0])
    if not prompts:
        raise ValueError(
            f"{spec!r}: every one of {len(source.rows)} prompts is longer than {max_prompt_tokens} tokens (the "
            f"shortest has {shortest}): raise --rollout.max-prompt-tokens"
        )
    made = spec.partition(":")[0] in ("builtin", "reasoning-gym")
    beside, unread = ((), tuple(over)) if verl else (tuple(over), ())
    columns = ((), ()) if made else (beside, unread)
    lines = (*left_lines(left), *filter(None, [unshown_line(hidden), refused_line(refused)]))
    return PromptSet(prompts, len(source.rows) - len(prompts) - len(refused), spec, *columns, lines, source.where)


def _from_row(
    index: int, row: dict, data: DataConfig, tokenizer, source: Source, verl: bool, begun: bool
) -> tuple[Prompt, list[str], dict[str, str]]:
    """Return the prompt of a row, the columns that it was made without, and those that its template might have read."""
    read = {
        data.prompt_column,
        data.answer_column,
        "data_source",
        *column_names(data.template),
        *column_names(data.prefill),
    }
    chat = _renders(data, tokenizer)
    shown, left = rendered_columns(Row(row), read, chat or begun, begun)
    if verl:
        prompt, truth, extra = _verl_columns(row)
        read |= {"prompt", "reward_model", "extra_info"}
        if begun and row.get(COLUMN) is not None:
            extra = {**extra, COLUMN: row[COLUMN]}
    else:
        prompt = _column(row, data.prompt_column, "--data.prompt-column")
        truth = _column(row, data.answer_column, "--data.answer-column") if data.answer_column else None
        extra = {k: v for k, v in row.items() if k not in (data.prompt_column, data.answer_column, "data_source")}
    prompt = _content(prompt)
    if data.template:
        prompt = around_prompt(prompt, row, data.template)
    prefill = with_values("--data.prefill", data.prefill, {**row, "prompt": prompt}) if data.prefill else ""
    more, tools = variables_of(shown), None
    opening = None
    if begun:
        whole = with_columns(prompt, shown)
        opening = whole if isinstance(whole, list) and whole != prompt else None
        tokens, text = [], prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")) if prompt else ""
    else:
        prompt, tools = with_columns(prompt, shown), tools_of(shown)
        how = {"prefill": prefill, "chat": data.chat, "chat_template": data.chat_template}
        own = template_kwargs(data) | more
        tokens, text = encode(tokenizer, prompt, system=data.system, tools=tools, more=own, **how)
    if not tokens and not begun:
        raise ValueError("the prompt is empty: an engine needs at least one token")
    try:
        json.dumps(truth := json_able(truth))
    except TypeError as e:
        raise ValueError(f"the ground truth cannot be written as JSON ({e}): change --data.answer-column") from e
    read |= shown.read - left.keys()
    made = Prompt(
        index=index,
        tokens=tokens,
        ground_truth=truth,
        data_source=str(row.get("data_source") or source.name),
        extra={str(k): v for k, v in ((k, json_able(v)) for k, v in extra.items()) if _is_json(v)},
        text=text,
        content=prompt if _is_json(prompt) else "",
        reply=prefill,
        chat=chat,
        tools=tools,
        more=more,
        opening=opening,
    )
    return made, [str(k) for k, v in row.items() if k not in read and v is not None and v not in ("", [], {})], left


def refused_line(refused: list[str]) -> str:
    """Return a sentence about rows that are left out, with the first one's place; empty where there are none."""
    return f"rows that are refused and left out: {len(refused)}, the first {refused[0]}" if refused else ""


def _renders(data: DataConfig, tokenizer) -> bool:
    """Return True if a chat template renders the prompts."""
    return data.chat != "off" and bool(data.chat_template or getattr(tokenizer, "chat_template", None))


def _content(prompt: object) -> str | list:
    """Return the prompt of a row: text, or messages without the keys that a table fills with None."""
    prompt = listed(prompt)
    if isinstance(prompt, list):
        if not all(isinstance(m, dict) for m in prompt):
            raise ValueError(f"the prompt is a list, but not of chat messages: {str(prompt)[:80]}")
        return [{k: v for k, v in m.items() if v is not None} for m in prompt]
    if not isinstance(prompt, str):
        raise ValueError(f"the prompt is {type(prompt).__name__}, not text or messages: change --data.prompt-column")
    return prompt


def _verl_columns(row: dict) -> tuple[object, object, dict]:
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise ValueError(f"verl's schema wants reward_model with a ground_truth, this row has {str(reward_model)[:80]}")
    return _column(row, "prompt", "the file"), reward_model["ground_truth"], row.get("extra_info") or {}


def _column(row: dict, name: str, flag: str) -> object:
    if name not in row:
        raise ValueError(f"no column {name!r}; there are {', '.join(map(str, row))}: change {flag}")
    return row[name]


def json_able(value: object) -> object:
    """Convert a value to JSON's types: tuples and arrays become lists, keys text, exact numbers and dates text.

    Values without such a form (bytes) are returned unchanged.
    """
    if isinstance(value, dict):
        return {str(k): json_able(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_able(v) for v in value]
    if hasattr(value, "tolist"):  # numpy, and nothing else that a table holds
        return value.tolist()  # type: ignore[attr-defined]
    if type(value).__module__ in ("datetime", "decimal", "fractions"):
        return str(value)
    return value


def _is_json(value: object) -> bool:
    """Return True if a value can be written as JSON; extras that cannot (images, say) are dropped."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
