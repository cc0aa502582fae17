"""How the logits of T tokens are cut into blocks, and the matmuls that fill and use them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

BLOCK_NUMBERS = {"cpu": 2**20, "cuda": 2**28}
"""Logits held at a time: on a CPU what stays in its cache, on a GPU 0.5 GiB in bf16."""
BLOCK_ROWS = {"cpu": 1024, "cuda": 8192}
INVARIANT_ROWS = {"cpu": 64, "cuda": 512}
"""Rows of a block where results may not depend on other rows."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of `rows` x `columns` over [tokens, vocab]; `padded`: every block has all its rows, filled with zeros."""

    tokens: int
    vocab: int
    rows: int
    columns: int
    padded: bool = False

    def products(self, hidden_TD, weight_VD) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """hidden @ weight.T block by block, in one buffer; all columns of some rows, then the next rows."""
        buffer = hidden_TD.new_empty(min(self.rows, self.tokens) * min(self.columns, self.vocab))
        for rows in spans(self.tokens, self.rows):
            for columns in spans(self.vocab, self.columns):
                shape = (rows.stop - rows.start, columns.stop - columns.start)
                logits_CV = buffer[: shape[0] * shape[1]].view(shape)
                torch.mm(hidden_TD[rows], weight_VD[columns].t(), out=logits_CV)
                yield rows, columns, logits_CV


def plan_blocks(
    tokens: int, vocab: int, device: torch.device, rows: int | None, columns: int | None, invariant: bool
) -> Blocks:
    """Blocks of the given or the device's size."""
    kind = "cpu" if device.type == "cpu" else "cuda"
    numbers = BLOCK_NUMBERS[kind]
    if rows is None:
        rows = min(max(tokens, 1), BLOCK_ROWS[kind] if columns is None else max(1, numbers // columns))
    elif columns is None:
        columns = max(vocab, 1)
    if columns is None:
        columns = max(256, numbers // rows // 256 * 256)
    return Blocks(tokens, vocab, rows, columns, invariant)


def spans(length: int, step: int) -> Iterator[slice]:
    """Consecutive slices of at most `step` up to `length`."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, summed in fp32 (fp64) also where total is narrower."""
    if a.dtype == b.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.dtype == b.dtype and _mixed_product(a):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif a.dtype == b.dtype:
        total.add_(torch.mm(a, b))
    else:
        total.add_(torch.mm(a.to(torch.float32), b.to(torch.float32)))


def _mixed_product(a: torch.Tensor) -> bool:
    """Whether this device multiplies narrow matrices into a sum in fp32 (torch has that for CUDA only)."""
    return a.is_cuda and torch.version.cuda is not None
