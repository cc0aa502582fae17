"""What is put right in Megatron-core itself, on every machine; what a CPU needs besides is in `cpu.py`.

_steps    its distributed optimizer reads a saved state into torch's AdamW, whose counts of steps the state lacks:
          active everywhere
_engine   routers and latent attention ask for names that only TransformerEngine brings: active everywhere
host_adamw.py  its optimizer on the host cannot be resumed: another stands in its place, active everywhere
NOISE     warnings of it that nobody can act on are left out: active everywhere
"""

import contextlib
import importlib
import warnings
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.policy.megatron import host_adamw

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
"""What a policy uses of megatron.core; these bring in the rest."""
NOISE = (
    r"`torch\.distributed\.\w+` is deprecated",
    r"When using .* CUDA_DEVICE_MAX_CONNECTIONS",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
)
"""Warnings of every step that its user can do nothing about."""


@contextlib.contextmanager
def quiet():
    """Megatron says at import and construction that Apex and TransformerEngine are missing; that is meant here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load() -> dict[str, Any]:
    """MODULES by name, imported without what they say of missing libraries."""
    with quiet():
        return {name: importlib.import_module(f"megatron.core.{name}") for name in MODULES}


def on_gpus() -> bool:
    """Whether the ranks of this program work on GPUs. A machine that has some may run a program on its CPUs."""
    return "nccl" in dist.get_backend() if dist.is_initialized() else torch.cuda.is_available()


def install() -> None:
    """Put right what this program needs. May be called again."""
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    _engine(load())
    _steps()
    host_adamw.install()


def _engine(loaded: dict[str, Any]) -> None:
    """Everywhere: what is guarded by TransformerEngine's file in Megatron, which is there without TransformerEngine."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
    mla = loaded["transformer.multi_latent_attention"]
    mla.HAVE_TE = isinstance(mla.TELinear, type)


def _steps() -> None:
    """Everywhere: AdamW's counts of steps, which saved states lack, come back from them."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    inner = DistributedOptimizer._set_main_param_and_optimizer_states
    if getattr(inner, "_counts_steps", False):
        return

    @torch.no_grad()
    def restore(self, model_param, tensors):
        # torch's AdamW counts the steps of each parameter, where saved states have one count of a group.
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        if "step" not in tensors and "step" in state:
            tensors = {**tensors, "step": state["step"].clone()}
        return inner(self, model_param, tensors)

    restore._counts_steps = True  # type: ignore[attr-defined]
    DistributedOptimizer._set_main_param_and_optimizer_states = restore
