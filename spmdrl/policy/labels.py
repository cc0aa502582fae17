"""Describes a reward model that is configured by a file: names and weights of its labels, and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.config.classifier import FLAG, ClassifierConfig, read_classifier
from spmdrl.config.fields import nearest
from spmdrl.hub.build import scores_tokens
from spmdrl.hub.folder import plain_errors, read_config
from spmdrl.hub.resolve import named, resolve
from spmdrl.hub.tokenizer import differing_tokens
from spmdrl.weights.folder import Tensors

ALONE = "model"
"""Default name of the score of a single-label model, if the model config does not name it."""
STEPS = "steps"
"""Name that metrics and samples use for the number of steps; step-scoring models must not use it as a label."""
CONFIG = "its config.json names {labels} labels: write as many into id2label, or copy the folder again"
SEVERAL = "several labels need weights from a file: use --reward.model rm.yaml with a path in it (docs/rewards.md)"
ONE = "only one is supported: use a classifier with one label"
"""Endings of error messages about a wrong number of labels: for a model configured by a file, for a model without a
file, for a cost model."""


@dataclass(frozen=True)
class Labels:
    """The per-token scores of a reward model, and how they are combined into the reward."""

    names: tuple[str, ...]
    """Names of the scores, in output order."""
    weights: tuple[float, ...]
    """Weight of each score; the reward is the weighted sum of the scores."""
    outputs: int
    """Number of model outputs per token: one per score, or two if `probability` is true."""
    probability: bool
    """True if the only score is the softmax probability of the second of two outputs, as in process reward models."""
    own_tokens: bool
    """True if texts are encoded with the model's tokenizer instead of the policy's."""
    note: str
    """Log line that says which tokenizer is used and why."""
    positions: int
    """Maximum input length in tokens, or 0 if unknown."""
    pad: int | None
    """Padding token id, which transformers ignores at the end of a sequence, or None if the config has none."""


def labels_of(file: str, policy: str, trust_remote_code: bool = False) -> Labels:
    """Return the labels of the reward model that is configured by `file`.

    policy: path of the policy, in any form that `--model.path` accepts.

    Raises:
        ValueError: file, folder and labels are inconsistent; the message says what to change.
    """
    classifier = read_classifier(file)
    with named(f"{FLAG} {file}: path"):
        folder = resolve(classifier.path, trust_remote_code)
        config = read_config(folder, trust_remote_code)
        check_head(folder, f"{FLAG} {file}: path {classifier.path}", config.num_labels or 1, CONFIG)
        names, weights, probability = _weighed(classifier, file, config)
        different, _ = differing_tokens(classifier.path, policy, trust_remote_code)
    own = classifier.tokenizer == "own" or bool(different)
    why = f"tokens differ: {len(different)}, such as {different[0]!r}" if different else "tokenizer own"
    tokens = f"reads the text of responses in its own tokens ({why})" if own else "reads the policy's tokens"
    line, pad = f"{FLAG} {file}: {tokens}", getattr(config.get_text_config(), "pad_token_id", None)
    return Labels(names, weights, config.num_labels or 1, probability, own, line, positions_of(config), pad)


def positions_of(config: Any) -> int:
    """Return the maximum input length in tokens from an HF config, or 0 if unknown."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 0


def check_head(folder: Path, source: str, labels: int, wrong: str) -> None:
    """Raise ValueError unless the weights in a folder include a classifier head with this number of labels.

    source: prefix of the messages. wrong: ending of the message for a head with a different number of labels.
    """
    with plain_errors(folder):
        tensors = Tensors(folder)
        if "score.weight" not in tensors:
            raise ValueError(
                f"{source}: its weights have no head score.weight; use a classifier (...ForSequenceClassification, or "
                "...ForTokenClassification with steps), not a language model"
            )
        rows = tensors.shape("score.weight")[0]
    if rows != labels:
        raise ValueError(f"{source}: its head score.weight computes {rows} numbers, but {wrong.format(labels=labels)}")


def check_alone(path: str, flag: str, trust_remote_code: bool = False) -> None:
    """Raise ValueError unless the classifier at `path`, which is not configured by a file, has a single output."""
    check_head(resolve(path, trust_remote_code), f"{flag} {path}", 1, SEVERAL if flag == FLAG else ONE)


def _weighed(classifier: ClassifierConfig, file: str, config: Any) -> tuple[tuple[str, ...], tuple[float, ...], bool]:
    """Return names and weights of the scores, and whether the only score is a probability (`Labels`)."""
    count, source = config.num_labels or 1, f"{FLAG} {file}: "
    names = tuple(str(config.id2label.get(i, f"LABEL_{i}")) for i in range(count))
    named = not any(name in ("", f"LABEL_{i}") for i, name in enumerate(names)) and len(set(names)) == count
    if classifier.steps and STEPS in names:
        raise ValueError(
            f"{source}{classifier.path} has a label {STEPS}, but that metric counts steps: give the label another name "
            "in id2label of its config.json"
        )
    if scores_tokens(config):
        if not classifier.steps:
            why = f'{source}{classifier.path} scores tokens, so steps must name their separator, such as "\\n\\n"'
            raise ValueError(why)
        if count == 2 and not classifier.weights:
            return (ALONE,), (1.0,), True
    if count == 1 and not classifier.weights:
        return (names if named else (ALONE,)), (1.0,), False
    if count > 1 and not named:
        raise ValueError(
            f"{source}the {count} labels of {classifier.path} have no distinct names ({', '.join(names[:3])}): "
            "write them into id2label of its config.json, and give the file weights for them"
        )
    if not classifier.weights:
        raise ValueError(f"{source}weights: set the weight of each label; {classifier.path} has {', '.join(names)}")
    for name in classifier.weights:
        if name not in names:
            near = nearest(name, names)
            meant = f"; did you mean {near[0]}?" if near else "."
            raise ValueError(f"{source}weights: {classifier.path} has no label {name}{meant} It has {', '.join(names)}")
    return names, tuple(classifier.weights.get(name, 0.0) for name in names), False
