"""Megatron-core where there is no GPU.

Megatron asks torch for CUDA devices, streams and random states by name. Here every loaded module of it gets, in place
of its global name `torch`, a stand-in that answers for the CPU and passes everything else through; torch itself stays
as it is, for other libraries in this process depend on it. Nothing is left out but streams, so the numbers are the
same.
"""

import contextlib
import functools
import importlib
import sys
import types
import warnings
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")
"""Functions of torch that Megatron calls with a CUDA device or pinned memory."""
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


class _Nothing:
    """A CUDA stream or event: whatever is done with it does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: _Nothing()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


class _Cuda(types.ModuleType):
    """torch.cuda, as far as Megatron uses it, on the CPU."""

    Stream = Event = _Nothing
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    manual_seed = staticmethod(torch.manual_seed)
    current_device = staticmethod(lambda: CPU)
    set_device = synchronize = empty_cache = staticmethod(lambda *args: None)
    stream = staticmethod(lambda stream: contextlib.nullcontext())
    current_stream = default_stream = staticmethod(lambda *args: _Nothing())

    def __getattr__(self, name):
        return getattr(torch.cuda, name)


class _Torch(types.ModuleType):
    """torch, as megatron.core sees it."""

    cuda = _Cuda("torch.cuda")

    def __getattr__(self, name):
        return getattr(torch, name)


def _on_cpu(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = CPU if str(kwargs["device"]).startswith("cuda") else kwargs["device"]
        return make(*args, **kwargs)

    return staticmethod(made)


for _name in FACTORIES:
    setattr(_Torch, _name, _on_cpu(getattr(torch, _name)))
STAND_IN = _Torch("torch")


@contextlib.contextmanager
def quiet():
    """Megatron says at import and construction that Apex and TransformerEngine are missing; that is meant here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def install() -> None:
    """Make megatron.core run on this machine's CPU; almost nothing where there is a GPU. May be called again."""
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    with quiet():
        if not torch.cuda.is_available():
            # Its small functions would each be compiled at first use, which takes seconds and gains nothing here.
            importlib.import_module("megatron.core.jit").disable_jit_fuser()
        loaded = {name: importlib.import_module(f"megatron.core.{name}") for name in MODULES}
    _steps()
    if torch.cuda.is_available():
        _shards()
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = STAND_IN  # type: ignore[attr-defined]
    _random_states()
    _experts()
    _optimizer()
    # Guarded by the presence of TransformerEngine's file in Megatron, not of TransformerEngine.
    mla: Any = loaded["transformer.multi_latent_attention"]
    mla.HAVE_TE = isinstance(mla.TELinear, type)


def _random_states() -> None:
    import megatron.core.tensor_parallel.random as random

    module: Any = random
    module._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)

    @contextlib.contextmanager
    def fork(self, name=random._MODEL_PARALLEL_RNG_TRACKER_NAME):
        # Megatron's own warns at every use that the host's random state moved: here it is the device's.
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)

    module.CudaRNGStatesTracker.fork = fork


def _experts() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor, as_numpy=False, record_stream=False):
        # Split sizes are wanted as numpy; Megatron's own makes them so only on their way from a GPU.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        module.maybe_move_tensor_to_cpu = to_host  # type: ignore[attr-defined]
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def _optimizer() -> None:
    from megatron.core.optimizer import clip_grads, optimizer

    @torch.no_grad()
    def clip(parameters, max_norm, total_norm, use_decoupled_grad=False):
        # Megatron's own asserts that gradients are CUDA tensors by the name of their type.
        name = "decoupled_grad" if use_decoupled_grad else "grad"
        factor = max_norm / (total_norm + 1e-6)
        for p in parameters:
            if factor < 1.0 and getattr(p, name, None) is not None:
                getattr(p, name).mul_(factor)

    for module in (clip_grads, optimizer):
        module.clip_grad_by_total_norm_fp32 = clip  # type: ignore[attr-defined]


def _steps() -> None:
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


def dress(parameters: Any) -> None:
    """Give parameters the type names that Megatron's optimizers sort them by; nothing where there is a GPU."""
    if torch.cuda.is_available():
        return
    for p in parameters:
        # Bound to a string, so that a copy of the parameter can be pickled.
        p.type = torch.Tensor.type(p).replace("torch.", "torch.cuda.", 1).__str__
