"""Configures HF decoder layers before sharding: activation checkpointing, Liger kernels, compilation."""

import importlib.util
import logging
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from spmdrl.hub.build import decoder_layers, vision_layers
from spmdrl.policy.attention import packed
from spmdrl.policy.attention.packing import again
from spmdrl.policy.liger import remember
from spmdrl.policy.mixers.layers import mixes

log = logging.getLogger("spmdrl")
PLAIN = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Model types for which `--policy.liger auto` uses Liger kernels. Their layers consist of attention and an MLP, with
RMSNorm, rotary embeddings and SwiGLU."""


def recompute(hf: Any) -> None:
    """Enable activation checkpointing for each layer of the decoder and of a vision tower.

    transformers' own activation checkpointing is not used, because it requires training mode, which enables dropout.
    """
    for layer in [*decoder_layers(hf), *vision_layers(hf)]:
        # RNG states need not be restored, because no layer draws random numbers in eval mode.
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, context_fn=again
        )


def use_liger(hf: Any, choice: str, device: torch.device, dtype: torch.dtype) -> None:
    """Use Liger kernels for norms, activations and rotary embeddings (https://arxiv.org/abs/2410.10989).

    choice: the value of `--policy.liger`. dtype: dtype of the forward pass. No-op on the meta device.

    Raises:
        ValueError: the choice is `on`, and the device is not a GPU or Liger has no kernels for the model type.
    """
    kind = hf.config.model_type
    if choice == "auto":
        wanted = device.type == "cuda" and dtype.itemsize == 2 and kind in PLAIN
        choice = "on" if wanted and importlib.util.find_spec("liger_kernel") else "off"
    if choice == "off" or device.type == "meta":
        return
    if device.type != "cuda":
        raise ValueError("--policy.liger on: Liger's kernels need a GPU; leave out this flag on a CPU")
    from liger_kernel.transformers import monkey_patch

    known = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    if kind not in known:
        fits = ", ".join(sorted(known))
        raise ValueError(f"--policy.liger on: Liger has no kernels for {kind}; it has some for {fits}")
    # Liger's losses are not used, because the head computes the loss in chunks itself.
    apply = partial(monkey_patch._apply_liger_kernel_to_instance, cross_entropy=False, fused_linear_cross_entropy=False)
    remember(hf, partial(apply, model=hf))
    log.info("%s: Liger's kernels compute norms, activations and rotary embeddings", kind)


def compile_layers(hf: Any, backend: str = "inductor") -> None:
    """Compile each decoder layer with `torch.compile` in two parts, before and after attention.

    Packed attention is not compiled, because it depends on the sequence lengths. Layers of the same kind share compiled
    code, which works for any number of tokens. backend: a backend of `torch.compile`.

    Raises:
        ValueError: the model has experts or recurrent layers, or compilation is disabled in this process.
    """
    import torch._dynamo

    if torch._dynamo.config.disable:
        raise ValueError(
            "--policy.compile-layers: TORCH_COMPILE_DISABLE turns compilation off in this process, as for vLLM on a "
            "CPU; leave out this flag"
        )
    for layer in decoder_layers(hf):
        for name, module in layer.named_modules():
            if mixes(module) or "expert" in name:
                raise ValueError(
                    f"--policy.compile-layers: layers of {hf.config.model_type} have {name} ({type(module).__name__}), "
                    "but only attention and MLPs can be compiled; leave out this flag"
                )
    packed.leave_uncompiled()
    for layer in decoder_layers(hf):
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
