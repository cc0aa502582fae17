"""Chooses the code that runs the row operations."""

import os
from importlib.util import find_spec
from typing import Any

import torch

from spmdrl_kernels.reference import TorchRows

BACKENDS = ("triton", "torch", "liger")


def choose(backend: str | None, device: torch.device) -> str:
    """The backend asked for, by argument or else by SPMDRL_KERNELS, or the device's own.

    ValueError: an unknown backend.
    """
    name = backend or os.environ.get("SPMDRL_KERNELS") or ""
    if name and name not in BACKENDS:
        where = "backend" if backend else "SPMDRL_KERNELS"
        raise ValueError(f"{where} must be one of {', '.join(BACKENDS)}, got {name!r}")
    if name:
        return name
    # ROCm devices are called cuda too.
    return "triton" if device.type == "cuda" and find_spec("triton") else "torch"


def row_operations(backend: str | None, device: torch.device, dtype: torch.dtype) -> Any:
    """Row operations in dtype for tensors on a device: `TorchRows` or `TritonRows`. ValueError: `liger` has none."""
    name = choose(backend, device)
    if name == "liger":
        where = "backend" if backend else "SPMDRL_KERNELS"
        raise ValueError(f"{where} liger is of linear_logprob alone: use triton or torch here")
    if name == "triton":
        # Heavy, and absent from many machines without a GPU.
        from spmdrl_kernels.triton_rows import TritonRows

        return TritonRows(dtype, device)
    return TorchRows(dtype)
