"""Runs Megatron-core on CPUs.

Megatron calls torch functions for CUDA devices, streams and RNG states. This module replaces the global name `torch` in
every loaded Megatron module with a substitute that uses the CPU in these functions and forwards all other names to
torch. torch itself is not modified, because other libraries in the process need it. The substitute does not change
results, because stream operations have no effect on them. A few Megatron functions that need a GPU or are slow on CPU
are replaced, too. If ranks use GPUs, this module does nothing.
"""

import contextlib
import functools
import importlib
import sys
import types
from typing import Any

import torch

from spmdrl.policy.megatron import ranks, repairs
from spmdrl_kernels.host import host_linear, takes

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")
"""torch functions that Megatron calls with a CUDA device or pinned memory, which the substitute ignores."""


class _Nothing:
    """A stand-in for CUDA streams and events whose operations are no-ops."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: _Nothing()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


class _Cuda(types.ModuleType):
    """A substitute for torch.cuda with CPU versions of the functions that Megatron uses."""

    Stream = Event = _Nothing
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    manual_seed = staticmethod(torch.manual_seed)
    current_device = staticmethod(lambda: CPU)
    set_device = synchronize = empty_cache = staticmethod(lambda *args: None)
    stream = staticmethod(lambda stream: contextlib.nullcontext())
    current_stream = default_stream = staticmethod(lambda *args: _Nothing())

    def __getattr__(self, name):
        return getattr(torch.cuda, name)


class _Distributed(ranks.Distributed):
    """A substitute for torch.distributed with two collectives over tensors of unequal size, which gloo lacks.

    Megatron uses these collectives for expert tensor parallelism (`--parallel.etp`).
    """

    @staticmethod
    def all_gather(tensor_list, tensor, group=None, async_op=False):
        """Implements `torch.distributed.all_gather` for tensors that can differ in their first dimension."""
        if all(part.shape == tensor_list[0].shape for part in tensor_list):
            return torch.distributed.all_gather(tensor_list, tensor, group=group, async_op=async_op)
        mine = tensor.new_zeros(max(map(len, tensor_list)), *tensor.shape[1:])
        mine[: len(tensor)] = tensor
        padded = [torch.empty_like(mine) for _ in tensor_list]
        torch.distributed.all_gather(padded, mine, group=group)
        for part, whole in zip(tensor_list, padded, strict=True):
            part.copy_(whole[: len(part)])

    @staticmethod
    def reduce_scatter(output, input_list, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        """Implements `torch.distributed.reduce_scatter` for tensors that can differ in their first dimension."""
        if all(part.shape == input_list[0].shape for part in input_list):
            return torch.distributed.reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        whole = torch.cat(input_list)
        torch.distributed.all_reduce(whole, op=op, group=group)
        output.copy_(whole.split(list(map(len, input_list)))[torch.distributed.get_rank(group)])


class _Torch(ranks.Torch):
    """The substitute for torch in the modules of megatron.core."""

    cuda = _Cuda("torch.cuda")
    distributed = _Distributed("torch.distributed")


def _on_cpu(make: Any) -> Any:
    @functools.wraps(make)
    def on_cpu(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = CPU if str(kwargs["device"]).startswith("cuda") else kwargs["device"]
        return make(*args, **kwargs)

    return staticmethod(on_cpu)


for _name in FACTORIES:
    setattr(_Torch, _name, _on_cpu(getattr(torch, _name)))
STAND_IN = _Torch("torch")


def install() -> None:
    """Make megatron.core run on CPU; a no-op if ranks use GPUs. Repeated calls have no effect."""
    if repairs.on_gpus():
        return
    with repairs.quiet():
        # Megatron would compile each of its small functions on first use, which takes seconds and gives no speedup on
        # CPU.
        importlib.import_module("megatron.core.jit").disable_jit_fuser()
    repairs.load()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = STAND_IN  # type: ignore[attr-defined]
    _random_states()
    _linear()
    _experts()
    _optimizer()
    _messages()


def _random_states() -> None:
    import megatron.core.tensor_parallel.random as random

    module: Any = random
    module._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)

    @contextlib.contextmanager
    def fork(self, name=random._MODEL_PARALLEL_RNG_TRACKER_NAME):
        # Megatron's version would warn at every use that the host's RNG state changed, which is intended on CPU.
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)

    module.CudaRNGStatesTracker.fork = fork


def _linear() -> None:
    from megatron.core.tensor_parallel import layers

    module: Any = layers
    own = module.linear_with_grad_accumulation_and_async_allreduce
    if getattr(own, "by_host", False):
        return

    # functools.wraps copies the attributes that Megatron reads from this function.
    @functools.wraps(own)
    def linear(input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, **more):
        # Only calls without collectives are plain matrix products, which `host_linear` can compute.
        special = allreduce_dgrad or sequence_parallel or more.get("grad_output_buffer") is not None
        if special or not takes(input, weight):
            return own(input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, **more)
        return host_linear(input, weight, bias)

    linear.by_host = True  # type: ignore[attr-defined]
    module.linear_with_grad_accumulation_and_async_allreduce = linear


def _experts() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor, as_numpy=False, record_stream=False):
        # Callers need the sizes as numpy arrays; Megatron's version only converts them when copying from a GPU.
        tensor = tensor.cpu() if torch.is_tensor(tensor) else tensor
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        module.maybe_move_tensor_to_cpu = to_host  # type: ignore[attr-defined]


def _optimizer() -> None:
    from megatron.core.optimizer import clip_grads, optimizer

    @torch.no_grad()
    def clip(parameters, max_norm, total_norm, use_decoupled_grad=False):
        # Megatron's version cannot be used, because it asserts by type name that gradients are CUDA tensors.
        name = "decoupled_grad" if use_decoupled_grad else "grad"
        factor = max_norm / (total_norm + 1e-6)
        for p in parameters:
            if factor < 1.0 and getattr(p, name, None) is not None:
                getattr(p, name).mul_(factor)

    for module in (clip_grads, optimizer):
        module.clip_grad_by_total_norm_fp32 = clip  # type: ignore[attr-defined]


def _messages() -> None:
    from megatron.core.pipeline_parallel import p2p_communication

    def exchange(*, group, prev_pipeline_rank, next_pipeline_rank, **tensors):
        """Start sends and receives between neighbouring stages; return work handles by name."""
        # With two stages, Megatron's version cannot be used: it sends in one direction over the default group, which
        # includes ranks without Megatron models.
        work = {}
        # The next and the previous stage can be the same rank, so receives must be in the order of that rank's sends.
        for name, peer in (
            ("send_next", next_pipeline_rank),
            ("recv_prev", prev_pipeline_rank),
            ("send_prev", prev_pipeline_rank),
            ("recv_next", next_pipeline_rank),
        ):
            begin = torch.distributed.isend if name.startswith("send") else torch.distributed.irecv
            if tensors[f"tensor_{name}"] is not None:
                work[name] = begin(tensors[f"tensor_{name}"], peer, group=group)
        return work

    p2p_communication._p2p_ops = exchange


def dress(parameters: Any) -> None:
    """Make `type()` of CPU parameters return CUDA type names, which Megatron's optimizers group parameters by."""
    for p in parameters:
        if not p.is_cpu:
            continue
        # Use a bound method of a string, which can be pickled with the parameter, unlike a lambda.
        p.type = torch.Tensor.type(p).replace("torch.", "torch.cuda.", 1).__str__
