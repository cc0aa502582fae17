"""A reward model's file: which classifier scores responses, by which labels, over which tokens, step by step or not."""

import math
from dataclasses import dataclass, field
from typing import Literal

from spmdrl.config.schema import Config
from spmdrl.config.yaml_file import SUFFIXES, read_fields, value_problems

FLAG = "--reward.model"


@dataclass(frozen=True)
class ClassifierConfig:
    """A classifier of Hugging Face's form that scores responses, as a file says it (docs/rewards.md)."""

    path: str = ""
    """The model, as `--model.path`."""
    weights: dict[str, float] = field(default_factory=dict)
    """Label -> factor on its score; the others count 0. Empty: 1 for a model with one label."""
    tokenizer: Literal["auto", "own"] = "auto"
    """`auto`: the policy's tokens where both tokenizers number them alike, else its own; `own`: always its own."""
    steps: str = ""
    """Separator of reasoning steps, each of which is scored at its end. Empty: the response is scored at its end."""
    reduce: Literal["min", "mean", "last", "product"] = "min"
    """How the scores of steps make the response's: `min`, `mean`, `last` or `product`."""


def is_classifier(value: str) -> bool:
    """Tell whether `--reward.model` names a file instead of a model."""
    return value.endswith(SUFFIXES)


def classifier_of(value: str) -> ClassifierConfig | None:
    """Return what the file says that `--reward.model` names; None for the path of a model, or nothing.

    Raises:
        ValueError: see `read_classifier`.
    """
    return read_classifier(value) if is_classifier(value) else None


def model_path(value: str) -> str:
    """Return the path of the model that `--reward.model` names, as `--model.path`; empty: none.

    Raises:
        ValueError: see `read_classifier`.
    """
    return read_classifier(value).path if is_classifier(value) else value


def scores_steps(value: str) -> bool:
    """Tell whether `--reward.model` names a process reward model. Raises ValueError as `read_classifier` does."""
    found = classifier_of(value)
    return bool(found and found.steps)


def read_classifier(file: str) -> ClassifierConfig:
    """Return the reward model of a file, which is YAML: the fields of `ClassifierConfig`.

    Raises:
        ValueError: it cannot be read, or settings do not serve: one line for each.
    """
    given, problems = read_fields(FLAG, file, ClassifierConfig, "a reward model (docs/rewards.md)")
    found = ClassifierConfig(**given)
    problems += value_problems(found)
    if "path" not in given or not found.path:
        problems.append("path: name the model, as --model.path does")
    for name, value in found.weights.items():
        if not math.isfinite(value):
            problems.append(f"weights: {name} {value} must be a finite number")
    if found.weights and not any(found.weights.values()):
        problems.append("weights: all of them are 0, so the model would score nothing; give one another weight")
    if "reduce" in given and not found.steps:
        problems.append(f"reduce {found.reduce!r}: only scores of steps are reduced; name their separator in steps")
    if problems:
        raise ValueError("\n".join(f"{FLAG} {file}: {problem}" for problem in problems))
    return found


def scored_by(file: str) -> str:
    """Return what of a reward model's file decides its scores. Raises ValueError as `read_classifier` does."""
    return repr(read_classifier(file))


def classifier_problems(config: Config) -> list[str]:
    """One line for each setting to change about a reward model that a file names."""
    value, advantage = config.reward.model, config.algo.advantage
    try:
        found = classifier_of(value)
    except ValueError as error:
        return str(error).splitlines()
    problems = []
    if advantage == "grpo_process" and not (found and found.steps):
        problems.append(
            "--algo.advantage grpo_process: learns from the scores of steps, which a process reward model gives: name "
            f"one by {FLAG} rm.yaml with a path and steps, the separator of steps (docs/rewards.md)"
        )
    return problems
