"""Labels of a reward model that a file describes: their names, what each weighs, and which tokens the model reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.config.classifier import FLAG, ClassifierConfig, read_classifier
from spmdrl.config.fields import nearest
from spmdrl.hub.build import scores_tokens
from spmdrl.hub.folder import plain_errors
from spmdrl.hub.resolve import resolve
from spmdrl.hub.tokenizer import differing_tokens
from spmdrl.weights.folder import Tensors

ALONE = "model"
"""Name of the only score of a model whose config names none."""


@dataclass(frozen=True)
class Labels:
    """The numbers that a classifier gives for a token, and what becomes of them."""

    names: tuple[str, ...]
    """Names of the scores."""
    weights: tuple[float, ...]
    """Factor of each score in the reward."""
    outputs: int
    """Numbers that the model gives for a token."""
    probability: bool
    """The only score is the probability of the second of two outputs, as process reward models are trained."""
    own_tokens: bool
    """The model reads tokens of its own tokenizer, not the policy's."""
    says: str
    """Which tokens it reads and why, for the log."""
    positions: int
    """The most tokens that it reads; 0: not known."""
    pad: int | None
    """The token that transformers passes over at the end of a sequence."""


def labels_of(file: str, policy: str, trust_remote_code: bool = False) -> Labels:
    """Return the labels of the reward model that a file describes.

    policy: path of the policy, as `--model.path`.

    Raises:
        ValueError: file, folder and labels do not fit together; the message says what to change.
    """
    from transformers import AutoConfig

    told = read_classifier(file)
    folder = resolve(told.path, trust_remote_code)
    with plain_errors(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    check_head(folder, f"{FLAG} {file}: path {told.path}")
    names, weights, probability = _weighed(told, file, config)
    different, _ = differing_tokens(told.path, policy, trust_remote_code)
    own = told.tokenizer == "own" or bool(different)
    why = f"{len(different)} tokens differ, such as {different[0]!r}" if different else "tokenizer own"
    says = f"reads the text of responses in its own tokens ({why})" if own else "reads the policy's tokens"
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    pad = getattr(config, "pad_token_id", None)
    return Labels(names, weights, config.num_labels or 1, probability, own, f"{FLAG} {file}: {says}", positions, pad)


def check_head(folder: Path, said: str) -> None:
    """Check that the weights of a folder have a classifier's head.

    said: begins the message.

    Raises:
        ValueError: they have none.
    """
    if "score.weight" not in Tensors(folder):
        raise ValueError(
            f"{said}: its weights have no head score.weight; name a classifier (...ForSequenceClassification, or "
            "...ForTokenClassification with steps), not a language model"
        )


def _weighed(told: ClassifierConfig, file: str, config: Any) -> tuple[tuple[str, ...], tuple[float, ...], bool]:
    """Return names and weights of the scores, and whether the only one is a probability."""
    count, said = config.num_labels or 1, f"{FLAG} {file}: "
    names = tuple(str(config.id2label.get(i, f"LABEL_{i}")) for i in range(count))
    named = not any(name == f"LABEL_{i}" for i, name in enumerate(names)) and len(set(names)) == count
    if scores_tokens(config):
        if not told.steps:
            raise ValueError(f"{said}{told.path} scores tokens, so steps must name the separator of steps, as '\\n\\n'")
        if count == 2 and not told.weights:
            return (ALONE,), (1.0,), True
    if count == 1 and not told.weights:
        return (names if named else (ALONE,)), (1.0,), False
    if count > 1 and not named:
        raise ValueError(
            f"{said}the {count} labels of {told.path} have no names of their own ({', '.join(names[:3])}): write them "
            "into id2label of its config.json, and give the file weights for them"
        )
    if not told.weights:
        raise ValueError(f"{said}weights: say how much each label counts; {told.path} has {', '.join(names)}")
    for name in told.weights:
        if name not in names:
            near = nearest(name, names)
            meant = f"; did you mean {near[0]}?" if near else "."
            raise ValueError(f"{said}weights: {told.path} has no label {name}{meant} It has {', '.join(names)}")
    return names, tuple(told.weights.get(name, 0.0) for name in names), False
