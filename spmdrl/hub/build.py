"""Builds a Hugging Face folder's model, either with its weights or on the meta device, to be sharded before loading."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spmdrl.hub.folder import drop_quantization, plain_errors, read_config
from spmdrl.hub.scorers import SCORERS, register_scorers
from spmdrl.hub.vision import QWEN, TILED, read_vision, reads_images

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
"""Torch dtype for each value of `--model.dtype`."""


def build_model(
    folder: Path,
    dtype: str | torch.dtype,
    trust_remote_code: bool = False,
    attn_implementation: str = "sdpa",
    head: str = "lm",
    labels: int = 1,
) -> Any:
    """Build a Hugging Face folder's model on the CPU, in eval mode (so without dropout).

    Args:
        folder: a folder with config.json and safetensors.
        dtype: a torch dtype or its name.
        trust_remote_code: whether the model's own Python code may be executed.
        attn_implementation: attention implementation in transformers, such as `sdpa`.
        head: `lm` for a causal language model, `value` or `score` for a sequence classifier, `steps` for a token
            classifier. `score` builds a token classifier if the config specifies one. A `value` head that is missing
            from the folder is initialised to 0, so that a critic can start from the language model.
        labels: number of outputs of a classifier head.

    Raises:
        ValueError: the model needs its own Python code but `trust_remote_code` is not set; its architecture has no
            classifier for the head; or weights are missing or have the wrong shape (transformers would initialise them
            randomly).
    """
    dtype, options = _dtype_and_options(dtype)
    with plain_errors(folder), torch.random.fork_rng(devices=[]):
        model_class = _model_class(read_config(folder, trust_remote_code), head)
        loaded: Any = model_class.from_pretrained(
            folder,
            **({} if head == "lm" else {"num_labels": labels}),
            **options,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    model, report = loaded
    missing = set(report["missing_keys"])
    if head == "value" and "score.weight" in missing:
        torch.nn.init.zeros_(model.score.weight)
        missing.remove("score.weight")
    wrong = [*sorted(missing), *(str(key) for key in report["mismatched_keys"])]
    if wrong:
        names = ", ".join(wrong[:4])
        raise ValueError(f"the weights in {folder} do not fit its config.json: missing or misshapen {names}")
    _train_padding(model)
    return model


def empty_model(
    folder: Path,
    dtype: str | torch.dtype,
    trust_remote_code: bool = False,
    attn_implementation: str | None = "sdpa",
    head: str = "lm",
    labels: int = 1,
) -> Any:
    """Build a Hugging Face folder's model on the meta device, from its config.json alone, in eval mode.

    Parameters and persistent buffers have no values, and tied parameters are one object. Buffers that checkpoints do
    not contain, such as rotary tables, are on the CPU with the same values as after transformers' `from_pretrained`.

    Arguments and errors are as in `build_model`. A quantised folder yields an unquantised model. An architecture that
    does not support `attn_implementation` uses its default attention.
    """
    from transformers import AutoConfig
    from transformers.initialization import meta_device_safe_creation_ops

    dtype, options = _dtype_and_options(dtype)
    num_labels = {} if head == "lm" else {"num_labels": labels}
    with plain_errors(folder), torch.random.fork_rng(devices=[]):
        config = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True, **num_labels
        )
        model_class = _model_class(config, head)
        drop_quantization(config, folder)
        make = partial(model_class.from_config, config, dtype=dtype, trust_remote_code=trust_remote_code, **options)
        attention: Any = attn_implementation
        if attn_implementation and sees_images(config):
            # A vision tower is not causal, so it keeps its own attention.
            attention = {"": attn_implementation, "text_config": attn_implementation, "vision_config": "sdpa"}
        with torch.device("meta"), meta_device_safe_creation_ops():
            try:
                model: Any = make(attn_implementation=attention)
            except KeyError as error:
                if error.args != (attn_implementation,):
                    raise
                model = make(attn_implementation=None)
        if head == "steps" and not isinstance(getattr(model, "score", None), torch.nn.Linear):
            raise ValueError(
                f"{type(model).__name__} has no linear head named score, which a process reward model needs: take a "
                "model of another family, such as llama or qwen2"
            )
        _keep_types(model, dtype)
        _fill_buffers(model)
    _train_padding(model)
    return model.eval()


def _dtype_and_options(dtype: str | torch.dtype) -> tuple[torch.dtype, dict[str, Any]]:
    """Return the torch dtype, and the options that transformers needs to support it."""
    resolved: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    # transformers' grouped kernels for experts do not support float64, but its eager implementation does.
    return resolved, {"experts_implementation": "eager"} if resolved == torch.float64 else {}


def scores_tokens(config: Any) -> bool:
    """Return True if a transformers config specifies a token classifier, as process reward models do."""
    return any(name.endswith("ForTokenClassification") for name in getattr(config, "architectures", None) or [])


def sees_images(config: Any) -> bool:
    """Return True if spmdrl builds the model of a transformers config with its vision tower.

    Models of other families that read images are language models only, if transformers has a class for these.
    """
    return reads_images(config) and config.model_type in (*QWEN, *TILED)


def never_sampled(config: Any) -> tuple[int, ...]:
    """Return the placeholder ids (`Vision.never`) of the model of a transformers config; empty if it has no tower."""
    return read_vision(config).never if sees_images(config) else ()


def language_model_class(config: Any) -> Any:
    """Return the transformers class that generates text for a config, with the vision tower if there is one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


def _model_class(config: Any, head: str) -> Any:
    """Return the transformers class for a model with this head. Errors are as in `build_model`."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    if head == "lm":
        if scorers := [name for name in config.architectures or [] if name.endswith(SCORERS)]:
            raise ValueError(
                f"the model's config.json names {scorers[0]}, a reward model, and a language model would drop its "
                "score head: take the language model that it was trained from"
            )
        return language_model_class(config)
    if sees_images(config):
        register_scorers(config)
    if head == "steps" and type(config) not in AutoModelForTokenClassification._model_mapping:
        raise ValueError(
            f"transformers has no token classifier for {config.model_type}, and a process reward model is one: take a "
            "model of another family, such as llama or qwen2"
        )
    scores = head == "steps" or (head == "score" and scores_tokens(config))
    found = AutoModelForTokenClassification if scores else AutoModelForSequenceClassification
    own_code = found.__name__ in (getattr(config, "auto_map", None) or {})
    if not own_code and type(config) not in found._model_mapping:
        raise ValueError(
            f"transformers has no classifier for {config.model_type}, whose head a critic or a reward model needs: "
            "--model.path must be a model of a family that has one, such as llama or qwen2"
        )
    return found


def check_head(folder: Path, head: str, trust_remote_code: bool = False) -> None:
    """Raise ValueError if the architecture of an HF folder has no classifier for `head` (see `build_model`)."""
    _model_class(read_config(folder, trust_remote_code), head)


def give_memory(model: torch.nn.Module, device: torch.device) -> None:
    """Move a model to a device in place, allocating uninitialised memory for tensors on the meta device.

    Parameters stay the same objects, so that tied parameters stay tied.
    """

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.device.type == "meta" else tensor.to(device)

    swap = torch.__future__.get_swap_module_params_on_conversion()
    # Without this option, `_apply` would untie tied parameters.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(placed)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)


def _keep_types(model: Any, dtype: Any) -> None:
    """Cast back to float32 the weights that the architecture always keeps in it, as `from_pretrained` does."""
    for pattern, kept in model._get_dtype_plan(dtype).items():
        for module_name, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is None or not re.search(pattern.replace("*", ".*"), f"{module_name}.{name}"):
                        continue
                    if isinstance(tensor, torch.nn.Parameter):
                        tensor.data = tensor.data.to(kept)
                    else:
                        tensors[name] = tensor.to(kept)


def _fill_buffers(model: Any) -> None:
    """Run the model's initialisation to fill the buffers that checkpoints lack, as `from_pretrained` does."""
    for module in model.modules():
        module._is_hf_initialized = False
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    # Parameters are on the meta device, where initialisation costs nothing.
    model.initialize_weights()


def _train_padding(model: Any) -> None:
    # torch computes no gradient for the embedding at `padding_idx`. Packed sequences have no padding, but the padding
    # token may also be the end token, which must be trained.
    model.get_input_embeddings().padding_idx = None


def decoder_layers(hf: Any) -> torch.nn.ModuleList:
    """Return the decoder layers of an HF model: its longest ModuleList. Raises ValueError if it has none."""
    # The vision tower of a small model can have more layers than its decoder.
    decoder = hf.get_decoder() if sees_images(hf.config) else hf.base_model
    layers = _longest_list(decoder)
    if layers is None:
        raise ValueError(f"{type(hf).__name__} has no list of layers to shard; --policy.backend fsdp needs one")
    return layers


def vision_layers(hf: Any) -> list[torch.nn.Module]:
    """Return the layers of the vision tower of an HF model, or none if the model was built without one."""
    if not sees_images(hf.config):
        return []
    tower = dict(hf.named_modules()).get(read_vision(hf.config).tower)
    return list(_longest_list(tower) or []) if tower is not None else []


def _longest_list(module: torch.nn.Module) -> torch.nn.ModuleList | None:
    lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(lists, key=len) if lists else None
