"""The objective of preference learning: weighted losses of pairs, and the likelihood of the chosen responses."""

from dataclasses import dataclass
from typing import Any

import torch

from spmdrl.algos.aggregate import Totals, count_totals, sum_per_sequence
from spmdrl.algos.preference import LOSSES, SORTED, Pairs, Terms
from spmdrl.data.batch import Batch, gather_rows
from spmdrl.policy.contract import LossResult, Objective, Policy, Shared
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics

CHOSEN, REJECTED = 0, 1
"""Sample index of the responses of a pair; a pair is a position of the batch."""


@dataclass
class PairShared(Shared):
    """Counts of a whole optimizer step, over all ranks."""

    pairs: float = 0.0
    chosen_tokens: float = 0.0


@dataclass
class PairObjective(Objective):
    """Mean over the pairs of a step of a weighted sum of losses."""

    losses: dict[str, float]
    """Name in `algos.preference.LOSSES`, or `sft`, and its weight."""
    terms: Terms
    policy: Policy
    peers: Peers
    shortened: float | None = None
    """Weight of tokens behind the length of the shorter response (LD-DPO, https://arxiv.org/abs/2409.06411)."""
    temperature: float = 1.0
    columns = frozenset({"token/mask", "seq/unit", "seq/ref_logp"})
    second = "top"

    def prepare(self, share: Batch, index: int) -> PairShared:
        """Implements `prepare` of the contract. A loss that sorts gets `seq["matched"]` in the share."""
        mask_T, chosen_B = share.token["mask"], share.seq["sample"] == CHOSEN
        local = count_totals(mask_T, share.seq_index)
        chosen_tokens = (mask_T & share.per_token(chosen_B)).sum()
        counts = [local.tokens, local.sequences, float(chosen_B.sum()), float(chosen_tokens)]
        tokens, sequences, pairs, chosen = self.peers.sum(torch.tensor(counts, dtype=torch.float64)).tolist()
        if SORTED & self.losses.keys():
            share.seq["matched"] = self._matched(share)
        return PairShared(Totals(tokens, sequences), pairs=pairs, chosen_tokens=chosen)

    def _matched(self, share: Batch) -> torch.Tensor:
        """The reference's margin that has the rank of each pair's own, float64 [B], at both of its responses."""
        logp_B = share.sum_tokens(self.policy.logprobs(share, self.temperature, "top")[0])
        chosen_B = torch.nonzero(share.seq["sample"] == CHOSEN).flatten()
        margins_P2 = torch.stack([x[chosen_B] - x[chosen_B + 1] for x in (logp_B, share.seq["ref_logp"])], 1)
        everyone, mine = gather_rows(share, chosen_B, margins_P2, self.peers)
        rank = torch.argsort(torch.argsort(everyone[:, 0], stable=True), stable=True)
        matched_P = everyone[:, 1].sort().values[rank][mine]
        return matched_P.repeat_interleave(2)

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: PairShared) -> LossResult:
        """Implements `loss` of the contract, from logp."""
        device, metrics = first_T.device, Metrics()
        mask, seq = micro.token["mask"].to(device), micro.seq_index.to(device)
        logp = torch.where(mask, first_T, torch.zeros_like(first_T))
        counts_B = sum_per_sequence(mask, seq, len(micro))
        weight_T = self._weights(micro, counts_B).to(device)
        sums_B = sum_per_sequence(logp * weight_T, seq, len(micro))
        ref_B = micro.seq["ref_logp"].to(device)
        pairs = Pairs(
            *(sums_B[0::2], sums_B[1::2], ref_B[0::2], ref_B[1::2], counts_B[0::2], counts_B[1::2]),
            matched=micro.seq["matched"].to(device)[0::2] if "matched" in micro.seq else None,
        )
        total: Any = logp.sum() * 0.0
        for name, weight in self.losses.items():
            if name == "sft":
                chosen_T = micro.per_token(micro.seq["sample"] == CHOSEN).to(device)
                one = -(logp * chosen_T).double().sum() / max(1.0, shared.chosen_tokens)
            else:
                one = LOSSES[name](pairs, self.terms).sum() / max(1.0, shared.pairs)
            metrics.add_sum(f"loss/{name}", one.detach())
            total = total + weight * one
        metrics.add_sum("loss", total)
        self._describe(metrics, pairs, len(micro) // 2)
        return LossResult(total, metrics)

    def _weights(self, micro: Batch, counts_B: torch.Tensor) -> torch.Tensor:
        """Weight of each token's logp in the sum of its response, [T]."""
        if self.shortened is None:
            return torch.ones(micro.n_tokens, dtype=torch.float64)
        counts = counts_B.cpu()
        shorter_B = torch.minimum(counts[0::2], counts[1::2]).repeat_interleave(2)
        mask = micro.token["mask"].double()
        before_T = mask.cumsum(0) - mask
        begun_B = before_T[micro.cu_seqlens[:-1].long()] if len(micro) else before_T
        place_T = before_T - micro.per_token(begun_B)
        return torch.where(place_T < micro.per_token(shorter_B), 1.0, self.shortened)

    def _describe(self, metrics: Metrics, x: Pairs, count: int) -> None:
        """Add what TRL calls rewards: beta times log-ratio."""
        won, lost = (self.terms.beta * ratio.detach() for ratio in (x.ratio_chosen, x.ratio_rejected))
        for name, value in (
            ("rewards/chosen", won),
            ("rewards/rejected", lost),
            ("rewards/margin", won - lost),
            ("rewards/accuracy", (won > lost).double()),
            ("logp/chosen", x.chosen.detach()),
            ("logp/rejected", x.rejected.detach()),
        ):
            metrics.add(name, value.double().mean() if count else 0.0, count)
