"""Divides the logits of T tokens into blocks, and multiplies the matrices that produce a block or use it.

By default a block has all rows (up to `BLOCK_ROWS`), and as many columns as then fit into the workspace. If it has all
rows, each row of the weight's gradient is computed by one product over all tokens, and written once. Only the gradient
of the hidden states, which is smaller, is summed over blocks. `plan_rows` makes blocks with all columns instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from spmdrl_kernels import host

WORKSPACE_BYTES = {"cpu": 2 * 2**20, "gpu": 320 * 2**20}
"""Maximum size in bytes of the logits in memory at any time. On a CPU, this is about the size of the cache. For 16-bit
inputs, the gradient of these logits takes half as many additional bytes."""
WHOLE_ROW_BYTES = {"cpu": 256 * 2**20, "gpu": 600 * 2**20}
"""Maximum size in bytes of the logits in memory at any time if all columns of a row are needed at once. On a GPU, this
is enough for 2,048 rows at V=151936 in 16 bits. On an H100, four chunks of this size took 3 ms less than five of 1,648
rows."""
EXACT_BYTES = {"cpu": 2 * 2**20, "gpu": 256 * 2**20}
"""Maximum size in bytes of the fp32 logits in memory before they are rounded to a 16-bit dtype. On an H200, smaller
pieces were slower, because the host launches short kernels more slowly than the device computes them."""
BLOCK_ROWS = {"cpu": 512, "gpu": 65536}
"""Maximum number of rows per block."""
INVARIANT_ROWS = {"cpu": 64, "gpu": 512}
"""Default number of rows per block for batch-invariant calls, in which a row's results do not depend on the other
rows."""
LOWEST = -1e30
"""Finite value that replaces a logit of -inf, because 0 * -inf is nan. Its probability is 0 too."""


@dataclass(frozen=True)
class Blocks:
    """The division of logits [tokens, vocab] into blocks of at most `rows` x `columns`."""

    tokens: int
    vocab: int
    rows: int
    columns: int
    excluded: tuple[int, ...] = ()
    """Columns of tokens that have probability 0."""

    def products(self, hidden_TD, weight_VD) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yield hidden @ weight.T block by block in a reused buffer: all columns of some rows, then the next rows.

        Logits of excluded columns are LOWEST.

        Logits of 16-bit inputs are fp32, because rounding them to bf16 would cause most of the error of a logp (2^-9
        of the logit). A CPU multiplies in fp32 to get such logits, which is slower. On AMD GPUs the logits are rounded,
        because the matmul of 16-bit inputs cannot write fp32.
        """
        exact = narrow(hidden_TD) and (hidden_TD.is_cpu or widens(hidden_TD))
        dtype = torch.float32 if exact else hidden_TD.dtype
        size = min(self.rows, self.tokens) * min(self.columns, self.vocab)
        buffer = hidden_TD.new_empty(size, dtype=dtype)
        for rows in spans(self.tokens, self.rows):
            states_CD = hidden_TD[rows].float() if exact and hidden_TD.is_cpu else hidden_TD[rows]
            for columns in spans(self.vocab, self.columns):
                shape = (rows.stop - rows.start, columns.stop - columns.start)
                logits_CV = buffer[: shape[0] * shape[1]].view(shape)
                product_(logits_CV, states_CD, weight_VD[columns].t(), False)
                self.exclude_(logits_CV, columns)
                yield rows, columns, logits_CV

    def exclude_(self, logits_CV: torch.Tensor, columns: slice) -> None:
        """Set the excluded columns of a block of logits to LOWEST, in place. columns: the block's columns."""
        for column in self.excluded:
            if columns.start <= column < columns.stop:
                # The lowest number of float16 is above LOWEST.
                logits_CV[:, column - columns.start] = max(LOWEST, torch.finfo(logits_CV.dtype).min)


def place_of(device: torch.device) -> str:
    """Return the key of a device in this module's tables of sizes: `cpu` or `gpu`."""
    return "cpu" if device.type == "cpu" else "gpu"


def plan_blocks(
    tokens: int,
    vocab: int,
    like: torch.Tensor,
    rows: int | None = None,
    columns: int | None = None,
    excluded: tuple[int, ...] = (),
) -> Blocks:
    """Return blocks with the given numbers of rows and columns. A number that is None is chosen for `like`'s device.

    If only `columns` is given, more columns mean fewer rows. Blocks of given rows and columns may exceed the workspace.
    """
    place = place_of(like.device)
    numbers = WORKSPACE_BYTES[place] // max(4, like.element_size())
    if rows is None:
        rows = even(tokens, BLOCK_ROWS[place] if columns is None else numbers // columns)
    if columns is None:
        columns = even(vocab, numbers // rows, 256)
    return Blocks(tokens, vocab, rows, columns, excluded)


def plan_rows(
    tokens: int, vocab: int, like: torch.Tensor, rows: int | None = None, excluded: tuple[int, ...] = ()
) -> Blocks:
    """Return blocks of complete rows. rows: number of rows per block; None to fill WHOLE_ROW_BYTES."""
    numbers = WHOLE_ROW_BYTES[place_of(like.device)] // like.element_size()
    return Blocks(tokens, vocab, rows or even(tokens, numbers // max(1, vocab)), max(1, vocab), excluded)


def even(length: int, most: int, multiple: int = 16) -> int:
    """Return the size of about equal parts of `length`, divisible by `multiple` and at most `most` (or `multiple`)."""
    most = max(multiple, most // multiple * multiple)
    parts = max(1, -(-length // most))
    return min(most, -(-max(1, length) // (parts * multiple)) * multiple)


def spans(length: int, step: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `step` elements that cover the range from 0 to `length`."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool) -> None:
    """Write a @ b into total, or add it if `add` is true. Sums are in fp32 (fp64 for fp64), even for 16-bit tensors."""
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
    """Write a.T @ b, a sum over tokens, into total, or add it if `add` is true; the precision is that of `product_`."""
    if a_TM.dtype == total.dtype == torch.float32 and host.takes(b_TN, a_TM.t()):
        c = host.outer(a_TM, b_TN)
        total.add_(c) if add else total.copy_(c)
    else:
        product_(total, a_TM.t(), b_TN, add)


def narrow(a: torch.Tensor) -> bool:
    """Return True if the dtype has 16 bits, in which logits would have large rounding errors."""
    return a.dtype in (torch.bfloat16, torch.float16)


def widens(a: torch.Tensor) -> bool:
    """Return True if the device can multiply 16-bit matrices such as `a` into fp32: cuBLAS can, from torch 2.10 on."""
    return a.is_cuda and torch.version.cuda is not None and narrow(a)
