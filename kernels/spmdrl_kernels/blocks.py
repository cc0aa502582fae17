"""Cuts the logits of T tokens into blocks, and multiplies the matrices that fill and use them.

Blocks have all rows, up to a limit, and as many columns as the workspace then allows. So each row of the weight's
gradient is one product over all tokens and is written once, and only the small gradient, that of hidden, is summed over
blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from spmdrl_kernels import host

WORKSPACE_BYTES = {"cpu": 2 * 2**20, "gpu": 320 * 2**20}
"""Bytes of logits held at a time, on a CPU about its cache. A gradient in a narrow dtype takes half as many more."""
WHOLE_ROW_BYTES = {"cpu": 256 * 2**20, "gpu": 540 * 2**20}
"""Bytes of logits held at a time if all columns of a row are needed at once."""
EXACT_BYTES = {"cpu": 2 * 2**20, "gpu": 60 * 2**20}
"""Bytes of fp32 logits, before they are rounded, beside whole rows of a narrow dtype. On an H100 pieces of 8 and 16 MiB
were slower, because the host launches them more slowly than the device computes."""
BLOCK_ROWS = {"cpu": 512, "gpu": 65536}
INVARIANT_ROWS = {"cpu": 64, "gpu": 512}
"""Rows of a block if results must not depend on other rows."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of at most `rows` x `columns` over [tokens, vocab]."""

    tokens: int
    vocab: int
    rows: int
    columns: int

    def products(self, hidden_TD, weight_VD) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yield hidden @ weight.T block by block, in one buffer: all columns of some rows, then the next rows.

        Logits are fp32 for narrower inputs as well, except on AMD GPUs, whose matmul rounds: rounding logits to bf16 is
        most of the error of a logp from bf16 states (2^-9 of the logit). A CPU then multiplies in fp32, which is
        slower.
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
    """Return the key of a device's sizes: `cpu` or `gpu`."""
    return "cpu" if device.type == "cpu" else "gpu"


def plan_blocks(
    tokens: int, vocab: int, like: torch.Tensor, rows: int | None = None, columns: int | None = None
) -> Blocks:
    """Return blocks of the given sizes, or by default of the device's for logits in the dtype of `like`."""
    place = place_of(like.device)
    numbers = WORKSPACE_BYTES[place] // max(4, like.element_size())
    if rows is None:
        rows = even(tokens, BLOCK_ROWS[place] if columns is None else numbers // columns)
    if columns is None:
        columns = even(vocab, numbers // rows, 256)
    return Blocks(tokens, vocab, rows, columns)


def plan_rows(tokens: int, vocab: int, like: torch.Tensor, rows: int | None = None) -> Blocks:
    """Return blocks of whole rows."""
    numbers = WHOLE_ROW_BYTES[place_of(like.device)] // like.element_size()
    return Blocks(tokens, vocab, rows or even(tokens, numbers // max(1, vocab)), max(1, vocab))


def even(length: int, most: int, multiple: int = 16) -> int:
    """Return a step, a multiple of `multiple` and of at most `most`, that cuts `length` into about equal parts."""
    most = max(multiple, most // multiple * multiple)
    parts = max(1, -(-length // most))
    return min(most, -(-max(1, length) // (parts * multiple)) * multiple)


def spans(length: int, step: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `step` up to `length`."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool) -> None:
    """Compute total (+)= a @ b; sums are in fp32 (fp64) even if a, b or total are narrower."""
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
    """Compute total (+)= a.T @ b, a sum over tokens, like `product_`."""
    if a_TM.dtype == total.dtype == torch.float32 and host.takes(b_TN, a_TM.t()):
        c = host.outer(a_TM, b_TN)
        total.add_(c) if add else total.copy_(c)
    else:
        product_(total, a_TM.t(), b_TN, add)


def narrow(a: torch.Tensor) -> bool:
    """Return True if the dtype has 16 bits, which round logits coarsely."""
    return a.dtype in (torch.bfloat16, torch.float16)


def widens(a: torch.Tensor) -> bool:
    """Return True if the device multiplies matrices of this dtype into fp32: cuBLAS does, from torch 2.10 on."""
    return a.is_cuda and torch.version.cuda is not None and narrow(a)
