"""Looks up the settings and papers of functions selected by name, and checks and converts their padded inputs.

Padded inputs are [B, T] with a mask: B sequences of padded length T. Inputs can be tensors, numpy arrays or lists.
"""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

F = TypeVar("F")
LARGEST = 1e290
"""Maximum absolute value of an input. With this bound, sums over a whole step stay finite."""


def settings_of(function: Callable) -> dict[str, Any]:
    """Return the keyword-only parameters of a function in algos/, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def paper_of(function: Callable) -> str:
    """Return the first URL in a function's docstring, or "" if there is none."""
    found = re.search(r"https?://[^\s,;)]+", function.__doc__ or "")
    return found[0].rstrip(".") if found else ""


def find(name: str, table: Mapping[str, F], what: str) -> F:
    """Return table[name]. what: what the table contains, for the error message, such as "loss".

    Raises ValueError for an unknown name. The message lists all names and suggests the closest one.
    """
    if name in table:
        return table[name]
    raise ValueError(f"unknown {what} {name!r}{nearest(name, table)}: choose one of {', '.join(table)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` if the name is similar to a known one, else ""."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def in_range(name: str, value: float, low: float, high: float = LARGEST) -> float:
    """Return `value`, or raise a ValueError that contains `name` if it is not in [low, high]."""
    if not low <= value <= high:  # nan is rejected, too
        wanted = f"in {low} .. {high}" if high < LARGEST else f"finite and >= {low}"
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return value


def as_tensor(name: str, value: Any, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Convert a tensor, an array or a list of numbers to a detached tensor. A list of floats becomes fp64.

    Raises:
        ValueError: the value is not numeric or does not have the given shape.
    """
    try:
        x = torch.as_tensor(value).detach()
        if x.is_floating_point() and not hasattr(value, "dtype"):
            x = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as e:
        raise ValueError(f"{name} must be a tensor, an array or a list of numbers: {e}") from e
    if shape is not None and tuple(x.shape) != shape:
        raise ValueError(f"{name} must be {shape}, got {tuple(x.shape)}")
    return x


def unpad(mask: Any) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Return a padded mask [B, T] as mask_T (bool) and seq_T (int64), both [B * T] on the CPU, and the shape (B, T).

    Padding is kept: x_BT.flatten() is x_T, and x_T.view(B, T) is x_BT.
    """
    mask_BT = as_tensor("mask", mask).cpu()
    if mask_BT.ndim != 2:
        raise ValueError(f"mask must be [B, T], got {tuple(mask_BT.shape)}")
    if bool(((mask_BT != 0) & (mask_BT != 1)).any()):
        raise ValueError("mask must hold 0 and 1, or bools: 1 or True where the policy sampled")
    rows, width = mask_BT.shape
    return mask_BT.bool().flatten(), torch.arange(rows).repeat_interleave(width), (rows, width)
