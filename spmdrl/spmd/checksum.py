"""Checksums of tensors: a digest that sender and receiver compare, and a sum that is the same for fused tensors.

SGLang's server loads this file in an interpreter without spmdrl, so it imports only torch and xxhash.
"""

from collections.abc import Iterable
from functools import lru_cache

import torch
import xxhash

_LANES = 4096
"""Number of words in a row of the grid in which `weighted_sum` arranges a tensor's words."""
_ROWS = 4096
"""Number of rows that are summed at a time. torch copies them into a wider type, which takes at most 128 MiB."""
_BY_ROW = 2 * 0x9E3779B1
"""Factor of the weights of rows. It is even, and weights of columns are odd, so their sum, a word's weight, is odd."""


def words(tensor: torch.Tensor, widest: int = 8) -> torch.Tensor:
    """Return a tensor's bytes as integers [n] of the widest type whose size divides their number: int64 down to uint8.

    widest: bytes of the widest integer to use. The width depends on the number of bytes only, not on their address.
    """
    if widest == 8 and tensor.is_contiguous() and tensor.numel() * tensor.itemsize % 8 == 0 and tensor.dim():
        flat = tensor.detach().view(-1)
        if tensor.numel() > 1 and flat.storage_offset() * tensor.itemsize % 8 == 0:
            # The common case takes this faster path: it occurs twice for every tensor whenever an engine gets weights.
            return flat.view(torch.int64)
    # view(-1) would keep the stride of a single element, and a view of its bytes would then fail.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    for dtype, width in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        if width <= widest and flat.numel() % width == 0:
            # A view needs an aligned start, which rows of another tensor may not have.
            return (flat if flat.storage_offset() % width == 0 else flat.clone()).view(dtype)
    return flat


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a digest of a tensor's bytes, an int64 scalar on its device: xxh3 on a CPU, `weighted_sum` elsewhere."""
    if tensor.device.type != "cpu":
        return weighted_sum(tensor)
    value = xxhash.xxh3_64_intdigest(words(tensor, 1).numpy().data)
    return torch.tensor(value - (1 << 64) if value >> 63 else value)


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's words, each times a weight that depends on its position, modulo 2**64.

    The result is an int64 scalar on the tensor's device. Words have at most 32 bits, and weights are odd. So a change
    of a single element, even of its sign bit alone, changes the sum, and so does an exchange of two different elements.
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
    """Sum all words of all tensors modulo 2**64; an engine that fuses q, k, v or gate and up has the same sum.

    Digests check the bytes in transfer; this sum checks the weights in the engine's memory. It does not detect values
    that changed places, but a comparison of the engine's logp does.
    """
    return total_of(word_sums(tensors))


def word_sums(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sum of each non-empty tensor's words, on its device, for `total_of`."""
    return [words(tensor).sum() for tensor in tensors if tensor.numel()]


def total_of(sums: list[torch.Tensor]) -> int:
    """Return the total of sums modulo 2**64, computed in int64 with overflow. Waits for the device."""
    return int(torch.stack(sums).sum()) % (1 << 64) if sums else 0
