"""Reads, formats and tokenizes the prompts of a run, and drops those that are too long.

Two row layouts are supported. Plain rows have a prompt column and an answer column, chosen by name. Rows in verl's
layout have the columns `data_source, prompt (chat messages), ability, reward_model {ground_truth, style}, extra_info`;
this layout is recognized by its columns in any file format. Some other columns (`prompt_columns.py`) hold a system
message, earlier exchanges, tools, and chat template variables; the rest are passed to reward functions.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from spmdrl.config.environment import COLUMN
from spmdrl.config.schema import DataConfig
from spmdrl.config.template import template_kwargs
from spmdrl.data.chat import as_messages, encode, template_text
from spmdrl.data.images import OTHER, has_items
from spmdrl.data.prompt_columns import (
    around_prompt,
    column_names,
    left_lines,
    rendered_columns,
    with_columns,
    with_values,
)
from spmdrl.data.prompt_images import PromptImage, Reader, expanded, unplaced, with_places
from spmdrl.data.prompt_values import column_of, content_of, is_json, json_able, verl_columns, words_of
from spmdrl.data.rendering import Dialogue, Renderer, TemplateError
from spmdrl.data.row_columns import EMPTY, Row, RowError, check_text, tools_of, variables_of
from spmdrl.data.shown import LOOKED, check_read, unshown, unshown_line
from spmdrl.data.sources import Source, read_source

log = logging.getLogger("spmdrl")

NAMED = 3
"""Maximum number of refused rows that a message names; the log names all."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for the engine."""

    index: int
    """Index of the prompt's row in the source; it keys all random draws for the prompt."""
    tokens: list[int]
    """Tokens of the prompt. Placeholders of images are expanded."""
    ground_truth: object
    """Value that the reward function compares responses with (JSON-able)."""
    data_source: str
    extra: dict
    """verl's extra_info, or the row's other columns (JSON-able)."""
    text: str
    """Text for logs: the text that the model sees, or the row's prompt text if an environment starts the episode."""
    content: str | list = ""
    """The prompt before the chat template: text, or chat messages (JSON-able)."""
    reply: str = ""
    """Beginning of the reply (`--data.prefill`), which ends the prompt."""
    chat: bool = False
    """True if a chat template rendered the prompt."""
    tools: list | None = None
    """JSON schemas of the row's tools."""
    more: dict = field(default_factory=dict)
    """The row's chat template variables, which override those of the run."""
    images: tuple[PromptImage, ...] = ()
    """Images of the prompt, in the order of their places."""
    opening: list | None = None
    """Messages with which an environment starts an episode: first messages from other columns (a system message,
    earlier exchanges), then those of the prompt. None if no other column contains messages."""


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one source, without those that are too long."""

    prompts: list[Prompt]
    dropped: int
    """Number of rows dropped because their prompt exceeds `--rollout.max-prompt-tokens`."""
    source: str
    beside: tuple[str, ...] = ()
    """Columns that only reward functions and environments can read."""
    unread: tuple[str, ...] = ()
    """Columns that neither prompts nor reward functions nor environments can read."""
    left: tuple[str, ...] = ()
    """Sentences about columns kept out of prompts, tools and variables that are not shown, and omitted rows."""
    place: Callable[[int], str] = str
    """Function that describes the location of the row at an index, for error messages."""

    def __len__(self) -> int:
        return len(self.prompts)

    def digest(self) -> str:
        """Hash indices, ground truths, and tokens (or else content and extra columns), to compare ranks."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        h = hashlib.sha256()
        for p in self.prompts:
            read = p.tokens or [p.content, p.extra]
            shown = [[image.name for image in p.images]] if p.images else []
            h.update(json.dumps([p.index, read, p.ground_truth, *shown]).encode())
        return h.hexdigest()


def load_prompts(
    spec: str,
    data: DataConfig,
    tokenizer,
    max_prompt_tokens: int,
    limit: int = 0,
    begun: bool = False,
    teacher: bool = False,
    images: Reader | None = None,
) -> PromptSet:
    """Read at most `limit` rows (0 for all) of a source (see `sources.FORMS`) and encode its prompts.

    begun: True if an environment starts the episodes; prompts are then not encoded, and may be empty. teacher: True if
    the template is a teacher's, which need not read the run's variables. images: reads the images of rows; None if the
    model reads text only, and rows with images are then refused.

    Prompts keep their source indices when long prompts are dropped. Raises ValueError, which names the flag to change,
    if the source or a column does not exist, if a row cannot be read, or if all prompts are too long.
    """
    source = read_source(spec, data.prompt_column, data.answer_column, limit)
    if not source.rows:
        raise ValueError(f"{spec!r} holds no rows (--data.train, --data.eval)")
    # Environments start with messages even if the rows are plain text.
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
    reader = _Reader(source, data, tokenizer, begun, images)
    if reader.renderer and not teacher:
        check_read(reader.renderer, reader.renderer.more)
    found = [prompt for prompt in map(reader.read, range(len(source.rows))) if prompt]
    for line in reader.refused:
        log.info("refused: %s", line)
    if len(reader.refused) > data.max_refused * len(source.rows):
        raise ValueError(
            f"{'; '.join(reader.refused[:NAMED])} (refused rows: {len(reader.refused)} of {len(source.rows)}; "
            f"--data.max-refused {data.max_refused:g} bounds their share)"
        )
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
    """Converts the rows of one source to prompts, and collects notes about them."""

    def __init__(self, source: Source, data: DataConfig, tokenizer, begun: bool, images: Reader | None = None):
        self.source, self.data, self.tokenizer, self.begun, self.images = source, data, tokenizer, begun, images
        self.verl = {"prompt", "reward_model"} <= source.rows[0].keys()
        self.chat = data.chat != "off" and bool(data.chat_template or getattr(tokenizer, "chat_template", None))
        self.variables = template_kwargs(data)
        self.renderer: Renderer | None = None
        if self.chat:
            # `Renderer` rejects templates that cannot render a single user message. Without a renderer, tools and
            # variables are not checked.
            with suppress(TemplateError):
                self.renderer = Renderer(tokenizer, data.chat_template, self.variables)
        inserted = {*column_names(data.template), *column_names(data.prefill)}
        self.named = {data.prompt_column, data.answer_column, "data_source", *inserted}
        """Columns that settings refer to, such as the prompt column, and `data_source`."""
        self.over: dict[str, None] = {}
        """Non-empty columns that neither settings nor prompts use; the dict serves as an ordered set."""
        self.left: list[dict[str, str]] = []
        """One dict per prompt; it maps columns that a template could read to the reasons why the prompt omits them."""
        self.refused: list[str] = []
        self.hidden: list[str] = []
        self.looked = 0

    def read(self, index: int) -> Prompt | None:
        """Return a row's prompt, or None if its images cannot be used or no tokenizer can encode it.

        Raises ValueError, which names the row.
        """
        row, place = self.source.rows[index], self.source.where(index)
        try:
            check_text(row)
            # An environment may show them in its own way.
            if not self.begun and not self.images and has_items(row, self.data.images_column, text_only=True):
                raise RowError(
                    "it has images or videos, and the model reads text only: leave the column or the row out, or take "
                    "a model that reads images (docs/vision.md)"
                )
            prompt = self._prompt(index, row)
        except RowError as e:
            self.refused.append(f"{place}: {e}")
            return None
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
            content, truth, extra = verl_columns(row)
            read |= {"prompt", "reward_model", "extra_info"}
            if self.begun and row.get(COLUMN) is not None:
                extra = {**extra, COLUMN: row[COLUMN]}
        else:
            content = column_of(row, data.prompt_column, "--data.prompt-column")
            truth = column_of(row, data.answer_column, "--data.answer-column") if data.answer_column else None
            extra = {k: v for k, v in row.items() if k not in (data.prompt_column, data.answer_column, "data_source")}
        content = content_of(content)
        if data.template:
            content = around_prompt(content, row, data.template)
        prefill = with_values("--data.prefill", data.prefill, {**row, "prompt": content}) if data.prefill else ""
        more, tools, opening, images = variables_of(shown), None, None, ()
        whole = with_columns(content, shown)
        placed, sources = self._placed(row, whole)
        if self.begun:
            if sources and self.images:
                # The prompt's own messages stand at the end of all messages.
                whole, content = placed, placed[-len(as_messages(content)) :]
                images = unplaced(self.images, sources, self.source.folder)
                read |= {data.images_column, OTHER}
            opening = whole if isinstance(whole, list) and whole != content else None
            tokens, text = [], content if isinstance(content, str) else ""
            if isinstance(content, list) and content:
                text = words_of(content[-1].get("content", ""))
        else:
            content, tools = placed, tools_of(shown)
            how = {"prefill": prefill, "chat": data.chat, "chat_template": data.chat_template, "system": data.system}
            tokens, text = encode(self.tokenizer, content, tools=tools, more=self.variables | more, **how)
            if not tokens:
                raise ValueError("the prompt is empty: an engine needs at least one token")
            if self.images:
                read |= {data.images_column, *([OTHER] if sources else [])}
                tokens, images = expanded(self.images, tokens, sources, self.source.folder)
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
            extra={str(k): v for k, v in ((k, json_able(v)) for k, v in extra.items()) if is_json(v)},
            text=text,
            content=content if is_json(content) else "",
            reply=prefill,
            chat=self.chat,
            tools=tools,
            more=more,
            images=images,
            opening=opening,
        )

    def _placed(self, row: dict, whole: str | list) -> tuple[Any, list[Any]]:
        """Return a row's prompt with places for its images, and the images as the row holds them."""
        if not self.images:
            return whole, []
        column, messages = self.data.images_column, as_messages(whole)
        # Rows of agents may name a container's image, and their texts may contain marks that stand for no image.
        parts = any(isinstance(m.get("content"), list) for m in messages)
        if self.begun and not parts and not has_items(row, column, text_only=True):
            return whole, []
        placed, sources = with_places(row, messages, column, self.images.mark)
        return (placed, sources) if sources else (whole, [])


def refused_line(refused: list[str]) -> str:
    """Return a sentence about omitted rows that names the first one, or an empty string if there are none."""
    more = " (the log names all)" if len(refused) > 1 else ""
    return f"rows that are refused and left out: {len(refused)}{more}; the first is {refused[0]}" if refused else ""
