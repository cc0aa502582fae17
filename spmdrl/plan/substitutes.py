"""Code that cannot run without a device or without values, and what runs in its place while a plan is made.

Everything here is what the libraries beneath the program do on a device: kernels of Triton and flash-attn, streams,
copies to the host, AdamW's fused step, gloo's and NCCL's groups. A substitute allocates what the original allocates and
computes nothing. It stays in force until the process ends, so plans are made in processes of their own.
"""

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork

from spmdrl.plan.on_host import as_host
from spmdrl.plan.paper import META, Paper
from spmdrl.spmd import devices, storage

COLLECTIVES = torch.library.Library("c10d", "IMPL")
"""Collectives over lists of tensors, which torch's simulated groups lack for tensors without values."""


def install(paper: Paper, kind: str) -> None:
    """Put the substitutes in place. kind: `cuda` or `cpu`, for which the meta device stands."""
    devices.STANDS_FOR["meta"] = kind
    COUNTED[:] = [paper]
    # FSDP and meshes look for the functions of a device's streams under its name.
    torch.meta = torch.cpu  # type: ignore[attr-defined]
    torch.cuda.current_device = lambda: META  # type: ignore[assignment]
    _numbers()
    _groups(paper)
    _shapes(paper)
    _fsdp()
    _optimizers(paper)
    _storages(paper)
    _push()
    _kernels(paper, kind)
    if kind == "cuda":
        _attention()
    _megatron()


def _numbers() -> None:
    make = torch.tensor

    @wraps(make)
    def tensor(data, *, device=None, **more):
        """Numbers that go to the device straight away pass by the host, where `Paper` learns them."""
        made = make(data, **more)
        return made if device is None else made.to(device)

    torch.tensor = tensor


def _groups(paper: Paper) -> None:
    make = dist.new_group

    def new_group(ranks=None, *args, backend=None, **more):
        """All groups are simulated, those on the host too."""
        return make(ranks, *args, **more)

    dist.new_group = new_group
    for name in ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "allreduce_coalesced_"):
        COLLECTIVES.impl(name, lambda *args: FakeWork().boxed(), "Meta")

    def messages(operations: list[dist.P2POp]) -> list[Any]:
        """Count messages that go out together."""
        for each in operations:
            if each.op.__name__ == "isend":
                paper.traffic.add("send", each.group or dist.group.WORLD, each.tensor.nbytes)
        return [FakeWork()]

    dist.batch_isend_irecv = messages
    dist.distributed_c10d._set_pg_timeout = lambda *args: None  # type: ignore[attr-defined]


def _shapes(paper: Paper) -> None:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    find = ShardingPropagator._propagate_tensor_meta_non_cached

    def aside(self, *args, **more):
        before, paper.aside = paper.aside, True
        try:
            return find(self, *args, **more)
        finally:
            paper.aside = before

    ShardingPropagator._propagate_tensor_meta_non_cached = aside


def _fsdp() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    begin = FSDPParamGroup.lazy_init

    def lazy_init(self) -> None:
        self.device = META
        for p in self.fsdp_params:
            p.device = META
        begin(self)

    reduce = _fsdp_param_group.foreach_reduce

    def foreach_reduce(*args: Any, **more: Any) -> tuple:
        """Copies of shards are summed on a stream of a device, whose end an event tells; here nothing runs."""
        found = reduce(*args, **more)
        return *found[:5], found[5] or object(), *found[6:]

    _fsdp_param_group.foreach_reduce = foreach_reduce
    FSDPParamGroup.lazy_init = lazy_init
    FSDPParamGroup._validate_no_meta_params = lambda self: None


def _optimizers(paper: Paper) -> None:
    adam: Any = importlib.import_module("torch.optim.adam")
    adam._device_dtype_check_for_fused = lambda *args, **more: None
    from spmdrl.policy.megatron.host_adamw import HostAdamW

    # Megatron has one optimizer for experts and another for the rest.
    numbers: dict[int, int] = {}

    def step(self: Any, closure: Any = None) -> None:
        numbers[id(self)] = sum(p.numel() for group in self.param_groups for p in group["params"])
        paper.host["optimizer on the host"] = 12 * sum(numbers.values())

    HostAdamW.step = step
    HostAdamW.fill = lambda self: None


class Tape:
    """Copies of storages on the host that keep only their size."""

    def __init__(self, paper: Paper, place: str, total: int):
        self.paper, self.place, self.total = paper, place, total
        paper.parked[place] += total

    def write(self, offset: int, raw: torch.Tensor) -> None:
        """Bytes leave the device."""
        self.paper.to_host += len(raw)

    def read(self, offset: int, raw: torch.Tensor) -> None:
        """Bytes come back."""
        self.paper.from_host += len(raw)

    def __del__(self) -> None:
        self.paper.parked[self.place] -= self.total


def _storages(paper: Paper) -> None:
    storage._tape = lambda place, total, device: None if place == "gone" else Tape(paper, place, total)  # type: ignore
    resize = torch.UntypedStorage.resize_

    @wraps(resize)
    def resize_(self, size):
        out = resize(self, size)
        if self.device == META:
            paper.resized(self)
        return out

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]


def _push() -> None:
    from spmdrl.weights import reshard

    reshard.digest = lambda tensor: torch.zeros((), dtype=torch.int64, device=tensor.device)
    reshard.Reshard._check = lambda self, flight: None


class Rows:
    """The row operations of `TritonRows`, which work in place and allocate nothing."""

    def borrow(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """See `TritonRows`."""
        return logits_CV

    def add_stats_(self, logits_CV, state_4C, *args: Any) -> None:
        """See `TritonRows`."""
        COUNTED[0].forget(state_4C)

    def logit_gradient(self, logits_CV, *args: Any, out_CV: torch.Tensor | None = None) -> torch.Tensor:
        """See `TritonRows`."""
        out = args[-1] if len(args) == 8 else out_CV
        return logits_CV if out is None else out


def _tagged(paper: Paper, tag: str, function: Callable) -> Callable:
    @wraps(function)
    def run(*args, **kwargs):
        with paper.tagged(tag):
            return function(*args, **kwargs)

    return run


def _kernels(paper: Paper, kind: str) -> None:
    from spmdrl_kernels import blocks, chunked, host, linear

    for part in (linear._LinearLogprob, chunked._ChunkedLoss):
        for name in ("forward", "backward"):
            setattr(part, name, staticmethod(_tagged(paper, "logits", getattr(part, name))))
    for module in (linear, chunked):
        module.check_values = lambda *args, **more: None  # type: ignore[attr-defined]
    # It compares numbers that are unknown on paper.
    chunked._Caller.check_separable = lambda *args: None  # type: ignore[method-assign]
    if kind == "cpu":
        blocks.place_of = lambda device: "cpu"
        as_host()
        return
    host.AVAILABLE = False
    # A GPU multiplies bfloat16 matrices into float32 (cuBLAS).
    blocks.widens = blocks.narrow
    blocks.product_ = _product
    for module in (linear, chunked):
        module.row_operations = lambda *args: Rows()  # type: ignore[attr-defined]


def _product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool) -> None:
    """Count a product that goes into `total` without a buffer between, as by cuBLAS."""
    COUNTED[0].flops += 2 * a.numel() * b.shape[1]


def _attention() -> None:
    from spmdrl.policy.attention import packed, varlen
    from spmdrl.policy.megatron import attention as of_megatron

    varlen._capability = lambda device: 9
    for module in (packed, of_megatron):
        module.installed = lambda: frozenset(("flash",))  # type: ignore[attr-defined]
    packed.attend = attend  # type: ignore[attr-defined]
    of_megatron.attend_runs = attend  # type: ignore[attr-defined]


def attend(kernel, q_QHd, k_NKd, v_NKe, runs, scale, window=None, softcap=None) -> torch.Tensor:
    """Stands in for `varlen.attend`: allocates and counts as flash-attn does."""
    if runs.key_rows is not None:
        k_NKd, v_NKe = k_NKd.index_select(0, runs.key_rows), v_NKe.index_select(0, runs.key_rows)
    return _Attention.apply(q_QHd, k_NKd, v_NKe, runs)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    """flash-attn over sequences: keeps its inputs, its output and one float32 for each query and head."""

    @staticmethod
    def forward(ctx, q, k, v, runs):
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32))
        ctx.flops = _add_flops(q, k, v, runs, 1.0)
        ctx.runs = runs
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, _, _ = ctx.saved_tensors
        _add_flops(q, k, v, ctx.runs, 2.5)
        # The gradient of the queries is summed in float32.
        summed = q.new_empty(q.shape, dtype=torch.float32)
        del summed
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


COUNTED: list[Paper] = []
"""The paper that is told of attention's operations; one for a process."""


def _add_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: Any, times: float) -> int:
    """Count causal attention: two products of half the square of each sequence."""
    ends_q, ends_k = COUNTED[0].told(runs.ends_q), COUNTED[0].told(runs.ends_k)
    if ends_q is None or ends_k is None:
        return 0
    queries, keys = ends_q.diff().double(), ends_k.diff().double()
    # The last query sees all keys, the first one keys - queries + 1.
    pairs = float((queries * (keys - (queries - 1) / 2)).sum())
    flops = int(2 * pairs * q.shape[1] * (q.shape[2] + v.shape[2]) * times)
    COUNTED[0].flops += flops
    return flops


def _megatron() -> None:
    from importlib.util import find_spec

    if find_spec("megatron") is None:
        return
    from spmdrl.policy.megatron import cpu, model

    cpu.CPU = META

    def dress(parameters: Any) -> None:
        names = {torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float16: "Half"}
        for p in parameters:
            p.type = f"torch.cuda.{names[p.dtype]}Tensor".__str__

    model.cpu.dress = dress
    settings = model.transformer_config

    def fixed(*args: Any, **more: Any) -> Any:
        """Stages do not tell each other the lengths of packs, which on paper are all of one length."""
        return settings(*args, **more, variable_seq_lengths=False)

    model.transformer_config = fixed
