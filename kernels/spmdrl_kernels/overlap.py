"""Processes blocks of logits on a second stream of a GPU, while the current stream computes the next block.

A product keeps the multiprocessors busy and hardly uses the memory's bandwidth; the row operations on its result do the
opposite. Blocks alternate between two buffers, so that the product does not overwrite what is being read.
"""

from collections.abc import Callable
from functools import cache

import torch

from spmdrl_kernels.blocks import Blocks


def for_each_product(
    blocks: Blocks, hidden_TD: torch.Tensor, weight_VD: torch.Tensor, work: Callable[[slice, slice, torch.Tensor], None]
) -> None:
    """Call work(rows, columns, logits) for every block of hidden @ weight.T, in the order of `Blocks.products`.

    On a GPU with `blocks.buffers` > 1, the work runs on a second stream. When this function returns, later work of the
    current stream comes after all of it.
    """
    if not hidden_TD.is_cuda or blocks.buffers == 1:
        for block in blocks.products(hidden_TD, weight_VD):
            work(*block)
        return
    main, side = torch.cuda.current_stream(hidden_TD.device), _second_stream(hidden_TD.device)
    done = [torch.cuda.Event() for _ in range(blocks.buffers)]
    products = blocks.products(hidden_TD, weight_VD, lambda buffer: main.wait_event(done[buffer]))
    try:
        for number, block in enumerate(products):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                work(*block)
                done[number % blocks.buffers].record(side)
    finally:
        # The allocator may give memory that the second stream uses to later work of the current one. So the current
        # stream waits, and `record_stream`, which would keep the memory longer, is not needed.
        main.wait_stream(side)


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
