"""Chooses the device of a rank: its own GPU or the CPU, the same kind on all ranks of a run."""

import os

import torch
import torch.distributed as dist

STANDS_FOR: dict[str, str] = {"meta": "cuda"}
"""Device type without memory -> the device type that it stands for. A plan (`plan/`) computes on torch's meta
device."""


def kind_of(device: torch.device) -> str:
    """Return the kind of a rank's device, `cpu` or `cuda`. A plan's meta device counts as the device that it stands
    for.
    """
    return STANDS_FOR.get(device.type, device.type)


def pick_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of this rank: its own GPU, or the CPU.

    Raises ValueError if this machine has fewer GPUs than ranks that need one.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count <= local_rank:
        most = f"start no more processes than GPUs here (--nproc-per-node {count}), or"
        if not count:
            most = f"{without_gpu() or 'this torch is built without GPU support'}. To train without GPUs,"
        raise ValueError(
            f"--run.device {kind}: local rank {local_rank} has no GPU of its own; torch finds {count} on this machine: "
            f"{most} give --run.device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def without_gpu() -> str:
    """Return a hint as to why torch might find no GPU, or an empty string for a torch build without GPU support."""
    if torch.version.cuda is None and torch.version.hip is None:
        return ""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = f"CUDA_VISIBLE_DEVICES is {seen!r}; " if seen is not None else ""
    return (
        f"torch {torch.__version__} is built for GPUs and finds none: {hidden}`nvidia-smi` shows whether the driver "
        f"sees them and supports CUDA {torch.version.cuda}"
    )


def check_alike(store: dist.Store, rank: int, device: torch.device) -> None:
    """Check that this rank's device is of the same kind as rank 0's.

    Raises ValueError if the kinds differ, because collectives of a process group with both CPU and GPU ranks would
    hang.
    """
    # All ranks share one key, which rank 0 writes and the other ranks wait for.
    if rank == 0:
        store.set("device of rank 0", device.type)
    first = device.type if rank == 0 else store.get("device of rank 0").decode()
    if first != device.type:
        why = without_gpu() if device.type == "cpu" else ""
        raise ValueError(
            f"rank {rank} on {os.uname().nodename} works on {device.type} and rank 0 on {first}: give every node as "
            f"many GPUs as processes, or --run.device cpu{'. ' + why if why else ''}"
        )
