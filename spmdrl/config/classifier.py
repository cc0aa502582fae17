"""Settings for a reward model described by a YAML file: its path, label weights, tokenizer and reasoning steps."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from spmdrl.config.yaml_file import SUFFIXES, read_settings

FLAG = "--reward.model"


@dataclass(frozen=True)
class ClassifierConfig:
    """A Hugging Face classifier that scores responses, as described by a YAML file (docs/rewards.md)."""

    path: str = ""
    """The model, in any form that `--model.path` accepts."""
    weights: dict[str, float] = field(default_factory=dict)
    """Label -> weight of its score; labels that are not listed have weight 0. Empty: weight 1, for a model with one
    label."""
    tokenizer: Literal["auto", "own"] = "auto"
    """Tokenizer for the model's input. `own`: the text is encoded with the model's tokenizer. `auto`: the policy's
    tokens are used if both tokenizers give every token the same id, otherwise as `own`."""
    steps: str = ""
    """Text that separates reasoning steps, each of which is scored at its end. Empty: score only the end of the
    response."""
    reduce: Literal["min", "mean", "last", "product"] = "min"
    """How step scores are reduced to the response's score: `min`, `mean`, `last` or `product`."""


def is_classifier(value: str) -> bool:
    """Return True if `value`, a value of `--reward.model`, is a YAML file instead of a model."""
    return value.endswith(SUFFIXES)


def classifier_of(value: str) -> ClassifierConfig | None:
    """Return the settings loaded from the file in `--reward.model`, or None if the value is empty or a model path.

    Raises ValueError as `read_classifier` does.
    """
    return read_classifier(value) if is_classifier(value) else None


def model_path(value: str) -> str:
    """Return the path of the `--reward.model` model, or "". Raises ValueError as `read_classifier` does."""
    return read_classifier(value).path if is_classifier(value) else value


def scores_steps(value: str) -> bool:
    """Return True if `--reward.model` is a process reward model. Raises ValueError as `read_classifier` does."""
    found = classifier_of(value)
    return bool(found and found.steps)


def read_classifier(file: str) -> ClassifierConfig:
    """Return the settings in a reward model's YAML file. Raises ValueError with one line per problem."""
    return read_settings(FLAG, file, ClassifierConfig, "a reward model (docs/rewards.md)", _problems)


def _problems(found: ClassifierConfig, given: Collection[str]) -> list[str]:
    problems = [] if found.path else ["path: name the model, as --model.path does"]
    problems += [
        f"weights: {name} {value} must be a finite number"
        for name, value in found.weights.items()
        if not math.isfinite(value)
    ]
    if found.weights and not any(found.weights.values()):
        problems.append("weights: all of them are 0, so every score would be 0; give a label a weight other than 0")
    if "reduce" in given and not found.steps:
        problems.append(
            f"reduce {found.reduce!r}: applies to scores of steps only; set steps to the text between steps"
        )
    return problems


def scored_by(file: str) -> str:
    """Return a fingerprint of the settings in a file, which a resume compares to detect changes.

    Raises ValueError as `read_classifier` does.
    """
    return repr(read_classifier(file))
