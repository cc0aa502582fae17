"""Tensor checksums: a digest that sender and receiver compare, and a sum that does not change when tensors are fused.

The SGLang server loads this file in an interpreter without spmdrl, so it imports only torch and xxhash.
"""

from collections.abc import Iterable
from functools import lru_cache

import torch
import xxhash

_LANES = 4096
"""Words per row of the grid that `weighted_sum` arranges a tensor into."""
_ROWS = 4096
"""Number of rows summed at a time. torch copies these rows into a wider dtype, which takes at most 128 MiB."""
_BY_ROW = 2 * 0x9E3779B1
"""Multiplier of the row weights. The multiplier is even and column weights are odd, so the weight of each word, which
is their sum, is odd."""


def words(tensor: torch.Tensor, widest: int = 8) -> torch.Tensor:
    """Return a tensor's bytes as integers [n] of the widest dtype, int64 to uint8, whose size divides the byte count.

    widest: maximum integer size in bytes. The dtype depends only on the number of bytes, not on their address.
    """
    if widest == 8 and tensor.is_contiguous() and tensor.numel() * tensor.itemsize % 8 == 0 and tensor.dim():
        flat = tensor.detach().view(-1)
        if tensor.numel() > 1 and flat.storage_offset() * tensor.itemsize % 8 == 0:
            # Fast path for the common case, which runs twice per tensor in every weight transfer to an engine.
            return flat.view(torch.int64)
    # view(-1) would keep the stride of a one-element tensor, and viewing its bytes would then fail.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    for dtype, width in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        if width <= widest and flat.numel() % width == 0:
            # A view needs an aligned start, but a row of another tensor might not be aligned.
            return (flat if flat.storage_offset() % width == 0 else flat.clone()).view(dtype)
    return flat


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a digest of a tensor's bytes, an int64 scalar on its device: xxh3 on a CPU, `weighted_sum` elsewhere."""
    if tensor.device.type != "cpu":
        return weighted_sum(tensor)
    value = xxhash.xxh3_64_intdigest(words(tensor, 1).numpy().data)
    return torch.tensor(value - (1 << 64) if value >> 63 else value)


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the position-weighted sum of a tensor's words, modulo 2**64.

    The result is an int64 scalar on the tensor's device. Words have at most 32 bits and weights are odd, so changing a
    single element, even just its sign bit, changes the sum, and so does swapping two different elements.
    """
    w = words(tensor, 4)
    whole = w.numel() // _LANES * _LANES
    odd = _odd(max(_LANES, _ROWS), w.device)
    total = torch.zeros((), dtype=torch.int64, device=w.device)
    for first, grid in enumerate(w[:whole].view(-1, _LANES).split(_ROWS) if whole else ()):
        total += (grid.sum(0, dtype=torch.int64) * odd[:_LANES]).sum()
        total += (grid.sum(1, dtype=torch.int64) * (odd[: len(grid)] + 2 * first * _ROWS)).sum() * _BY_ROW
    if w.numel() > whole:
        total += (w[whole:].long() * odd[: w.numel() - whole]).sum() * 0x85EBCA77
    return total


@lru_cache(maxsize=16)
def _odd(n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int64, device=device) * 2 + 1


def word_sum(tensors: Iterable[torch.Tensor]) -> int:
    """Sum all words of all tensors modulo 2**64. Fusing q, k, v or gate and up does not change the sum.

    Digests verify the transferred bytes, and this sum verifies the weights in the engine's memory. The sum does not
    detect permuted values, but comparing the engine's logp does.
    """
    return total_of(word_sums(tensors))


def word_sums(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the word sum of each non-empty tensor, on its device, for `total_of`."""
    return [words(tensor).sum() for tensor in tensors if tensor.numel()]


def total_of(sums: list[torch.Tensor]) -> int:
    """Add up sums modulo 2**64, relying on int64 overflow. Synchronizes with the device."""
    return int(torch.stack(sums).sum()) % (1 << 64) if sums else 0
