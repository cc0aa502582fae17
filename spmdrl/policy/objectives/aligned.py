"""Distills from a teacher with a different tokenizer by matching distributions over spans of text.

A span of text has a base, the position where the distributions are compared, and factors, the probabilities of the
sampled tokens at the other positions of the span. Teacher and student tokenize a span differently, so each has its own
base and factors. The batch stores the teacher's values for a span at the student's base.
"""

from typing import Any

import torch
import torch.distributed as dist

from spmdrl.config.divergence import DivergenceConfig
from spmdrl.data.batch import Batch
from spmdrl.policy.contract import HeadFunction, OutputHead, Shared
from spmdrl.policy.objectives.distillation import DistillObjective, TargetReader
from spmdrl.spmd.exchange import all_reduce
from spmdrl.spmd.peers import Peers
from spmdrl_kernels.aligned import Matched, SpanTeacher, aligned_loss
from spmdrl_kernels.linear import linear_logprob, wide

TEACHER = "reference"
LEAD, SHIFT = f"{TEACHER}/lead", f"{TEACHER}/shift"
OUTSIDE = -(1 << 30)
"""Value of the column `lead` for tokens outside of all spans."""


class AlignedObjective(DistillObjective):
    """Averages the distance between student and teacher over the spans of an optimizer step.

    It reads three columns. `lead`, int32 [T], is the offset in tokens from a token to the base of its span (0 at the
    base). At a base, `states` [T, E] holds the teacher's hidden state, and `shift` [T] the log of the product of the
    teacher's factors.
    """

    def __init__(
        self,
        cfg: DivergenceConfig,
        reader: TargetReader,
        head: OutputHead,
        matched: Matched | None,
        temperature: float,
        peers: Peers,
        group: dist.ProcessGroup | None,
    ):
        """matched: as in `aligned_loss`. group: ranks that split a sequence, or None without splitting."""
        super().__init__(cfg, reader, {TEACHER: head}, temperature, peers)
        self.head, self.matched, self.group = head, matched, group
        self.states = reader.names(TEACHER)[0]
        self.columns = frozenset(f"token/{column}" for column in (LEAD, SHIFT, self.states))

    def trained_mask(self, batch: Batch) -> torch.Tensor:
        """Implements `TokenObjective.trained_mask`: the mask selects the base token of each span."""
        return batch.token["mask"] & (batch.token[LEAD] == 0)

    def token_loss(self, micro: Batch, shared: Shared) -> HeadFunction:
        """Implements `Objective.token_loss`; the result is collective over ranks that split a sequence."""
        tokens_T, lead_T, states_TE, shift_T = (micro.token[c] for c in ("tokens", LEAD, self.states, SHIFT))
        weight_T, theirs, device = self.weights(micro, shared), self.head, micro.device

        def function(states_nD, head: OutputHead, rows_n):
            limits: dict[str, Any] = {"softcap": head.softcap, "excluded": head.excluded}
            dtype, lead_n = wide(states_nD), lead_T[rows_n]
            distance_n, entropy_n = torch.zeros(2, len(rows_n), dtype=dtype, device=device)
            base = torch.nonzero(lead_n == 0).flatten()
            inside = torch.nonzero((lead_n != 0) & (lead_n != OUTSIDE)).flatten()
            factor_m, to_m = torch.zeros(0, dtype=dtype, device=device), (rows_n + lead_n)[inside]
            # Tokens in spans need logp with gradient. Other tokens only need their entropy, for metrics.
            for some, needs_grad in (
                (inside, torch.is_grad_enabled()),
                (torch.nonzero(lead_n == OUTSIDE).flatten(), False),
            ):
                if not len(some):
                    continue
                with torch.set_grad_enabled(needs_grad):
                    targets = tokens_T[rows_n[some]]
                    given = states_nD[some], head.weight_VD, targets, head.divisor
                    logp_m, entropy_m = linear_logprob(*given, **limits)
                assert entropy_m is not None
                entropy_n[some] = entropy_m.detach()
                factor_m = logp_m if some is inside else factor_m
            # The tokens of a span can be on two ranks of the group, so factors and gradients are summed over the group.
            own_T = torch.zeros(len(tokens_T), dtype=dtype, device=device).index_add_(0, to_m, factor_m.detach())
            own_T = all_reduce(own_T, "sum", self.group)
            rows = rows_n[base]
            teacher = SpanTeacher(
                *(states_TE[rows], theirs.weight_VD, shift_T[rows], self.temperature * theirs.divisor),
                *(theirs.softcap, theirs.excluded),
            )
            given = states_nD[base], head.weight_VD, own_T[rows], teacher, weight_T[rows], self.matched, head.divisor
            total, slope, distance_n[base], entropy_n[base] = aligned_loss(*given, **limits)
            slope_T = all_reduce(torch.zeros_like(own_T).index_copy_(0, rows, slope), "sum", self.group)
            # The added term is 0, and its gradient is the part of the loss gradient that flows through the student's
            # factors.
            total = total + (slope_T[to_m] * (factor_m - factor_m.detach())).sum()
            return total, (distance_n, entropy_n)

        return function
