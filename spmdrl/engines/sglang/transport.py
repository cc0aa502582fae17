"""Sends weights to the SGLang server process, over shared memory or by broadcast."""

import mmap
import os
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from spmdrl.engines.sglang.process import Process
from spmdrl.spmd.checksum import digest
from spmdrl.spmd.mesh import apart_from_default
from spmdrl.weights.reshard import Box, inside

ALIGN = 64
"""Alignment of tensors in a buffer, in bytes."""


def entries(tensors: dict[str, torch.Tensor]) -> list[dict]:
    """Return the name, dtype and shape of each tensor, and its offset in a buffer that stores them consecutively."""
    out, at = [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        out.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "at": at, "bytes": tensor.nbytes})
        at += -(-tensor.nbytes // ALIGN) * ALIGN
    return out


def fetched(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors in host memory. GPU tensors are copied to pinned memory, with a single synchronization."""
    if not tensors or tensors[0].device.type == "cpu":
        return tensors
    sizes = [-(-x.nbytes // ALIGN) * ALIGN for x in tensors]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    out = []
    for place, x in zip(flat.split(sizes), tensors, strict=True):
        out.append(place[: x.nbytes].view(x.dtype).view(x.shape))
        out[-1].copy_(x, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return out


class SharedMemory:
    """Passes weights through unnamed shared memory, which this rank's scheduler process maps.

    The OS frees this memory even if the job is killed. Slices that the engine does not read are not written, so they
    use no memory.
    """

    def __init__(self):
        self.fd = os.memfd_create("spmdrl-weights")

    def put(self, tensors: dict[str, torch.Tensor], parts: dict[str, list[Box]]) -> dict:
        """Write one bucket, and return the message for the process that reads it.

        parts: for each tensor, the boxes (index ranges in every dimension) that the process reads.
        """
        layout = entries(tensors)
        os.ftruncate(self.fd, 0)
        if layout:
            nbytes = layout[-1]["at"] + layout[-1]["bytes"]
            os.ftruncate(self.fd, nbytes)
            flat = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)
        arrived = iter(fetched([inside(x, box) for name, x in tensors.items() for box in parts[name]]))
        for entry, (name, tensor) in zip(layout, tensors.items(), strict=True):
            there = flat[entry["at"] : entry["at"] + entry["bytes"]].view(tensor.dtype).view(tensor.shape)
            entry["parts"] = []
            for box in parts[name]:
                part = next(arrived)
                inside(there, box).copy_(part)
                entry["parts"].append([box, int(digest(part))])
        return {"file": f"/proc/{os.getpid()}/fd/{self.fd}", "entries": layout}

    def done(self) -> None:
        """Return the memory to the OS."""
        os.ftruncate(self.fd, 0)


class Broadcast:
    """Broadcasts weights from the rank to the engine's processes, which must not use the rank's GPU."""

    def __init__(self, tp: int, backend: str, timeout: float):
        self.tp, self.backend, self.timeout = tp, backend, timedelta(seconds=timeout)
        self.group: dist.ProcessGroup | None = None

    def _join(self, process: Process) -> dist.ProcessGroup:
        store = dist.TCPStore("127.0.0.1", 0, 1 + self.tp, True, self.timeout, wait_for_workers=False)
        process.send("join", host="127.0.0.1", port=store.port, backend=self.backend)
        # SGLang's processes make the same calls. torch has no public function that creates a group with processes of
        # another program.
        with apart_from_default():
            group, _ = distributed_c10d._new_process_group_helper(
                1 + self.tp,
                0,
                [],
                distributed_c10d.Backend(self.backend),
                dist.PrefixStore("spmdrl", store),
                group_name=distributed_c10d.GroupName("spmdrl"),
                timeout=self.timeout,
            )
        process.answer()
        return cast(dist.ProcessGroup, group)

    def push(self, process: Process, tensors: dict[str, torch.Tensor]) -> None:
        """Broadcast one bucket. Raises RuntimeError if the engine received different bytes."""
        self.group = self.group or self._join(process)
        layout = entries(tensors)
        for entry, part in zip(layout, fetched(list(tensors.values())), strict=True):
            entry["hash"] = int(digest(part))
        process.send("receive", entries=layout)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        # `--run.lockstep-debug` cannot track collectives with ranks of another program.
        with _disable_current_modes():
            for tensor in tensors.values():
                try:
                    self.group.broadcast([tensor.contiguous()], options).wait()
                except RuntimeError as error:
                    process.raise_if_dead(error)
                    raise
        process.answer()

    def done(self) -> None:
        """No-op, because the group is kept for the next weight update."""
