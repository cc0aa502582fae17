"""Fixes of Megatron-core for every machine; further ones for CPUs are in `cpu.py`."""

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
"""The modules of megatron.core that a policy uses; importing these imports the rest."""
NOISE = (
    r"`torch\.distributed\.\w+` is deprecated",
    r"When using .* CUDA_DEVICE_MAX_CONNECTIONS",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
)
"""Warnings at every step on which no user can act."""


@contextlib.contextmanager
def quiet():
    """Suppress Megatron's warnings that Apex and TransformerEngine are missing, which is intended here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class OneCopy(TorchFunctionMode):
    """Makes the optimizer's float32 weights from a rank's parameters without a second copy of each in bfloat16.

    Megatron calls `.clone().float()` on a part of each parameter, where `float` alone already copies. Only for the
    constructor of its optimizer, which makes no other copy of a bfloat16 tensor.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """See torch."""
        if func is torch.Tensor.clone and args[0].dtype == torch.bfloat16:
            return args[0]
        return func(*args, **(kwargs or {}))


def load() -> dict[str, Any]:
    """Import MODULES without their warnings about missing libraries; return them by name."""
    with quiet():
        return {name: importlib.import_module(f"megatron.core.{name}") for name in MODULES}


def on_gpus() -> bool:
    """Return True if this program's ranks work on GPUs; a machine with GPUs may run a program on its CPUs."""
    return "nccl" in dist.get_backend() if dist.is_initialized() else torch.cuda.is_available()


def install() -> None:
    """Install the fixes. May be called again."""
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    _engine(load())
    _states()


def _engine(loaded: dict[str, Any]) -> None:
    """Fix guards that look for Megatron's own TransformerEngine file, which exists even without TransformerEngine."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
    mla = loaded["transformer.multi_latent_attention"]
    mla.HAVE_TE = isinstance(mla.TELinear, type)


def _states() -> None:
    """Make loads restore step counts, and the state of AdamW on the host, both of which Megatron would lose."""
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
            # Megatron would replace the state by parts of the tensors it read, on whatever device.
            return self.optimizer.take(p, tensors)
        # torch's AdamW counts steps per parameter; saved states have one count per group.
        state = self.optimizer.state[p]
        if "step" not in tensors and "step" in state:
            tensors = {**tensors, "step": state["step"].clone()}
        return inner(self, model_param, tensors)

    restore._repaired = True  # type: ignore[attr-defined]
    sharded._set_main_param_and_optimizer_states = restore
