"""The row operations as Triton kernels (`triton_kernels.py`); `reference.py` has the same operations in plain torch."""

import os
from contextlib import nullcontext
from typing import Any

import torch
import triton

from spmdrl_kernels.triton_kernels import gradient_kernel, results_kernel, stats_kernel
from spmdrl_kernels.vocabulary import SECOND

SECONDS: dict[str, Any] = {"": 0, "entropy": 1, "collision": 2}
GRADIENT_BLOCK = 2048
"""Maximum number of columns that one program of the gradient kernel processes."""
STATS_LANES, STATS_STEPS, STATS_WARPS = 1024, 2, 4
STATS_LANES_FP64, STATS_STEPS_FP64 = 256, 2
"""A program of the stats kernel processes up to LANES * STEPS columns at a time; one thread processes all steps of a
lane. STATS_WARPS is the number of warps per program."""
RESULTS_BLOCK: Any = 256
"""Number of rows that one program of the results kernel processes."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class TritonRows:
    """Computes row operations by Triton kernels, with the interface of `TorchRows`."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        """Choose the type of computations: fp64 if dtype is float64, else fp32.

        Raises ValueError if the device is a CPU and Triton's interpreter is off.
        """
        if device.type == "cpu" and not INTERPRETED:
            raise ValueError("Triton needs a GPU: use backend='torch', or its interpreter (TRITON_INTERPRET=1)")
        self.fp64 = dtype == torch.float64

    def borrow(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """Return the logits without a copy. `add_stats_` leaves them unchanged; `logit_gradient` may overwrite them."""
        return logits_CV

    def add_stats_(self, logits_CV, state_4C, targets_C, offset, scale_C, softcap, second, first) -> None:
        """Update a state as `TorchRows.add_stats_` does, but leave the logits unchanged."""
        self._stats(logits_CV, state_4C, None, None, targets_C, offset, scale_C, softcap, second, first)

    def add_rounded_(
        self, exact_CV, state_4C, kept_CV, kept_4C, targets_C, offset, scale_C, softcap, second, first
    ) -> None:
        """Round logits and update states as `TorchRows.add_rounded_` does, in one pass over the logits."""
        assert kept_CV.shape == exact_CV.shape and kept_CV.stride(1) == 1 and kept_4C.stride() == state_4C.stride()
        self._stats(exact_CV, state_4C, kept_CV, kept_4C, targets_C, offset, scale_C, softcap, second, first)

    def _stats(self, logits_CV, state_4C, kept_CV, kept_4C, targets_C, offset, scale_C, softcap, second, first) -> None:
        rows, columns = logits_CV.shape
        if not rows or not columns:
            return
        assert logits_CV.stride(1) == 1 and state_4C.stride(1) == 1 and len(state_4C) == SECOND + 2
        most = (STATS_LANES_FP64, STATS_STEPS_FP64) if self.fp64 else (STATS_LANES, STATS_STEPS)
        lanes = min(most[0], max(16, triton.next_power_of_2(columns)))
        with _on(logits_CV):
            stats_kernel[(rows,)](
                logits_CV,
                logits_CV.stride(0),
                columns,
                targets_C.contiguous(),
                offset,
                scale_C,
                state_4C,
                state_4C.stride(0),
                kept_CV,
                0 if kept_CV is None else kept_CV.stride(0),
                kept_4C,
                SOFTCAP=softcap,
                SECOND=SECONDS[second],
                FIRST=first,
                FP64=self.fp64,
                LANES=lanes,
                STEPS=min(most[1], triton.next_power_of_2(triton.cdiv(columns, lanes))),
                num_warps=STATS_WARPS,  # pyright: ignore[reportCallIssue] (an argument of the launch)
            )

    def results(self, state_4C, targets_C, vocab, entropy) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return logp, entropy and normalisers, as `TorchRows.results` does."""
        rows = state_4C.shape[1]
        logp_C, norm_2C = state_4C.new_empty(rows), state_4C.new_empty(2, rows)
        entropy_C = state_4C.new_empty(rows) if entropy else None
        if rows:
            assert state_4C.stride(1) == 1
            with _on(state_4C):
                results_kernel[(triton.cdiv(rows, RESULTS_BLOCK),)](
                    state_4C,
                    state_4C.stride(0),
                    rows,
                    targets_C.contiguous(),
                    vocab,
                    logp_C,
                    entropy_C,
                    norm_2C,
                    rows,
                    BLOCK=RESULTS_BLOCK,
                )
        return logp_C, entropy_C, norm_2C

    def logit_gradient(
        self,
        logits_CV,
        targets_C,
        offset,
        scale_C,
        softcap,
        norm_2C,
        entropy_C,
        grad_logp_C,
        grad_entropy_C,
        out_CV=None,
    ) -> torch.Tensor:
        """Write the gradient of `TorchRows.logit_gradient` into out_CV, in its dtype, and return it.

        If out_CV is None, the gradient overwrites the logits.
        """
        rows, columns = logits_CV.shape
        out_CV = logits_CV if out_CV is None else out_CV
        if not rows or not columns:
            return out_CV
        assert logits_CV.stride(1) == out_CV.stride(1) == 1 and out_CV.shape == logits_CV.shape
        assert norm_2C.stride(1) == 1 and (grad_entropy_C is None or entropy_C is not None)
        block = min(GRADIENT_BLOCK, max(16, triton.next_power_of_2(columns)))
        with _on(logits_CV):
            gradient_kernel[(rows, triton.cdiv(columns, block))](
                logits_CV,
                logits_CV.stride(0),
                out_CV,
                out_CV.stride(0),
                columns,
                targets_C.contiguous(),
                offset,
                scale_C,
                norm_2C,
                norm_2C.stride(0),
                entropy_C,
                grad_logp_C.contiguous(),
                None if grad_entropy_C is None else grad_entropy_C.contiguous(),
                SOFTCAP=softcap,
                FP64=self.fp64,
                BLOCK=block,
                num_warps=8,  # pyright: ignore[reportCallIssue] (an argument of the launch)
            )
        return out_CV


def _on(tensor: torch.Tensor):
    """Return a context in which Triton launches on the tensor's device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
