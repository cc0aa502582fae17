"""Settings of a reward model in a YAML file: its path, the weights of its labels, its tokenizer, reasoning steps."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from spmdrl.config.yaml_file import SUFFIXES, read_settings

FLAG = "--reward.model"


@dataclass(frozen=True)
class ClassifierConfig:
    """A Hugging Face classifier that scores responses, as a file describes it (docs/rewards.md)."""

    path: str = ""
    """The model, in a form that `--model.path` takes."""
    weights: dict[str, float] = field(default_factory=dict)
    """Label -> factor on its score; a label that is not listed has factor 0. Empty: factor 1, for a model with one
    label."""
    tokenizer: Literal["auto", "own"] = "auto"
    """Tokens that the model reads. `own`: the text in tokens of the model's tokenizer. `auto`: the policy's tokens if
    both tokenizers give every token the same id, else as `own`."""
    steps: str = ""
    """Text that separates reasoning steps, each of which is scored at its end. Empty: only the end of the response is
    scored."""
    reduce: Literal["min", "mean", "last", "product"] = "min"
    """How the scores of steps become the score of the response: `min`, `mean`, `last` or `product`."""


def is_classifier(value: str) -> bool:
    """Return True if `value`, a value of `--reward.model`, names a YAML file instead of a model."""
    return value.endswith(SUFFIXES)


def classifier_of(value: str) -> ClassifierConfig | None:
    """Return the settings of the file that `--reward.model` names; None for a model's path or an empty value.

    Raises ValueError as `read_classifier` does.
    """
    return read_classifier(value) if is_classifier(value) else None


def model_path(value: str) -> str:
    """Return the path of the model that `--reward.model` names, or "". Raises ValueError as `read_classifier` does."""
    return read_classifier(value).path if is_classifier(value) else value


def scores_steps(value: str) -> bool:
    """Return True if `--reward.model` names a process reward model. Raises ValueError as `read_classifier` does."""
    found = classifier_of(value)
    return bool(found and found.steps)


def read_classifier(file: str) -> ClassifierConfig:
    """Return the settings of a reward model's YAML file. Raises ValueError with a line for each problem."""
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
    """Return a text that changes with the settings of a file, so that a resume notices changes.

    Raises ValueError as `read_classifier` does.
    """
    return repr(read_classifier(file))
