"""Runs Megatron-core on CPUs.

Megatron calls torch for CUDA devices, streams and random states by name. Here the global name `torch` of each of its
loaded modules is replaced by a substitute that uses the CPU and forwards everything else; torch itself is unchanged,
because other libraries in this process depend on it. Only streams are omitted, so the numbers are the same. Nothing
here is active if ranks work on GPUs.
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
"""Functions of torch that Megatron calls with a CUDA device or pinned memory."""


class _Nothing:
    """Replaces a CUDA stream or event; every operation on it does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: _Nothing()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


class _Cuda(types.ModuleType):
    """The functions of torch.cuda that Megatron uses, on the CPU."""

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
    """torch.distributed with the two collectives over parts of unequal size that gloo lacks.

    Megatron's experts use them if their columns are divided (`--parallel.etp`).
    """

    @staticmethod
    def all_gather(tensor_list, tensor, group=None, async_op=False):
        """See torch; the parts may differ in their first dimension, and all sizes are known on every rank."""
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
        """See torch; the parts may differ in their first dimension, and all sizes are known on every rank."""
        if all(part.shape == input_list[0].shape for part in input_list):
            return torch.distributed.reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        whole = torch.cat(input_list)
        torch.distributed.all_reduce(whole, op=op, group=group)
        output.copy_(whole.split(list(map(len, input_list)))[torch.distributed.get_rank(group)])


class _Torch(ranks.Torch):
    """Replaces torch in the modules of megatron.core."""

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
    """Make megatron.core run on this machine's CPU; does nothing if ranks work on GPUs. May be called again."""
    if repairs.on_gpus():
        return
    with repairs.quiet():
        # Megatron would compile each of its small functions at first use, which takes seconds and gains nothing here.
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
        # Megatron's own version warns at every use that the host's random state changed; here it is the device's.
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

    # wraps copies the attributes, which Megatron looks up under this name.
    @functools.wraps(own)
    def linear(input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, **more):
        # Without a collective it is a plain product.
        special = allreduce_dgrad or sequence_parallel or more.get("grad_output_buffer") is not None
        if special or not takes(input, weight):
            return own(input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, **more)
        return host_linear(input, weight, bias)

    linear.by_host = True  # type: ignore[attr-defined]
    module.linear_with_grad_accumulation_and_async_allreduce = linear


def _experts() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor, as_numpy=False, record_stream=False):
        # Callers expect split sizes as numpy; Megatron's own version converts them only when it copies from a GPU.
        tensor = tensor.cpu() if torch.is_tensor(tensor) else tensor
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        module.maybe_move_tensor_to_cpu = to_host  # type: ignore[attr-defined]


def _optimizer() -> None:
    from megatron.core.optimizer import clip_grads, optimizer

    @torch.no_grad()
    def clip(parameters, max_norm, total_norm, use_decoupled_grad=False):
        # Megatron's own version asserts that gradients are CUDA tensors by the name of their type.
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
        """Start the messages to and from the neighbouring stages, and return their work handles by name."""
        # Between two stages Megatron's own version sends one way over the default group, which has ranks without one.
        work = {}
        # A stage's next and previous may be the same rank: receive in the order in which that rank sends.
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
    """Give parameters on a CPU the type names by which Megatron's optimizers sort them."""
    for p in parameters:
        if not p.is_cpu:
            continue
        # Bound to a string, so that a copy of the parameter can be pickled.
        p.type = torch.Tensor.type(p).replace("torch.", "torch.cuda.", 1).__str__
