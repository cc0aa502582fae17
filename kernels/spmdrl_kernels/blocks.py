"""Cuts the logits of T tokens into blocks, and multiplies the matrices that fill and use them.

A block has all rows, up to a limit, and as many columns as the workspace then allows. So each row of the weight's
gradient is one product over all tokens and is written once. Only the gradient of the hidden states, which is smaller,
is summed over blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from spmdrl_kernels import host

WORKSPACE_BYTES = {"cpu": 2 * 2**20, "gpu": 320 * 2**20}
"""Bytes of logits in memory at the same time; on a CPU about the size of its cache. A gradient in a 16-bit dtype takes
half as many bytes in addition."""
WHOLE_ROW_BYTES = {"cpu": 256 * 2**20, "gpu": 540 * 2**20}
"""Bytes of logits in memory at the same time if all columns of a row are needed at once."""
EXACT_BYTES = {"cpu": 2 * 2**20, "gpu": 60 * 2**20}
"""Bytes of fp32 logits in memory, before they are rounded into complete rows of a 16-bit dtype. On an H100, pieces of 8
and 16 MiB were slower, because the host launches them more slowly than the device computes them."""
BLOCK_ROWS = {"cpu": 512, "gpu": 65536}
"""Largest number of rows of a block."""
INVARIANT_ROWS = {"cpu": 64, "gpu": 512}
"""Rows of a block if the results of a row must not depend on other rows."""


@dataclass(frozen=True)
class Blocks:
    """The division of logits [tokens, vocab] into blocks of at most `rows` x `columns`."""

    tokens: int
    vocab: int
    rows: int
    columns: int

    def products(self, hidden_TD, weight_VD) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yield hidden @ weight.T block by block in one reused buffer: all columns of some rows, then the next rows.

        Logits of 16-bit inputs are fp32, because rounding them to bf16 would cause most of the error of a logp (2^-9
        of the logit). For this a CPU multiplies in fp32, which is slower. On AMD GPUs, whose matmul cannot write fp32,
        the logits are rounded.
        """
        exact = narrow(hidden_TD) and (hidden_TD.is_cpu or widens(hidden_TD))
        dtype = torch.float32 if exact else hidden_TD.dtype
        buffer = hidden_TD.new_empty(min(self.rows, self.tokens) * min(self.columns, self.vocab), dtype=dtype)
        for rows in spans(self.tokens, self.rows):
            states_CD = hidden_TD[rows].float() if exact and hidden_TD.is_cpu else hidden_TD[rows]
            for columns in spans(self.vocab, self.columns):
                shape = (rows.stop - rows.start, columns.stop - columns.start)
                logits_CV = buffer[: shape[0] * shape[1]].view(shape)
                product_(logits_CV, states_CD, weight_VD[columns].t(), False)
                yield rows, columns, logits_CV


def place_of(device: torch.device) -> str:
    """Return the key of a device in this module's tables of sizes: `cpu` or `gpu`."""
    return "cpu" if device.type == "cpu" else "gpu"


def plan_blocks(
    tokens: int, vocab: int, like: torch.Tensor, rows: int | None = None, columns: int | None = None
) -> Blocks:
    """Return blocks of the given sizes; missing sizes follow from the device and dtype of `like`."""
    place = place_of(like.device)
    numbers = WORKSPACE_BYTES[place] // max(4, like.element_size())
    if rows is None:
        rows = even(tokens, BLOCK_ROWS[place] if columns is None else numbers // columns)
    if columns is None:
        columns = even(vocab, numbers // rows, 256)
    return Blocks(tokens, vocab, rows, columns)


def plan_rows(tokens: int, vocab: int, like: torch.Tensor, rows: int | None = None) -> Blocks:
    """Return blocks of complete rows; by default their number follows from the device and dtype of `like`."""
    numbers = WHOLE_ROW_BYTES[place_of(like.device)] // like.element_size()
    return Blocks(tokens, vocab, rows or even(tokens, numbers // max(1, vocab)), max(1, vocab))


def even(length: int, most: int, multiple: int = 16) -> int:
    """Return a step of at most `most`, divisible by `multiple`, that cuts `length` into about equal parts."""
    most = max(multiple, most // multiple * multiple)
    parts = max(1, -(-length // most))
    return min(most, -(-max(1, length) // (parts * multiple)) * multiple)


def spans(length: int, step: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `step` up to `length`."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool) -> None:
    """Compute total (+)= a @ b; sums are in fp32 (fp64 for fp64) even if a, b or total have 16 bits."""
    if a.dtype != b.dtype or (host.WIDENS and a.is_cpu and a.dtype == torch.bfloat16):
        a, b = a.to(torch.float32), b.to(torch.float32)
    if total.dtype == torch.float32 and host.takes(a, b.t()):
        c = host.linear(a, b.t())
        total.add_(c) if add else total.copy_(c)
    elif a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total) if add else torch.mm(a, b, out=total)
    elif total.dtype == torch.float32 and widens(a):
        if add:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        else:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        c = torch.mm(a, b)
        total.add_(c) if add else total.copy_(c)


def outer_(total: torch.Tensor, a_TM: torch.Tensor, b_TN: torch.Tensor, add: bool) -> None:
    """Compute total (+)= a.T @ b, a sum over tokens, with the precision of `product_`."""
    if a_TM.dtype == total.dtype == torch.float32 and host.takes(b_TN, a_TM.t()):
        c = host.outer(a_TM, b_TN)
        total.add_(c) if add else total.copy_(c)
    else:
        product_(total, a_TM.t(), b_TN, add)


def narrow(a: torch.Tensor) -> bool:
    """Return True if the dtype has 16 bits and so rounds logits coarsely."""
    return a.dtype in (torch.bfloat16, torch.float16)


def widens(a: torch.Tensor) -> bool:
    """Return True if the device's matmul can write fp32 from inputs of this dtype; cuBLAS can, from torch 2.10 on."""
    return a.is_cuda and torch.version.cuda is not None and narrow(a)
