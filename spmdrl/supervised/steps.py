"""Turns a row of labelled steps into a sequence with each label at its step's last token, or rejects the row."""

from typing import Any

import torch

from spmdrl.config.reward_model import RewardModelConfig
from spmdrl.data.batch import Batch
from spmdrl.data.row_columns import RowError
from spmdrl.data.steps import LabelledSteps, StepColumns, step_ends, steps_of, tokens_of_ends
from spmdrl.data.tokens import Masked
from spmdrl.session.image_reader import ImageReader
from spmdrl.supervised.encoder import Encoded, Encoder
from spmdrl.supervised.rows import Placed, pack


class StepEncoder:
    """Encodes rows with labelled steps: a prompt and a response that is trained at each labelled step's last token."""

    beside = False

    def __init__(self, cfg: RewardModelConfig, tokenizer: Any, longest: int, images: ImageReader | None = None):
        """Read the settings.

        longest: maximum number of tokens per sequence. images: reads the images of rows; None if the model reads text
        only.

        Raises:
            TemplateError: the chat template does not render user messages.
        """
        data = cfg.data
        self.encoder = Encoder(data, tokenizer, longest, images=images)
        self.system, self.chosen = data.system, cfg.reward_model
        self.sides = (data.chosen_column, data.rejected_column)
        self.columns = StepColumns(
            prompt=data.prompt_column,
            tools=data.tools_column,
            images=data.images_column,
            steps=data.steps_column,
            labels=data.labels_column,
        )

    def __call__(self, row: dict, before: dict | None = None) -> Encoded:
        """Implements `Encode.__call__`."""
        if row.get(self.columns.steps) is None and all(row.get(side) is not None for side in self.sides):
            raise RowError(
                f"it holds a pair ({', '.join(self.sides)}), and --reward-model.rows steps learns from labelled steps: "
                "put pairs into another file, and train on it with --reward-model.rows pairs"
            )
        text_only = "" if self.encoder.images else "the model"
        found = steps_of(row, self.columns, self.chosen.separator, self.system, text_only)
        self._choose(found)
        out = self.encoder.rendered(found.example, getattr(row, "folder", ""))
        if len(out.sequences) > 1:
            raise RowError(
                "the chat template rewrites earlier turns, so its turns do not fit into one sequence; give rows whose "
                "response is one turn"
            )
        self._label(out.sequences[0], found)
        return self.encoder.fitted(out)

    def _choose(self, found: LabelledSteps) -> None:
        """With `--reward-model.last-step`, drop all labels but the last. Raises RowError if no label remains."""
        if self.chosen.last_step:
            found.labels[:-1] = [None] * (len(found.labels) - 1)
        if all(label is None for label in found.labels):
            which = (
                "its last step has no label, and --reward-model.last-step trains only that step"
                if self.chosen.last_step
                else "none of its steps has a label"
            )
            raise RowError(f"{which}, so there is nothing to learn from it: label a step, or leave the row out")

    def _label(self, sequence: Masked, found: LabelledSteps) -> None:
        """Set a sequence's mask to the last token of each labelled step, and add the labels.

        RL reads a step's score at the same token (`rl/reading.py`).
        """
        response = sequence.mask.nonzero().flatten()
        begin, end = int(response[0]), int(response[-1]) + 1
        tokens = sequence.tokens[begin:end].tolist()
        ends = self._ends(self._decode(tokens), found)
        places = [begin + place for place in tokens_of_ends(self._decode, tokens, ends)]
        double = next((i for i in range(1, len(places)) if places[i] == places[i - 1]), 0)
        if double:
            raise RowError(
                f"its steps {double} and {double + 1} end in the same token, which has only one score: join them, or "
                "set another separator (--reward-model.separator)"
            )
        label = torch.zeros(len(sequence), dtype=torch.float64)
        mask = torch.zeros(len(sequence), dtype=torch.bool)
        for place, value in zip(places, found.labels, strict=True):
            if value is not None:
                label[place], mask[place] = value, True
        sequence.mask, sequence.columns["label"] = mask, label

    def _ends(self, text: str, found: LabelledSteps) -> list[int]:
        """Return the character offsets of the step ends in the text of a row's trained tokens.

        Raises:
            RowError: the steps cannot be found.
        """
        # Some templates add an empty thinking block before a response and strip the whitespace around it, so the
        # response is searched for with and without its surrounding whitespace.
        given = found.text
        within = next((part for part in (given, given.strip(), given.lstrip(), given.rstrip()) if part in text), "")
        if within:
            lead, at = given.index(within), text.rindex(within)
            return [at + min(max(end - lead, 1), len(within)) for end in step_ends(given, self.chosen.separator)]
        # Some tokenizers do not round-trip text. If the decoded text does not contain the response, the decoded text
        # itself is split into steps.
        ends = step_ends(text, self.chosen.separator) if text else []
        if len(ends) != len(found.labels):
            raise RowError(
                f"the number of its steps is {len(found.labels)}, but {len(ends)} in the text of its tokens, because "
                "the chat template or the tokenizer changes its response: give another template "
                "(--data.chat-template), or leave the row out"
            )
        return ends

    def _decode(self, tokens: list[int]) -> str:
        return self.encoder.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pack_steps(sequences: Placed, step: int, placeholder: int | None = None) -> Batch:
    """Pack responses into the batch of one optimizer step, with their step labels. placeholder: same as in `pack`."""
    return pack(sequences, columns={"label": torch.float64}, placeholder=placeholder)
