"""Turns a dataset row into token sequences with a loss mask, or rejects the row with a reason."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from spmdrl.config.supervised import SupervisedDataConfig
from spmdrl.config.template import template_kwargs
from spmdrl.data.chat import encode, template_text
from spmdrl.data.dialogues import Columns, Example, as_dialogue, example_of
from spmdrl.data.placeholders import COLUMN, marks_of
from spmdrl.data.prompt_images import check_marks
from spmdrl.data.rendering import Renderer
from spmdrl.data.row_columns import RowError
from spmdrl.data.shown import LOOKED, UNSHOWN, check_read, unshown
from spmdrl.data.tokens import Masked, masked
from spmdrl.data.turns import trained_sequences
from spmdrl.session.image_reader import ImageReader
from spmdrl.spmd.payload import Payload


@dataclass
class Encoded:
    """The sequences of one row, with notes about them."""

    sequences: list[Masked] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    """Index of each sequence within its row. An empty list stands for 0, 1, ..."""
    notes: Counter = field(default_factory=Counter)
    """Maps names to counts. The names are truncated, dropped, split, departs, unstopped and unanswered (docs/sft.md).
    For the first rows, columns that the chat template does not render (`data.shown.UNSHOWN`) are also counted."""


def expanded(reader: ImageReader, sequence: Masked, shown: list[Payload]) -> Masked:
    """Return a sequence with the placeholder of each image replaced by its tokens, which are never trained.

    shown: the images of the messages in the sequence, in order.

    Raises:
        RowError: the sequence has another number of placeholders than images.
    """
    here = sequence.tokens == reader.vision.image
    found = reader.expand(sequence.tokens, shown)
    mask = sequence.mask[found.origin] & ~here[found.origin]
    images = [(payload, *span) for payload, span in zip(shown, found.spans, strict=True)]
    marks = marks_of([payload for payload, *_ in images], here[found.origin] & (found.ids == reader.vision.image))
    return Masked(found.ids, mask, columns={COLUMN: marks}, images=images)


class Encoder:
    """Encodes rows according to the `--data` settings."""

    def __init__(
        self,
        data: SupervisedDataConfig,
        tokenizer: Any,
        longest: int,
        train_on: str = "assistant",
        images: ImageReader | None = None,
    ):
        """Prepare the chat template and column names.

        longest: maximum number of tokens per sequence. train_on: the value of `--sft.train-on`. images: reads the
        images of rows; None if the model reads text only.

        Raises:
            TemplateError: the chat template does not render user messages.
            ValueError: the template does not use a variable of `--data.template-kwargs`.
        """
        self.data, self.tokenizer, self.longest, self.train_on = data, tokenizer, longest, train_on
        self.images = images
        template = template_text(data.chat_template)
        self.has_template = bool(template or getattr(tokenizer, "chat_template", None))
        self.renderer = Renderer(tokenizer, template, template_kwargs(data))
        check_read(self.renderer, template_kwargs(data))
        self.looked = 0
        """Number of checked rows with tools or template variables. Only the first `LOOKED` such rows are checked."""
        names = data.messages_column, data.prompt_column, data.completion_column, data.text_column, data.tools_column
        self.columns = Columns(*names, data.images_column)

    beside = False

    def __call__(self, row: dict, before: dict | None = None) -> Encoded:
        """Implements `Encode.__call__`."""
        example = example_of(row, self.columns, self.data.system, "" if self.images else "the model")
        return self.encode(example, getattr(row, "folder", ""))

    def encode(self, example: Example, folder: str = "") -> Encoded:
        """Encode an example. folder: folder from which relative paths of its images start.

        Raises:
            RowError: the row cannot be used.
            TemplateError: the template rejects the row, or the tokens of a turn cannot be determined.
        """
        return self.fitted(self.rendered(example, folder))

    def rendered(self, example: Example, folder: str = "") -> Encoded:
        """Encode an example without limiting its length. Arguments and errors as in `encode`."""
        data = self.data
        wanted = data.chat == "on" or (data.chat == "auto" and self.has_template and not example.plain)
        if not example.dialogue and example.prompt and wanted:
            example = as_dialogue(example, data.system)
        if not example.dialogue and example.before:
            raise RowError(
                f"its {example.before[0]['role']} message needs a chat template, and this row is rendered without one: "
                "set --data.chat-template (for example chatml), or leave the column out"
            )
        if not example.dialogue:
            return self._plain(example)
        if not self.has_template:
            raise RowError(
                "it holds messages, and the tokenizer has no chat template that would render them: give one with "
                "--data.chat-template (for example chatml)"
            )
        return self._dialogue(example, folder)

    def _plain(self, example: Example) -> Encoded:
        """Encode text without a chat template, appending the end token if the text does not end with it.

        Prompt tokens are masked out unless `--sft.train-on` is `all`. The first token is always masked out.
        """
        tokenizer, every = self.tokenizer, self.train_on == "all"
        if example.prompt:
            before, _ = encode(tokenizer, example.prompt, chat="off")
            after = list(tokenizer(example.text, add_special_tokens=False).input_ids)
        else:
            before, after = [], encode(tokenizer, example.text, chat="off")[0]
        if not after or after[-1] != tokenizer.eos_token_id:
            after.append(tokenizer.eos_token_id)
        mask = torch.tensor([every or not example.prompt] * len(before) + [True] * len(after))
        mask[:1] = False
        sequence = Masked(torch.tensor(before + after, dtype=torch.int64), mask)
        return Encoded([expanded(self.images, sequence, []) if self.images else sequence])

    def _dialogue(self, example: Example, folder: str) -> Encoded:
        assert example.dialogue
        out, trained = Encoded(), self._trained(example)
        shown = self._shown(example, folder)
        if (example.dialogue.tools or example.dialogue.more) and self.looked < LOOKED:
            self.looked += 1
            out.notes.update(f"{name} {UNSHOWN}" for name in unshown(self.renderer, example.dialogue))
        for sequence in trained_sequences(self.renderer, example.dialogue, trained):
            turns = [turn for turn in sequence.turns if turn.message in trained]
            places = [(turn.start, turn.end) for turn in turns]
            if self.train_on == "all":
                places = [(0, len(sequence.text))] if turns else []
            if places:
                tokens = masked(self.tokenizer, sequence.text, places)
                if self.images:
                    # Marked text may hold messages after the last turn.
                    whole = self.renderer.marked and sequence.text == self.renderer(example.dialogue)
                    last = max(turn.message for turn in sequence.turns)
                    tokens = expanded(self.images, tokens, [image for at, image in shown if whole or at <= last])
                out.sequences.append(tokens)
                out.notes["departs"] += sum(turn.departs for turn in turns)
                out.notes["unstopped"] += sum(not turn.stops for turn in turns)
        if not out.sequences:
            raise RowError("none of its messages is trained: their fields or --sft.train-on leave all of them out")
        out.notes["split"] += len(out.sequences) > 1
        out.notes["unanswered"] += example.dialogue.messages[-1]["role"] != "assistant"
        return out

    def _shown(self, example: Example, folder: str) -> list[tuple[int, Payload]]:
        """Return the images of an example, each with the index of the message that shows it.

        Raises:
            RowError: an image cannot be used, or a message has the text of a placeholder.
        """
        if self.images is None:
            return []
        assert example.dialogue
        check_marks(example.dialogue.messages, self.images.mark)
        places = list[int]()
        for i, message in enumerate(example.dialogue.messages):
            parts = message["content"] if isinstance(message["content"], list) else []
            places += [i for part in parts if part.get("type") == "image"]
        return list(zip(places, self.images.read(example.images, folder), strict=True))

    def _trained(self, example: Example) -> set[int]:
        """Return the indices of the messages that are trained.

        If a message has its own field that turns training on or off, the field overrides `--sft.train-on`.
        """
        assert example.dialogue
        turns = [i for i, message in enumerate(example.dialogue.messages) if message["role"] == "assistant"]
        own = {i: example.trained[i] for i in turns}
        return {i for i in turns if own[i] or (own[i] is None and (self.train_on != "last" or i == turns[-1]))}

    def fitted(self, out: Encoded) -> Encoded:
        """Truncate or drop overlong sequences, depending on `--data.too-long`.

        Raises:
            RowError: no trained token of the row is left after truncation.
        """
        longest, kept = self.longest, []
        for sequence in out.sequences:
            if len(sequence) > longest:
                truncates = self.data.too_long == "truncate"
                out.notes["truncated" if truncates else "dropped"] += 1
                if not truncates:
                    continue
                sequence = sequence.first(longest)
            if bool(sequence.mask.any()):
                kept.append(sequence)
        if not kept and not out.notes["dropped"]:
            raise RowError(f"none of its trained tokens is within the first {longest} tokens (--data.max-tokens)")
        out.sequences = kept
        return out
