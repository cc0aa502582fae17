"""Checks the arguments of the package's functions; an error message names the change that the caller must make."""

import math
from collections.abc import Sequence

import torch

from spmdrl_kernels.deferred import check_later

LEAST = 1e-30
"""Smallest allowed temperature; with a smaller one, logits / temperature could overflow in fp32."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_linear(hidden_TD, weight_VD, targets_T, temperature, mask_T) -> None:
    """Check shapes, dtypes and devices of the arguments of `linear_logprob`."""
    check_states(hidden_TD, weight_VD)
    check_rows("hidden", hidden_TD, targets_T, temperature, mask_T)


def check_states(hidden_TD, weight_VD) -> None:
    """Check shapes, dtypes and devices of hidden states and output weight."""
    if hidden_TD.ndim != 2 or weight_VD.ndim != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"expected hidden [T, D] and weight [V, D], got {tuple(hidden_TD.shape)} and {tuple(weight_VD.shape)}"
        )
    if hidden_TD.dtype not in DTYPES or weight_VD.dtype != hidden_TD.dtype:
        raise ValueError(
            f"hidden and weight must share one float dtype (fp16, bf16, fp32, fp64), got {hidden_TD.dtype} and "
            f"{weight_VD.dtype}: cast one of them"
        )
    if weight_VD.device != hidden_TD.device:
        raise ValueError(f"hidden and weight must share one device, got {hidden_TD.device} and {weight_VD.device}")


def check_rows(name: str, rows_TX, targets_T, temperature, mask_T) -> None:
    """Check the inputs that accompany the rows of a tensor: targets, mask, and one temperature or one for each row."""
    tokens, device = len(rows_TX), rows_TX.device
    if targets_T.shape != (tokens,):
        raise ValueError(f"expected one target per row of {name}, got {tuple(targets_T.shape)} for {tokens} rows")
    if targets_T.dtype != torch.int64:
        raise ValueError(f"targets must be int64, got {targets_T.dtype}")
    if targets_T.device != device:
        raise ValueError(f"{name} and targets must share one device, got {device} and {targets_T.device}")
    if isinstance(temperature, torch.Tensor):
        if temperature.shape not in ((), (tokens,)) or not temperature.is_floating_point():
            raise ValueError(
                f"temperature must be a number or floats [T] ({tokens} here), "
                f"got {tuple(temperature.shape)} {temperature.dtype}"
            )
        if temperature.device != device:
            raise ValueError(f"{name} and temperature must share one device, got {device} and {temperature.device}")
        if temperature.requires_grad:
            raise ValueError("temperature must not require a gradient: detach it")
    elif not usable(temperature):
        raise ValueError(f"temperature must be positive and finite, and 1 / temperature too: {temperature}")
    if mask_T is not None and (mask_T.shape != (tokens,) or mask_T.dtype != torch.bool or mask_T.device != device):
        raise ValueError(
            f"mask must be bool [T] ({tokens} here) on {device}, got {tuple(mask_T.shape)} {mask_T.dtype} "
            f"on {mask_T.device}"
        )


def usable(temperature: float) -> bool:
    """Return True if logits can be divided by the temperature in fp32."""
    return temperature >= LEAST and math.isfinite(temperature)


def check_settings(softcap, sizes: dict[str, int | None], excluded: Sequence[int] = ()) -> None:
    """Check the cap on logits and the sizes of blocks. sizes: name of a setting -> its value; None for the default.

    excluded: ids that have probability 0.
    """
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap must be positive and finite, or None for off, got {softcap}")
    if softcap is not None and len(excluded):
        raise ValueError("softcap cannot be combined with excluded ids, because it makes a logit of -inf finite")
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def check_values(targets_T: torch.Tensor | None, temperature, vocab: int) -> None:
    """Check the values of targets and temperatures; on a GPU, a later call raises the error (`deferred.py`)."""
    if targets_T is not None and targets_T.numel():
        check_later(torch.stack(torch.aminmax(targets_T)), lambda bounds: _of_targets(bounds, vocab))
    if isinstance(temperature, torch.Tensor) and temperature.numel():
        check_later(torch.stack(torch.aminmax(temperature)), _of_temperatures)


def _of_targets(bounds: list[int], vocab: int) -> str:
    low, high = bounds
    if low >= 0 and high < vocab:
        return ""
    return (
        f"targets must lie in [0, {vocab}), got values from {low} to {high}: "
        "exclude masked positions by mask, or set them to any valid token"
    )


def _of_temperatures(bounds: list[float]) -> str:
    low, high = bounds
    if usable(low) and usable(high):
        return ""
    return f"temperature must be positive and finite, and 1 / temperature too: values from {low} to {high}"
