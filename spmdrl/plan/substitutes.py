"""Replaces code that needs a device or real tensor values, neither of which a plan has.

This file replaces streams, copies to the host, AdamW's fused step, and gloo and NCCL process groups; `kernels.py`
replaces Triton and flash-attn kernels. A substitute allocates the same memory as the original but computes nothing.
Substitutes stay installed until the process exits, so each rank is simulated in its own process.
"""

import importlib
import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork

from spmdrl.plan import kernels
from spmdrl.plan.numbers import META
from spmdrl.plan.paper import Paper
from spmdrl.spmd import devices, storage

COLLECTIVES = torch.library.Library("c10d", "IMPL")
"""torch library that adds collectives over lists of meta tensors, which torch's fake process groups do not support."""


def install(paper: Paper, kind: str) -> None:
    """Install the substitutes. kind: `cuda` or `cpu`, the device type that the meta device stands in for."""
    devices.STANDS_FOR["meta"] = kind
    # FSDP and device meshes look up stream functions in the device's torch module, such as torch.cuda.
    torch.meta = torch.cpu  # type: ignore[attr-defined]
    torch.cuda.current_device = lambda: META  # type: ignore[assignment]
    _numbers()
    _groups(paper)
    _shapes(paper)
    _fsdp(paper)
    _optimizers(paper)
    _storages(paper)
    _push()
    _adapters()
    _remote()
    _tiles()
    kernels.install(paper, kind)
    _megatron()


def _numbers() -> None:
    make = torch.tensor

    @wraps(make)
    def tensor(data, *, device=None, **more):
        """Create the tensor on the host and then move it to the device, so that `Paper` can record its values."""
        made = make(data, **more)
        return made if device is None else made.to(device)

    torch.tensor = tensor


def _groups(paper: Paper) -> None:
    make = dist.new_group

    def new_group(ranks=None, *args, backend=None, **more):
        """Create every process group, including gloo groups, as a fake one."""
        return make(ranks, *args, **more)

    dist.new_group = new_group
    for name in ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "allreduce_coalesced_"):
        COLLECTIVES.impl(name, lambda *args: FakeWork().boxed(), "Meta")

    def messages(operations: list[dist.P2POp]) -> list[Any]:
        """Count the bytes sent by a batch of point-to-point messages."""
        for each in operations:
            if each.op.__name__ == "isend":
                paper.traffic.add("send", each.group or dist.group.WORLD, each.tensor.nbytes)
        return [FakeWork()]

    dist.batch_isend_irecv = messages
    dist.distributed_c10d._set_pg_timeout = lambda *args: None  # type: ignore[attr-defined]


FINDS_SHAPES = "_propagate_tensor_meta_non_cached"
"""Name of the `ShardingPropagator` method that computes DTensor output shapes."""


def _shapes(paper: Paper) -> None:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    setattr(ShardingPropagator, FINDS_SHAPES, aside(paper, getattr(ShardingPropagator, FINDS_SHAPES)))


def aside(paper: Paper, function: Callable) -> Callable:
    """Wrap a function so that its tensors, which a real rank does not allocate, are not counted."""

    @wraps(function)
    def run(*args, **more):
        before, paper.aside = paper.aside, True
        try:
            return function(*args, **more)
        finally:
            paper.aside = before

    return run


def _fsdp(paper: Paper) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    begin = FSDPParamGroup.lazy_init

    def lazy_init(self) -> None:
        self.device = META
        for p in self.fsdp_params:
            p.device = META
        begin(self)

    reduce = _fsdp_param_group.foreach_reduce

    def foreach_reduce(*args: Any, **more: Any) -> tuple:
        """Reduce gradients. The fake all-reduce returns no CUDA event, so use a plain object instead."""
        given = signature(reduce).bind(*args, **more).arguments
        given["reduce_scatter_comm"] = Buffers(paper, given)
        found = reduce(**given)
        return *found[:5], found[5] or object(), *found[6:]

    keep = FSDPParam.to_accumulated_grad_if_needed

    def to_accumulated_grad_if_needed(self) -> None:
        """Tag unsharded gradients, which stay allocated until a micro-batch whose backward pass reduces them."""
        with paper.tagged("unsharded gradients"):
            keep(self)
        # A gradient that already has the reduce dtype is not copied, so it is not tagged yet.
        paper.retag([x for x in [self._unsharded_param.grad] if x is not None], "unsharded gradients")

    FSDPParam.to_accumulated_grad_if_needed = to_accumulated_grad_if_needed
    _fsdp_param_group.foreach_reduce = foreach_reduce
    FSDPParamGroup.lazy_init = lazy_init
    FSDPParamGroup._validate_no_meta_params = lambda self: None


class Buffers:
    """Allocates reduce-scatter buffers. The output becomes the sharded gradients or is added to them."""

    def __init__(self, paper: Paper, given: dict[str, Any]):
        """given: arguments of FSDP's `foreach_reduce`, by name."""
        self.paper, self.comm = paper, given["reduce_scatter_comm"]
        kept = given["partial_reduce_output"] is not None and not given["all_reduce_grads"]
        first = all(p.sharded_param.grad is None for p in given["fsdp_params"])
        self.tags = iter((paper.tag, "sharded gradients" if first and not kept else paper.tag))

    def allocate(self, *args: Any, **more: Any) -> torch.Tensor:
        """Allocate the input buffer on the first call and the output buffer on the second."""
        with self.paper.tagged(next(self.tags)):
            return self.comm.allocate(*args, **more)

    def __call__(self, *args: Any, **more: Any) -> Any:
        """Run the reduce-scatter."""
        return self.comm(*args, **more)


def _optimizers(paper: Paper) -> None:
    adam: Any = importlib.import_module("torch.optim.adam")
    adam._device_dtype_check_for_fused = lambda *args, **more: None
    from spmdrl.policy.megatron.host_adamw import HostAdamW

    # Megatron has separate optimizers for experts and for all other parameters, so sum their sizes.
    numbers: dict[int, int] = {}

    def step(self: Any, closure: Any = None) -> None:
        numbers[id(self)] = sum(p.numel() for group in self.param_groups for p in group["params"])
        paper.host["optimizer on the host"] = 12 * sum(numbers.values())

    HostAdamW.step = step
    HostAdamW.fill = lambda self: None


class Tape:
    """Stands in for the host or disk copy of offloaded storages, but records only the copy's size."""

    def __init__(self, paper: Paper, place: str, total: int):
        self.paper, self.place, self.total = paper, place, total
        paper.parked[place] += total

    def write(self, offset: int, raw: torch.Tensor) -> None:
        """Count bytes copied from the device."""
        self.paper.to_host += len(raw)

    def read(self, offset: int, raw: torch.Tensor) -> None:
        """Count bytes copied back to the device."""
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


def _adapters() -> None:
    from spmdrl.policy.fsdp import lora
    from spmdrl.spmd.exchange import all_gather_rows

    def gathered(named: Any, world: Any) -> dict[str, torch.Tensor]:
        """Gather adapters as if every rank held as many rows as this one; other ranks might hold fewer."""
        mine = torch.cat([lora.local(p).flatten() for _, p in named]) if named else torch.empty(0, device=META)
        everyone = all_gather_rows(mine[:, None], world.shard_group)
        whole = {name: mine.new_empty(p.shape) for name, p in named}
        del everyone
        return whole

    lora.gathered = gathered


def _remote() -> None:
    from spmdrl.policy.remote import RemotePolicy

    def logprobs(self: Any, batch: Any, temperature: float, second: Any = "entropy") -> Any:
        """Return the results of this rank's model, or zeros if only other ranks hold the model and send results."""
        if self.model is not None:
            return self.model.logprobs(batch, temperature, second)
        first, second = torch.zeros(2, batch.n_tokens, dtype=self.dtype)
        return first, second

    RemotePolicy.logprobs = logprobs


def _tiles() -> None:
    """Replace the tiled families' search for tiles of padding, which reads pixels; a plan has no such tiles."""
    for family, module in (("Idefics3", "idefics3"), ("SmolVLM", "smolvlm")):
        # The model is built before substitutes are installed, so its module is loaded.
        code = sys.modules.get(f"transformers.models.{module}.modeling_{module}")
        if code is not None:
            getattr(code, f"{family}Model").get_image_features = _tile_features


def _tile_features(model: Any, pixel_values: torch.Tensor, pixel_attention_mask: Any, return_dict: bool) -> Any:
    # The search copies the tiles, which stay until the tower has run.
    pixels, kept = pixel_values[0].to(model.dtype).clone(), pixel_attention_mask.clone()
    side = pixels.shape[-1] // model.config.vision_config.patch_size
    seen = torch.ones(len(pixels), side, side, dtype=torch.bool, device=pixels.device)
    out = model.vision_model(pixel_values=pixels, patch_attention_mask=seen, return_dict=return_dict)
    out.pooler_output = model.connector(out.last_hidden_state)
    del kept
    return out


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
        """Return the config for fixed-length micro-batches, as used in a plan, so that stages exchange no lengths."""
        return settings(*args, **more, variable_seq_lengths=False)

    model.transformer_config = fixed
