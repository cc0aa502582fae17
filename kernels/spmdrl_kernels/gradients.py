"""Computes gradients of hidden states and output weight from gradients of blocks of logits."""

import torch

from spmdrl_kernels.blocks import Blocks, outer_, product_
from spmdrl_kernels.vocabulary import Vocabulary


class Gradients:
    """Sums the gradients of hidden states and weight over blocks of logits, in fp32 (fp64 for fp64 inputs)."""

    def __init__(
        self,
        blocks: Blocks,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        need: tuple[bool, bool],
        vocabulary: Vocabulary,
        dtype: torch.dtype,
    ):
        """Allocate the sums.

        need: whether the gradients of hidden_TD and of weight_VD are needed. dtype: type of a sum over blocks.
        """
        self.hidden_TD, self.weight_VD, self.vocabulary = hidden_TD, weight_VD, vocabulary
        # If all rows are in one block, one matmul sums over all tokens. Then the gradient of the weight, the largest
        # tensor of this class, needs no fp32 buffer. If all columns are in one block, the gradient of hidden_TD needs
        # none.
        empty = blocks.tokens == 0 or blocks.vocab == 0
        whole = blocks.columns >= blocks.vocab and vocabulary.group is None
        self.hidden_sum = self.weight_sum = None
        if need[0]:
            held = hidden_TD.dtype if whole else dtype
            self.hidden_sum = torch.empty(hidden_TD.shape, dtype=held, device=hidden_TD.device)
            self.hidden_sum[: len(hidden_TD) if empty else 0] = 0
        if need[1]:
            held = weight_VD.dtype if blocks.rows >= blocks.tokens else dtype
            self.weight_sum = torch.empty(weight_VD.shape, dtype=held, device=weight_VD.device)
            self.weight_sum[0 if empty else blocks.vocab :] = 0
        self.buffer = hidden_TD.new_empty(0)

    def workspace(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """Return a buffer [C, V] in the inputs' dtype for a block's gradient: the logits if they have this dtype."""
        if logits_CV.dtype == self.hidden_TD.dtype:
            return logits_CV
        if self.buffer.numel() < logits_CV.numel():
            self.buffer = self.hidden_TD.new_empty(logits_CV.numel())
        return self.buffer[: logits_CV.numel()].view(logits_CV.shape)

    def add(self, rows: slice, columns: slice, gradient_CV: torch.Tensor, spare_CV: torch.Tensor) -> None:
        """Add the gradient of one block of logits. Blocks must be added in the order of `Blocks.products`.

        spare_CV: the result of `workspace`, which this method may overwrite. spare_CV and gradient_CV may be the same
        tensor.
        """
        low_CV = gradient_CV if gradient_CV.dtype == spare_CV.dtype else spare_CV.copy_(gradient_CV)
        if self.weight_sum is not None:
            outer_(self.weight_sum[columns], low_CV, self.hidden_TD[rows], rows.start > 0)
        if self.hidden_sum is not None:
            product_(self.hidden_sum[rows], low_CV, self.weight_VD[columns], columns.start > 0)

    def finish(self, factor: torch.Tensor | None = None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of hidden_TD and weight_VD in the inputs' dtype, and free the sums; call it only once.

        The gradient of hidden_TD is summed over the ranks that divide the vocabulary. factor: a scalar that multiplies
        both gradients; None for 1.
        """
        hidden, weight = self.hidden_sum, self.weight_sum
        self.hidden_sum = self.weight_sum = None
        if hidden is not None:
            hidden = self.vocabulary.sum_(hidden)
        return self._finished(hidden, factor), self._finished(weight, factor)

    def _finished(self, total: torch.Tensor | None, factor: torch.Tensor | None) -> torch.Tensor | None:
        if total is None or factor is None:
            return None if total is None else total.to(self.hidden_TD.dtype)
        # One pass over the gradient both multiplies it and rounds it to the inputs' dtype.
        out = total if total.dtype == self.hidden_TD.dtype else torch.empty_like(total, dtype=self.hidden_TD.dtype)
        return torch.mul(total, factor.to(total.dtype), out=out)
