"""Adapts vLLM's classes of models that read images, so that they take images of `images.py`.

vLLM asks a model's processor how many features an image can have, and for an image to measure memory with. It would
load transformers' processor for that, which needs torchvision and a tokenizer. The classes made here answer from the
model's config instead. They also give the placeholders of images probability 0. Written against vLLM 0.32, and checked
against the code of 0.25.1.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from spmdrl.config.schema import Config
from spmdrl.engines.engine import longest_sequence, model_config
from spmdrl.engines.vllm.images import KEY, Images, plain_prompt
from spmdrl.hub.build import DTYPES
from spmdrl.hub.images import load_processor, most_tokens
from spmdrl.hub.resolve import resolve
from spmdrl.hub.vision import Vision

QWEN2 = "transformers.models.qwen2_vl"


def largest_image(cfg: Config, vision: Vision) -> int:
    """Return the most features that an image of a run can have.

    The image processor of the model's folder bounds them, and so does the longest sequence, which holds whole images.
    """
    longest = longest_sequence(cfg)
    try:
        processor = load_processor(resolve(cfg.model.path, cfg.model.trust_remote_code), vision)
    except ValueError:
        # Runs on text need no processor; those on images report this error where they load it.
        return longest
    return min(longest, most_tokens(processor, vision))


def vision_options(cfg: Config, vision: Vision, on_cpu: bool) -> dict[str, Any]:
    """Make vLLM build the class of `adapted` for the run's model, and return the arguments of vLLM's LLM for images.

    Raises:
        ValueError: vLLM has no class for this model, or cannot import it.
    """
    from vllm.model_executor.models import ModelRegistry

    name = (model_config(cfg).architectures or ["none"])[0]
    with without_torchvision():
        try:
            # vLLM's own way would import the class in another process first.
            found = ModelRegistry.models[name].load_model_cls()
        except (KeyError, ImportError) as error:
            raise ValueError(
                f"--rollout.engine vllm: the installed vLLM has no usable class {name} ({type(error).__name__}: "
                f"{error}); take --rollout.engine hf"
            ) from error
    ModelRegistry.register_model(name, adapted(found, vision, largest_image(cfg, vision), DTYPES[cfg.model.dtype]))
    # Payloads are held by running requests; vLLM would keep up to 4 GiB of them longer. On CPU the size of the KV cache
    # is given, so nothing has to be measured.
    return {"mm_processor_cache_gb": 0, "skip_mm_profiling": on_cpu}


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Let vLLM import its Qwen classes inside this context if torchvision is not installed.

    Their module wants one function of transformers' processor for torchvision, which the PIL processor has as well.
    Nothing else sees the replacement.
    """
    name = f"{QWEN2}.image_processing_qwen2_vl"
    if find_spec("torchvision") or name in sys.modules:
        yield
        return
    sys.modules[name] = import_module(f"{QWEN2}.image_processing_pil_qwen2_vl")
    try:
        yield
    finally:
        del sys.modules[name]


def adapted(model: Any, vision: Vision, most: int, dtype: torch.dtype) -> Any:
    """Return a subclass of a model class of vLLM.

    Images of its requests are processed already and have at most `most` features. Logits of placeholders are -inf,
    whatever the request, so vLLM neither samples them nor counts them in log-probabilities.
    """
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import BaseProcessingInfo

    images, never = Images(vision, dtype), list(vision.never)

    class Info(BaseProcessingInfo):
        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            return {KEY: None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
            return {KEY: most}

    class Processor:
        cache = None

        def __init__(self, info: Info, dummy_inputs: Any = None, **_: Any):
            self.info, self.dummy_inputs = info, self

        def get_dummy_processor_inputs(self, **_: Any) -> None:
            """Version 0.25.1 gives this to `apply`."""

        def apply(self, inputs: Any, *_: Any, **__: Any) -> Any:
            if inputs is not None:
                raise ValueError("spmdrl gives vLLM processed images only")
            return self.get_dummy_mm_inputs()

        def get_dummy_mm_inputs(self, *_: Any, **__: Any) -> Any:
            ids, image = plain_prompt(most, vision)
            return images.prompt(ids, [image])

    class Adapted(model):
        def compute_logits(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits_BV = super().compute_logits(*args, **kwargs)
            # With TP, vLLM may gather logits on one rank only.
            return logits_BV if logits_BV is None else hide(logits_BV, never)

    Adapted.__name__, Adapted.__qualname__, Adapted.__module__ = model.__name__, model.__qualname__, model.__module__
    # vLLM's types want subclasses of its own, whose other methods nothing calls.
    registry: Any = MULTIMODAL_REGISTRY
    return registry.register_processor(Processor, info=Info, dummy_inputs=lambda info: None)(Adapted)


def hide(logits_BV: torch.Tensor, never: list[int]) -> torch.Tensor:
    """Set the logits of tokens to -inf, in place, without copies from the host."""
    for token in never:
        logits_BV[:, token] = float("-inf")
    return logits_BV


def clear_features(model: Any) -> None:
    """Clear the tensors in which Qwen3-VL holds features for early layers. They are not buffers, so vLLM's sleep at
    level 2 drops them.
    """
    for tensor in getattr(model, "deepstack_input_embeds", None) or ():
        tensor.zero_()
