"""The kernels' row operations in plain torch, for CPUs and as the reference in tests of the Triton kernels.

Shapes: a block of logits has C rows and V columns. `vocabulary.py` describes states [4, C].
"""

import torch

from spmdrl_kernels.blocks import LOWEST
from spmdrl_kernels.vocabulary import MAX, SECOND, SUM, TARGET, clear_, rescale_


class TorchRows:
    """Computes row operations over blocks of logits, in buffers that all blocks share.

    Sharing buffers avoids the page faults of large allocations on a CPU. All calls write to `out=` or in place, so
    autocast does not change their types.
    """

    def __init__(self, dtype: torch.dtype):
        """Start without buffers. dtype: type in which logits are processed; matmuls keep the type of their inputs."""
        self.dtype = dtype
        self.buffers: dict[str, torch.Tensor] = {}

    def borrow(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """Return a copy of the logits that `add_stats_` and `logit_gradient` may overwrite.

        A logit of -inf, which excludes a token, becomes LOWEST, whose probability is 0 too.
        """
        return self._buffer("logits", logits_CV).copy_(logits_CV).clamp_(min=LOWEST)

    def add_stats_(
        self,
        logits_CV: torch.Tensor,
        state_4C: torch.Tensor,
        targets_C: torch.Tensor,
        offset: int,
        scale_C: torch.Tensor | None,
        softcap: float | None,
        second: str,
        first: bool,
    ) -> None:
        """Update the state of a block's rows by the block's columns; overwrite the logits.

        targets_C: target of each row; its column in this block is the target minus `offset`, if that lies in [0, V).
        scale_C: 1 / temperature. second: what row SECOND of the state is for: `entropy`, `collision`, or `` for none.
        first: whether these are the rows' first columns, so that the contents of the state are ignored.
        """
        if first:
            clear_(state_4C)
        targets_C = targets_C - offset
        z_CV = self._scaled(logits_CV, scale_C, softcap)
        here_C = (targets_C >= 0) & (targets_C < z_CV.shape[1])
        at_C1 = torch.where(here_C, targets_C, 0)[:, None]
        state_4C[TARGET].copy_(torch.where(here_C, z_CV.gather(1, at_C1).squeeze(1), state_4C[TARGET]))
        top_C = torch.maximum(state_4C[MAX], z_CV.amax(dim=1))
        rescale_(state_4C, top_C, second)
        z_CV.sub_(top_C[:, None])
        e_CV = torch.exp(z_CV, out=self._buffer("exp", z_CV) if second == "entropy" else z_CV)
        state_4C[SUM].add_(e_CV.sum(dim=1))
        if second == "entropy":
            state_4C[SECOND].add_(e_CV.mul_(z_CV).sum(dim=1))
        elif second == "collision":
            state_4C[SECOND].add_(e_CV.square_().sum(dim=1))

    def add_rounded_(
        self,
        exact_CV: torch.Tensor,
        state_4C: torch.Tensor,
        kept_CV: torch.Tensor,
        kept_4C: torch.Tensor,
        targets_C: torch.Tensor,
        offset: int,
        scale_C: torch.Tensor | None,
        softcap: float | None,
        second: str,
        first: bool,
    ) -> None:
        """Round a block of logits into kept_CV; update state_4C by the exact logits and kept_4C by the rounded ones.

        The other arguments are as in `add_stats_`. An implementation may leave row TARGET of kept_4C unset.
        """
        kept_CV.copy_(exact_CV)
        for logits_CV, into_4C in ((exact_CV, state_4C), (kept_CV, kept_4C)):
            self.add_stats_(self.borrow(logits_CV), into_4C, targets_C, offset, scale_C, softcap, second, first)

    def results(
        self, state_4C: torch.Tensor, targets_C: torch.Tensor, vocab: int, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return logp [C], entropy [C] or None, and m and s [2, C] with p = s e^(y - m), from states of all columns.

        m is the maximum of the logits y. If m were their logsumexp, rounding errors would be larger: at logits of 16,
        the gradient of a likely token, 1 - p, would have an error of 1e-6 instead of 1e-7.

        vocab: size of the vocabulary. The logp of a target outside of [0, vocab) is nan.
        """
        log_sum_C = state_4C[SUM].log()
        logp_C = (state_4C[TARGET] - state_4C[MAX]).sub_(log_sum_C)
        logp_C.masked_fill_(logp_C < LOWEST / 1e3, -torch.inf)
        logp_C.masked_fill_((targets_C < 0) | (targets_C >= vocab), torch.nan)
        # H = log sum e^z - sum e^z z / sum e^z, where z is y minus its maximum.
        entropy_C = log_sum_C - state_4C[SECOND] / state_4C[SUM] if entropy else None
        return logp_C, entropy_C, torch.stack([state_4C[MAX], state_4C[SUM].reciprocal()])

    def logit_gradient(
        self,
        logits_CV: torch.Tensor,
        targets_C: torch.Tensor,
        offset: int,
        scale_C: torch.Tensor | None,
        softcap: float | None,
        norm_2C: torch.Tensor,
        entropy_C: torch.Tensor | None,
        grad_logp_C: torch.Tensor,
        grad_entropy_C: torch.Tensor | None,
        out_CV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the gradient of a block of logits, in `dtype`, in a buffer or in the logits' memory; ignore out_CV.

        norm_2C: the numbers m and s of `results`. The gradient is g (onehot - p) - e p (log p + H), times scale_C
        and the derivative of the softcap, where g and e are the upstream gradients of logp and of the entropy H.
        """
        z_CV = self._scaled(logits_CV, scale_C, softcap)
        slope_CV = None
        if softcap is not None:  # The softcap's derivative is 1 - tanh^2, where tanh is z / (softcap * scale).
            slope_CV = torch.div(z_CV, softcap, out=self._buffer("slope", z_CV))
            if scale_C is not None:
                slope_CV.div_(scale_C[:, None])
            slope_CV.square_().neg_().add_(1)
        g_C1 = (grad_logp_C if scale_C is None else grad_logp_C * scale_C)[:, None]
        z_CV.sub_(norm_2C[0][:, None])
        share_C1 = norm_2C[1][:, None]  # With this share, p = share * e^z and log p = z + log share.
        if grad_entropy_C is None or entropy_C is None:  # The caller passes both or neither.
            z_CV.exp_().mul_(-g_C1 * share_C1)
        else:
            e_C1 = (grad_entropy_C if scale_C is None else grad_entropy_C * scale_C)[:, None]
            p_CV = torch.exp(z_CV, out=self._buffer("exp", z_CV))
            added_C1 = g_C1 + e_C1 * (entropy_C + norm_2C[1].log())[:, None]
            z_CV.mul_(-e_C1 * share_C1).sub_(added_C1 * share_C1).mul_(p_CV)
        targets_C = targets_C - offset
        here_C = (targets_C >= 0) & (targets_C < z_CV.shape[1])
        z_CV.scatter_add_(1, torch.where(here_C, targets_C, 0)[:, None], torch.where(here_C[:, None], g_C1, 0))
        return z_CV if slope_CV is None else z_CV.mul_(slope_CV)

    def _scaled(self, logits_CV, scale_C, softcap) -> torch.Tensor:
        """Return the logits after softcap and division by the temperature, in `dtype`."""
        same = logits_CV.dtype == self.dtype
        z_CV = logits_CV if same else self._buffer("logits", logits_CV).copy_(logits_CV)
        if softcap is not None:
            z_CV.div_(softcap).tanh_().mul_(softcap)
        return z_CV if scale_C is None else z_CV.mul_(scale_C[:, None])

    def _buffer(self, name: str, like_CV: torch.Tensor) -> torch.Tensor:
        flat = self.buffers.get(name)
        if flat is None or flat.numel() < like_CV.numel():
            flat = self.buffers[name] = like_CV.new_empty(like_CV.numel(), dtype=self.dtype)
        return flat[: like_CV.numel()].view(like_CV.shape)
