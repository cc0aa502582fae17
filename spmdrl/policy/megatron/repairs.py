"""What is put right in Megatron-core itself, on every machine; what a CPU needs besides is in `cpu.py`.

_steps    its distributed optimizer reads a saved state into torch's AdamW, whose counts of steps the state lacks:
          active everywhere
_engine   routers and latent attention ask for names that only TransformerEngine brings: active everywhere
_shards   its optimizer on the host (`--policy.host-optimizer`) finds no gradients of float32 parameters: active where
          ranks work on GPUs, for elsewhere that optimizer is not used
NOISE     warnings of it that nobody can act on are left out: active everywhere
"""

import contextlib
import importlib
import warnings
from typing import Any

import torch
import torch.distributed as dist

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
    if on_gpus():
        _shards()


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


def _shards() -> None:
    """Where there is a GPU: float32 parameters keep their gradients for an optimizer on the host."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    made: Any = DistributedOptimizer
    inner = made._build_model_and_main_param_groups
    if getattr(inner, "_retains", False):
        return

    def build(cls, *args):
        groups = inner.__func__(cls, *args)
        for shard in (p for group in groups[3] for p in group):
            # Parts of float32 parameters are views, which the optimizer on the host takes for nobody's.
            shard.retain_grad()
        return groups

    build._retains = True  # type: ignore[attr-defined]
    made._build_model_and_main_param_groups = classmethod(build)
