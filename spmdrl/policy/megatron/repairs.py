"""Patches Megatron-core on every machine; `cpu.py` has additional patches for CPUs."""

import contextlib
import importlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from spmdrl.policy.megatron.host_adamw import HostAdamW

MODULES = (
    "models.gpt.gpt_layer_specs",
    "models.gpt.gpt_model",
    "pipeline_parallel.schedules",
    "dist_checkpointing",
    "dist_checkpointing.strategies.torch",
    "distributed.finalize_model_grads",
    "optimizer",
    "transformer.multi_latent_attention",
    "transformer.moe.moe_layer",
)
"""The megatron.core modules that a policy uses; they import all other modules that it needs."""
NOISE = (
    r"`torch\.distributed\.\w+` is deprecated",
    r"When using .* CUDA_DEVICE_MAX_CONNECTIONS",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
)
"""Patterns of warnings that Megatron repeats at every step but that users can ignore."""


@contextlib.contextmanager
def quiet():
    """Suppress all warnings inside this context, for example about missing optional libraries (Apex)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class OneCopy(TorchFunctionMode):
    """Saves memory in the constructor of Megatron's optimizer: `clone` is a no-op for bfloat16 tensors.

    The constructor creates float32 weights with `.clone().float()`, where the clone is redundant, because `float`
    copies too. The constructor does not clone bfloat16 tensors for any other purpose.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Implements `TorchFunctionMode`."""
        if func is torch.Tensor.clone and args[0].dtype == torch.bfloat16:
            return args[0]
        return func(*args, **(kwargs or {}))


def load() -> dict[str, Any]:
    """Import MODULES without warnings about missing libraries; return the modules by name."""
    with quiet():
        return {name: importlib.import_module(f"megatron.core.{name}") for name in MODULES}


def on_gpus() -> bool:
    """Return True if the ranks of this program use GPUs. Ranks can use CPUs even on a machine with GPUs."""
    return "nccl" in dist.get_backend() if dist.is_initialized() else torch.cuda.is_available()


def install() -> None:
    """Install the patches. Repeated calls have no effect."""
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    _engine(load())
    _rotary()
    _states()


def _engine(loaded: dict[str, Any]) -> None:
    """Correct Megatron's flags if TransformerEngine is not installed.

    Megatron sets the flags as if TransformerEngine were installed, because its own wrapper module can be imported.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
    mla = loaded["transformer.multi_latent_attention"]
    mla.HAVE_TE = isinstance(mla.TELinear, type)


def _rotary() -> None:
    """Apply rotary embeddings to packed tokens at the positions that `attention.pack_on_device` attached.

    Megatron's function reads the sequence lengths from the device in every layer, for both queries and keys.
    """
    from megatron.core.models.common.embeddings import rope_utils

    def rotate(t_SHd, cu_seqlens, freqs, *, cp_group=None, **more):
        freqs_S = freqs.index_select(0, cu_seqlens.positions)
        return rope_utils._apply_rotary_pos_emb_bshd(t_SHd.unsqueeze(1), freqs_S, **more).squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = rotate  # type: ignore[attr-defined]


def _states() -> None:
    """Use `HostAdamW` as Megatron's CPU-offloaded optimizer, and restore its state and step counts on load.

    Megatron itself would lose both the state and the step counts.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    sharded: Any = distrib_optimizer.DistributedOptimizer
    for module in (optimizer, distrib_optimizer):
        module.HybridDeviceOptimizer = HostAdamW  # type: ignore[attr-defined]
    inner = sharded._set_main_param_and_optimizer_states
    if getattr(inner, "_repaired", False):
        return

    @torch.no_grad()
    def restore(self, model_param, tensors):
        group, place = self.model_param_group_index_map[model_param]
        p = self.optimizer.param_groups[group]["params"][place]
        if isinstance(self.optimizer, HostAdamW):
            # `take` copies the values into the state in host memory. Megatron would replace the state with the loaded
            # tensors, on their device.
            return self.optimizer.take(p, tensors)
        # torch's AdamW counts steps per parameter, but a saved state has one count per group.
        state = self.optimizer.state[p]
        if "step" not in tensors and "step" in state:
            tensors = {**tensors, "step": state["step"].clone()}
        return inner(self, model_param, tensors)

    restore._repaired = True  # type: ignore[attr-defined]
    sharded._set_main_param_and_optimizer_states = restore
