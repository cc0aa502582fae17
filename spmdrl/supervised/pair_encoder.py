"""Turns a preference row into a sequence per side (chosen, rejected), or rejects the row with a reason."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from spmdrl.config.preference import PreferenceDataConfig
from spmdrl.data.batch import Batch
from spmdrl.data.dialogues import Example, as_dialogue
from spmdrl.data.preferences import CHOSEN, REJECTED, SIDES, Preference, PreferenceColumns, preference_of
from spmdrl.data.rendering import Dialogue, TemplateError
from spmdrl.data.row_columns import RowError
from spmdrl.data.tree import prompt_lengths
from spmdrl.policy.objectives.pairs import MISMATCHED
from spmdrl.session.image_reader import ImageReader
from spmdrl.supervised.encoder import Encoded, Encoder
from spmdrl.supervised.rows import Placed, pack


class PairEncoder:
    """Encodes rows according to the `--data` settings. Each sequence is one side of a pair or one labelled response."""

    def __init__(
        self,
        data: PreferenceDataConfig,
        tokenizer: Any,
        longest: int,
        pairs: bool,
        beside: bool = False,
        images: ImageReader | None = None,
    ):
        """Read the settings.

        pairs: whether rows must be pairs. Otherwise each side is a labelled response, and a row may have just one.
        beside: whether to add sequences that combine this row's prompt with the previous row's responses. These
        sequences are not trained on; KTO uses them to estimate the KL. images: reads the images of rows; None if the
        model reads text only.

        Raises:
            TemplateError: the chat template does not render user messages.
        """
        self.encoder, self.system = Encoder(data, tokenizer, longest, images=images), data.system
        self.pairs, self.beside = pairs, beside
        self.columns = PreferenceColumns(
            prompt=data.prompt_column,
            completion=data.completion_column,
            tools=data.tools_column,
            images=data.images_column,
            chosen=data.chosen_column,
            rejected=data.rejected_column,
            label=data.label_column,
            margin=getattr(data, "margin_column", ""),
        )

    def __call__(self, row: dict, before: dict | None = None) -> Encoded:
        """Implements `Encode.__call__`."""
        found, folder = self._read(row), getattr(row, "folder", "")
        if self.pairs and len(found.sides) < 2:
            raise RowError("it holds one labelled response, and this loss needs pairs: give pairs, or use kto or bco")
        out = Encoded(samples=list(found.sides))
        for side, example in found.sides.items():
            one = self._side(SIDES[side], example, folder)
            out.notes += one.notes
            out.sequences += one.sequences
        if len(out.sequences) < len(found.sides):
            # A side was dropped for being too long, so the whole row is dropped.
            return Encoded(notes=out.notes)
        if len(out.sequences) == 2 and torch.equal(out.sequences[CHOSEN].tokens, out.sequences[REJECTED].tokens):
            within = f" up to token {self.encoder.longest} (--data.max-tokens)" if out.notes["truncated"] else ""
            raise RowError(f"its chosen and rejected sides have the same tokens{within}")
        if found.margin is not None:
            for sequence in out.sequences:
                sequence.numbers["margin"] = found.margin
        for example in self._mismatched(found, before) if before else []:
            with suppress(ValueError):  # examples that cannot be encoded are omitted from the estimate
                out.sequences += self.encoder.encode(example, folder).sequences[:1]
        more = len(out.sequences) - len(out.samples)
        out.samples += range(MISMATCHED, MISMATCHED + more)
        return out

    def _read(self, row: dict) -> Preference:
        return preference_of(row, self.columns, self.system, "" if self.encoder.images else "the model")

    def _mismatched(self, found: Preference, before: dict) -> list[Example]:
        """Return examples that combine this row's prompt with each response of another row."""
        try:
            others = self._read(before).sides.values()
        except RowError:
            return []
        out = []
        for other in others:
            with suppress(RowError):
                out.append(answered(next(iter(found.sides.values())), other, self.system))
        return out

    def _side(self, side: str, example: Example, folder: str) -> Encoded:
        try:
            out = self.encoder.encode(example, folder)
        except (RowError, TemplateError) as e:
            raise RowError(f"its {side} side: {e}") from e
        if len(out.sequences) > 1:
            raise RowError(
                f"its {side} side: the chat template rewrites earlier turns, so its turns do not fit into one "
                "sequence; give rows whose response is one turn"
            )
        return out


def answered(prompt: Example, response: Example, system: str = "") -> Example:
    """Return an example with the prompt of one example and the response of another.

    system: system message for examples that are not dialogues yet, as in `as_dialogue`.

    Raises:
        RowError: one of the examples has no response.
    """
    if not prompt.dialogue and not response.dialogue:
        return replace(prompt, text=response.text, plain=False)
    prompt, response = (each if each.dialogue else as_dialogue(each, system) for each in (prompt, response))
    assert prompt.dialogue and response.dialogue
    turn, other = (_response(each) for each in (prompt, response))
    messages = prompt.dialogue.messages[:turn] + response.dialogue.messages[other:]
    dialogue = Dialogue(messages, prompt.dialogue.tools, prompt.dialogue.more)
    return Example(dialogue, [False] * turn + response.trained[other:], images=prompt.images)


def _response(example: Example) -> int:
    """Return the index of the first message of the response."""
    assert example.dialogue
    roles = [message["role"] for message in example.dialogue.messages]
    answers = zip(roles, example.trained, strict=True)
    found = [i for i, (role, trained) in enumerate(answers) if role == "assistant" and trained is not False]
    if not found:
        raise RowError("none of its messages is a response")
    return found[0]


def pack_pair_sides(
    sequences: Placed,
    pairs: bool,
    share: bool,
    numbers: dict[str, float] | None = None,
    columns: dict[str, torch.dtype] | None = None,
    placeholder: int | None = None,
) -> Batch:
    """Pack the sides of pairs, or labelled responses, into the batch of one optimizer step.

    pairs: whether both sides of a row must be on the same rank and in the same micro-batch. share: whether to compute
    their common prompt only once. numbers: maps the name of each per-sequence number to the default for sequences
    without it. columns, placeholder: same as in `pack`.
    """
    batch = pack(sequences, columns=columns, placeholder=placeholder)
    ordered = sorted(sequences, key=lambda each: each[:2])
    if pairs:
        batch.seq["unit"] = batch.seq["position"]
    if share:
        batch.seq["common"] = prompt_lengths(batch.lengths, batch.token["mask"])
    for name, default in (numbers or {}).items():
        values = [sequence.numbers.get(name, default) for *_, sequence in ordered]
        batch.seq[name] = torch.tensor(values, dtype=torch.float64)
    return batch
