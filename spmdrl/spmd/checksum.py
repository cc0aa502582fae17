"""Checksums of tensors: one to compare sender and receiver, one that does not depend on how tensors are fused."""

from collections.abc import Iterable
from functools import lru_cache

import torch
import xxhash

_LANES = 4096
"""Words that share one weight by row in a digest's sum."""
_ROWS = 4096
"""Rows that are summed at a time: torch widens what it sums in a copy, here of 128 MiB at most."""
_BY_ROW = 2 * 0x9E3779B1
"""Factor of the weights by row: even, so that the weight of every word (its column's plus its row's) stays odd."""


def words(tensor: torch.Tensor, widest: int = 8) -> torch.Tensor:
    """The tensor's bytes as the widest integers that divide them: int64, int32, int16 or uint8 [n].

    widest: bytes of the widest integer to use. The width depends on the number of bytes alone, not on where they lie.
    """
    if widest == 8 and tensor.is_contiguous() and tensor.numel() * tensor.itemsize % 8 == 0 and tensor.dim():
        flat = tensor.detach().view(-1)
        if tensor.numel() > 1 and flat.storage_offset() * tensor.itemsize % 8 == 0:
            # The case of nearly every tensor of a model; a push takes each twice.
            return flat.view(torch.int64)
    # Not view(-1): a single element may have any stride, and then its bytes cannot be viewed.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    for dtype, width in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        if width <= widest and flat.numel() % width == 0:
            # A view wants an aligned start, which a range of rows of another tensor may not have.
            return (flat if flat.storage_offset() % width == 0 else flat.clone()).view(dtype)
    return flat


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes as one int64, a scalar on its device: xxh3 on a CPU, `weighted_sum` elsewhere."""
    if tensor.device.type != "cpu":
        return weighted_sum(tensor)
    value = xxhash.xxh3_64_intdigest(words(tensor, 1).numpy().data)
    return torch.tensor(value - (1 << 64) if value >> 63 else value)


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Position-weighted sum of the tensor's bytes modulo 2**64: int64 scalar, on the tensor's device.

    Words of at most 32 bits under odd weights, summed in 64 bits: any one changed element changes it, its sign bit
    too, and so do two exchanged ones.
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
    """Sum of all words of all tensors modulo 2**64: the same for a model whose engine fuses q, k, v or gate and up.

    A second check beside the digests: it is taken of the weights that the engine holds, not of those it was handed. It
    does not see values that changed places; the engine's logp shows once that tensors are where they belong.
    """
    return added(word_sums(tensors))


def word_sums(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The sum of each tensor's words, on its device, for `added` to make one number of."""
    return [words(tensor).sum() for tensor in tensors if tensor.numel()]


def added(sums: list[torch.Tensor]) -> int:
    """The sum of all modulo 2**64. Waits for the device; int64 wraps as the sum has to."""
    return int(torch.stack(sums).sum()) % (1 << 64) if sums else 0
