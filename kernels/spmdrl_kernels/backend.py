"""Chooses the backend of the row operations: Triton kernels or plain torch."""

import os
from importlib.util import find_spec
from typing import Any

import torch

from spmdrl_kernels.reference import TorchRows

BACKENDS = ("triton", "torch", "liger")


def choose(backend: str | None, device: torch.device) -> str:
    """Return the name of the backend: `backend` if given, else the variable SPMDRL_KERNELS, else the device's default.

    Raises ValueError if there is no backend with this name.
    """
    name = backend or os.environ.get("SPMDRL_KERNELS") or ""
    if name and name not in BACKENDS:
        where = "backend" if backend else "SPMDRL_KERNELS"
        raise ValueError(f"{where} must be one of {', '.join(BACKENDS)}, got {name!r}")
    if name:
        return name
    # On ROCm the device type is cuda too, so AMD GPUs use Triton as well.
    return "triton" if device.type == "cuda" and find_spec("triton") else "torch"


def row_operations(backend: str | None, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a `TorchRows` or `TritonRows` for this device that computes in dtype.

    Raises ValueError for the backend `liger`, which has no row operations.
    """
    name = choose(backend, device)
    if name == "liger":
        where = "backend" if backend else "SPMDRL_KERNELS"
        raise ValueError(f"{where} liger is for linear_logprob only: use triton or torch here")
    if name == "triton":
        # Triton is imported only here, because its import is slow and many machines without a GPU lack it.
        from spmdrl_kernels.triton_rows import TritonRows

        return TritonRows(dtype, device)
    return TorchRows(dtype)
