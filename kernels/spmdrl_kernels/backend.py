"""Which code runs the row operations."""

import os

import torch

from spmdrl_kernels.reference import TorchRows

BACKENDS = ("triton", "torch")


def row_operations(backend: str | None, device: torch.device, dtype: torch.dtype):
    """Row operations in dtype for tensors on a device. ValueError: an unknown backend."""
    return TorchRows(dtype)
