"""Measures all-reduce and all-to-all between ranks, and checks their results and the nodes' clocks.

Bandwidth is the bus bandwidth of nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md):
bytes x 2 (n - 1) / n for an all-reduce and bytes x (n - 1) / n for an all-to-all among n ranks, per second.
"""

import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

MIB = 1 << 20
REPEATS = 3


@dataclass
class Measured:
    """Measurements of a rank group. Speeds are in 1e9 bytes per second."""

    ranks: int
    backend: str
    all_reduce: float = 0.0
    all_to_all: float = 0.0
    clock: float = 0.0
    """Maximum difference between two ranks' clocks, in seconds, minus the duration of the measurement."""
    error: str = ""


def measure(group, device, mib: int) -> Measured:
    """Measure collectives across all ranks of a group; each rank returns the slowest rank's speeds. Collective.

    group: a process group whose backend supports `device`. device: buffer device. mib: buffer size in MiB.
    """
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    items = max(size, mib * MIB // 4 // size * size)
    mine = torch.full((items,), float(rank + 1), device=device)
    out = torch.empty_like(mine)
    total = size * (size + 1) / 2

    def timed(run) -> float:
        best = float("inf")
        for _ in range(REPEATS):
            dist.barrier(group)
            began = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return best

    exchange = timed(lambda: dist.all_to_all_single(out, mine, group=group))
    wrong = [part for part, chunk in enumerate(out.chunk(size)) if not bool((chunk == part + 1).all())]
    # Only the first all-reduce is checked, because it overwrites its input.
    dist.all_reduce(mine, group=group)
    summed = bool((mine == total).all())
    reduce = timed(lambda: dist.all_reduce(mine, group=group))
    slowest = torch.tensor([reduce, exchange], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    reduce, exchange = slowest.tolist()
    moved = items * 4 * (size - 1) / size / 1e9
    found = Measured(size, dist.get_backend(group), 2 * moved / reduce, moved / exchange, _skew(group, device))
    if wrong or not summed:
        found.error = f"wrong results: {'all-reduce' if not summed else f'all-to-all from rank {wrong[0]}'}"
    return found


def _skew(group, device) -> float:
    import torch
    import torch.distributed as dist

    dist.barrier(group)
    began = time.time()
    now = torch.zeros(dist.get_world_size(group), dtype=torch.float64, device=device)
    now[dist.get_rank(group)] = began
    dist.all_reduce(now, group=group)
    took = torch.tensor(time.time() - began, dtype=torch.float64, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
    return max(0.0, float(now.max() - now.min()) - float(took))


def _rank(pipe: Connection, rank: int, size: int, local: int, where: tuple[str, int], mib: int, limit: float) -> None:
    """Run one rank in this process: join the process group, measure, and send the measurements as JSON."""
    try:
        import torch
        import torch.distributed as dist

        cuda = torch.cuda.is_available() and torch.cuda.device_count() > local
        device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        torch.set_num_threads(1)
        within = timedelta(seconds=limit)
        # Rank 0 listens on all addresses of its node, and its store does not wait for clients.
        store = dist.TCPStore(*where, size, is_master=rank == 0, timeout=within, wait_for_workers=False)
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=within)
        found = measure(dist.group.WORLD, device, mib)
        dist.barrier()
    except Exception as error:
        found = Measured(size, "", error=f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
    pipe.send_bytes(json.dumps(asdict(found)).encode())
    pipe.close()
    sys.stdout.flush()
    # `os._exit` skips destructors, which might wait for exited ranks. Rank 0 exits last, since it hosts the store.
    time.sleep(0.2 if rank == 0 else 0)
    os._exit(0)


def together(
    first: int, here: int, size: int, where: tuple[str, int], gpus: int, mib: int = 16, limit: float = 20.0
) -> Measured:
    """Start this node's ranks of a group, measure, and return the measurements.

    Args:
        first: the lowest rank on this node. The node's ranks are consecutive.
        here: number of ranks on this node.
        size: number of ranks on all nodes.
        where: address and port that rank 0 listens on.
        gpus: number of GPUs on this node. If there are fewer GPUs than ranks here, the ranks run on the CPU.
        mib: size of a buffer in MiB.
        limit: timeout in seconds for startup and measurements together.
    """
    # Forked processes cannot use CUDA. Without GPUs, forking avoids importing torch again, which takes seconds.
    context: Any = multiprocessing.get_context("spawn" if gpus else "fork")
    running = []
    for local in range(here):
        ours, theirs = context.Pipe(duplex=False)
        # If there are fewer GPUs than ranks, an out-of-range index puts every rank on the CPU.
        args = (theirs, first + local, size, local if gpus >= here else 1 << 20, where, mib, limit)
        process = context.Process(target=_rank, args=args, daemon=True)
        process.start()
        theirs.close()
        running.append((process, ours))
    until, found = time.monotonic() + limit + 5, []
    for _, ours in running:
        ready = wait([ours], max(0.0, until - time.monotonic()))
        try:
            found.append(Measured(**json.loads(ours.recv_bytes())) if ready else None)
        except EOFError:
            found.append(None)
    for process, _ in running:
        process.join(2)
        if process.is_alive():
            process.kill()
    wrong = next((each for each in found if each is None or each.error), found[0])
    return wrong or Measured(size, "", error=f"a rank did not answer within {limit:.0f} s")
