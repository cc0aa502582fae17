"""Classifiers of the model families that read images, for critics and reward models.

They are made as transformers makes those of language models and of Qwen3.5: the base model, and a linear layer `score`
in the place of `lm_head`. So a saved folder has the tensors of the language model's folder, and `score.weight`.
"""

from typing import Any

SCORERS = ("ForSequenceClassification", "ForTokenClassification")
"""Class name suffixes of transformers' classifiers, whose heads output scores instead of next-token logits."""
GENERATES = "ForConditionalGeneration"
"""Class name suffix of the models of these families that generate text."""


def register_scorers(config: Any) -> None:
    """Add the classifiers of a family to transformers' Auto classes, where transformers has none.

    `AutoModelForSequenceClassification` and `AutoModelForTokenClassification` can then build and load models of this
    family in this process. config: transformers config of a model with a vision tower.
    """
    from transformers import (
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )
    from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

    kinds = (
        (AutoModelForSequenceClassification, GenericForSequenceClassification),
        (AutoModelForTokenClassification, GenericForTokenClassification),
    )
    generator = AutoModelForImageTextToText._model_mapping[type(config)]
    for (auto, generic), suffix in zip(kinds, SCORERS, strict=True):
        if type(config) not in auto._model_mapping:
            auto.register(type(config), _scorer(generator, generic, suffix), exist_ok=True)


def _scorer(generator: Any, generic: type, suffix: str) -> type:
    """Return a classifier of a family. generator: class that generates text. generic: transformers' mixin."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    name = generator.__name__.replace(GENERATES, suffix)
    # The first base of a generator is the family's PreTrainedModel, without heads and tied weights.
    made = type(name, (generic, generator.__bases__[0]), {"__module__": __name__, "__doc__": f"Model {name}."})
    # Published folders use older names, which transformers renames by the name of the class.
    if renamed := get_checkpoint_conversion_mapping(generator.__name__):
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return made
