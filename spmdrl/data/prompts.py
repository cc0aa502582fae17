"""Reads the prompts of a run, formats and tokenizes them, and drops those that are too long.

Two layouts of rows are supported. Plain: a prompt column and an answer column, by name. verl's: `data_source, prompt
(chat messages), ability, reward_model {ground_truth, style}, extra_info`, recognized by its columns in any file format.
Further columns (`prompt_columns.py`) give a system message, earlier exchanges, tools, and variables of the chat
template; other columns go to reward functions.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from spmdrl.config.environment import COLUMN
from spmdrl.config.schema import DataConfig
from spmdrl.config.supervised import SupervisedDataConfig
from spmdrl.config.template import template_kwargs
from spmdrl.data.chat import as_messages, encode, template_text
from spmdrl.data.prompt_columns import (
    around_prompt,
    column_names,
    left_lines,
    rendered_columns,
    with_columns,
    with_values,
)
from spmdrl.data.rendering import Dialogue, Renderer, TemplateError
from spmdrl.data.row_columns import EMPTY, Row, RowError, check_text, listed, tools_of, variables_of
from spmdrl.data.shown import LOOKED, check_read, unshown, unshown_line
from spmdrl.data.sources import Source, read_source

REFUSED = SupervisedDataConfig.max_refused
"""Largest share of rows that may be left out because tokenizers cannot encode their text; the default of SFT."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for the engine."""

    index: int
    """Index of its row in the source; all random draws for the prompt are keyed by it."""
    tokens: list[int]
    ground_truth: object
    """The value with which the reward compares a response (JSON-able)."""
    data_source: str
    extra: dict
    """verl's extra_info, or the row's other columns (JSON-able)."""
    text: str
    """The text that the model sees, for logs; if an environment begins the episode, the text of the row's prompt."""
    content: str | list = ""
    """The prompt before the chat template: text, or chat messages (JSON-able)."""
    reply: str = ""
    """Beginning of the reply, with which the prompt ends (`--data.prefill`)."""
    chat: bool = False
    """True if a chat template rendered the prompt."""
    tools: list | None = None
    """JSON schemas of the tools from the prompt's row."""
    more: dict = field(default_factory=dict)
    """Variables of the chat template from the prompt's row, which override those of the run."""
    opening: list | None = None
    """Messages with which an environment begins an episode: those of other columns (a system message, earlier
    exchanges), then those of the prompt. None if no other column gives messages."""


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
    """Columns that neither prompts nor reward functions nor environments can read."""
    left: tuple[str, ...] = ()
    """Sentences about columns that stayed out of prompts, tools and variables that are not shown, and omitted rows."""
    place: Callable[[int], str] = str
    """Function that describes the place of the row with a given index, for error messages."""

    def __len__(self) -> int:
        return len(self.prompts)

    def digest(self) -> str:
        """Return a hash of indices, tokens (or else content and extra columns) and ground truths, to compare ranks."""
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

    begun: True if an environment begins the episodes; prompts are then not encoded, and may be empty. teacher: True if
    the template is a teacher's, which need not read the variables of the run.

    Indices remain those of the source if long prompts are dropped. Raises ValueError, which names the flag to change,
    if the source or a column does not exist, if a row cannot be read, or if no prompt is short enough.
    """
    source = read_source(spec, data.prompt_column, data.answer_column, limit)
    if not source.rows:
        raise ValueError(f"{spec!r} holds no rows (--data.train, --data.eval)")
    # An environment begins with messages, even if its rows are plain text.
    raw = source.raw and not begun
    if raw and data.chat_template:
        raise ValueError(
            f"--data.chat-template {data.chat_template[:40]!r}: the prompts of {spec} are plain text, which no "
            "template renders; leave the flag out"
        )
    data = replace(
        data,
        prompt_column=source.prompt_column,
        answer_column=source.answer_column if data.answer_column else "",
        chat="off" if raw else data.chat,
        chat_template=template_text(data.chat_template),
    )
    reader = _Reader(source, data, tokenizer, begun)
    if reader.renderer and not teacher:
        check_read(reader.renderer, reader.renderer.more)
    found = [prompt for prompt in map(reader.read, range(len(source.rows))) if prompt]
    if len(reader.refused) > REFUSED * len(source.rows):
        raise ValueError(reader.refused[0])
    prompts = [prompt for prompt in found if len(prompt.tokens) <= max_prompt_tokens]
    if not prompts:
        shortest = min((len(prompt.tokens) for prompt in found), default=0)
        raise ValueError(
            f"{spec!r}: every prompt is longer than {max_prompt_tokens} tokens (prompts: {len(found)}; the shortest "
            f"has {shortest}): raise --rollout.max-prompt-tokens"
        )
    over = () if spec.partition(":")[0] in ("builtin", "reasoning-gym") else tuple(reader.over)
    beside, unread = ((), over) if reader.verl else (over, ())
    lines = (*left_lines(reader.left), *filter(None, [unshown_line(reader.hidden), refused_line(reader.refused)]))
    return PromptSet(prompts, len(found) - len(prompts), spec, beside, unread, lines, source.where)


class _Reader:
    """Turns the rows of one source into prompts, and collects notes on them."""

    def __init__(self, source: Source, data: DataConfig, tokenizer, begun: bool):
        self.source, self.data, self.tokenizer, self.begun = source, data, tokenizer, begun
        self.verl = {"prompt", "reward_model"} <= source.rows[0].keys()
        self.chat = data.chat != "off" and bool(data.chat_template or getattr(tokenizer, "chat_template", None))
        self.variables = template_kwargs(data)
        self.renderer: Renderer | None = None
        if self.chat:
            # `Renderer` refuses a template that cannot render a single message of a user. Without a renderer, the
            # checks of tools and variables are skipped.
            with suppress(TemplateError):
                self.renderer = Renderer(tokenizer, data.chat_template, self.variables)
        inserted = {*column_names(data.template), *column_names(data.prefill)}
        self.named = {data.prompt_column, data.answer_column, "data_source", *inserted}
        """Names of columns that settings refer to, such as the prompt column, and `data_source`."""
        self.over: dict[str, None] = {}
        """Names of columns with values that neither settings nor prompts use; a dict serves as an ordered set."""
        self.left: list[dict[str, str]] = []
        """For each prompt: column that a template could read -> reason why it stayed out of the prompt."""
        self.refused: list[str] = []
        self.hidden: list[str] = []
        self.looked = 0

    def read(self, index: int) -> Prompt | None:
        """Return the prompt of a row; None if tokenizers cannot encode it. Raises ValueError, which names the row."""
        row, place = self.source.rows[index], self.source.where(index)
        try:
            check_text(row)
        except RowError as e:
            self.refused.append(f"{place}: {e}")
            return None
        try:
            prompt = self._prompt(index, row)
        except ValueError as e:
            raise ValueError(f"{place}: {e}") from e
        if self.renderer and not self.begun and (prompt.tools or prompt.more) and self.looked < LOOKED:
            self.looked += 1
            self.hidden += unshown(self.renderer, Dialogue(as_messages(prompt.content), prompt.tools, prompt.more))
        return prompt

    def _prompt(self, index: int, row: dict) -> Prompt:
        data, read = self.data, set(self.named)
        shown, left = rendered_columns(Row(row), self.named, self.chat or self.begun, self.begun)
        if self.verl:
            content, truth, extra = _verl_columns(row)
            read |= {"prompt", "reward_model", "extra_info"}
            if self.begun and row.get(COLUMN) is not None:
                extra = {**extra, COLUMN: row[COLUMN]}
        else:
            content = _column(row, data.prompt_column, "--data.prompt-column")
            truth = _column(row, data.answer_column, "--data.answer-column") if data.answer_column else None
            extra = {k: v for k, v in row.items() if k not in (data.prompt_column, data.answer_column, "data_source")}
        content = _content(content)
        if data.template:
            content = around_prompt(content, row, data.template)
        prefill = with_values("--data.prefill", data.prefill, {**row, "prompt": content}) if data.prefill else ""
        more, tools, opening = variables_of(shown), None, None
        whole = with_columns(content, shown)
        if self.begun:
            opening = whole if isinstance(whole, list) and whole != content else None
            tokens, text = [], content if isinstance(content, str) else ""
            if isinstance(content, list) and content:
                text = str(content[-1].get("content", ""))
        else:
            content, tools = whole, tools_of(shown)
            how = {"prefill": prefill, "chat": data.chat, "chat_template": data.chat_template, "system": data.system}
            tokens, text = encode(self.tokenizer, content, tools=tools, more=self.variables | more, **how)
            if not tokens:
                raise ValueError("the prompt is empty: an engine needs at least one token")
        try:
            json.dumps(truth := json_able(truth))
        except TypeError as e:
            raise ValueError(f"the ground truth cannot be written as JSON ({e}): change --data.answer-column") from e
        read |= shown.read - left.keys()
        self.over |= {str(k): None for k, v in row.items() if k not in read and v is not None and v not in EMPTY}
        self.left.append(left)
        return Prompt(
            index=index,
            tokens=tokens,
            ground_truth=truth,
            data_source=str(row.get("data_source") or self.source.name),
            extra={str(k): v for k, v in ((k, json_able(v)) for k, v in extra.items()) if _is_json(v)},
            text=text,
            content=content if _is_json(content) else "",
            reply=prefill,
            chat=self.chat,
            tools=tools,
            more=more,
            opening=opening,
        )


def refused_line(refused: list[str]) -> str:
    """Return a sentence about rows that are left out, with the place of the first one; empty if there are none."""
    return f"rows that are refused and left out: {len(refused)}; the first is {refused[0]}" if refused else ""


def _content(prompt: object) -> str | list:
    """Return the prompt of a row: text, or messages without the keys that a table filled with None."""
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
        raise ValueError(f"verl's schema needs reward_model with a ground_truth; this row has {str(reward_model)[:80]}")
    return _column(row, "prompt", "the file"), reward_model["ground_truth"], row.get("extra_info") or {}


def _column(row: dict, name: str, flag: str) -> object:
    if name not in row:
        raise ValueError(f"no column {name!r}; there are {', '.join(map(str, row))}: change {flag}")
    return row[name]


def json_able(value: object) -> object:
    """Convert a value to JSON's types: tuples and arrays to lists, and keys, exact numbers and dates to text.

    Values without a JSON form (bytes) are returned unchanged.
    """
    if isinstance(value, dict):
        return {str(k): json_able(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_able(v) for v in value]
    if hasattr(value, "tolist"):  # among the values of a table, only numpy's have this method
        return value.tolist()  # type: ignore[attr-defined]
    if type(value).__module__ in ("datetime", "decimal", "fractions"):
        return str(value)
    return value


def _is_json(value: object) -> bool:
    """Return True if a value can be written as JSON. Other values of extra columns (such as images) are dropped."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
