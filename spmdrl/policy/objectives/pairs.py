"""Objective of preference losses of two responses: weighted losses of pairs, and the likelihood of the chosen."""

from dataclasses import dataclass
from typing import Any

import torch

from spmdrl.algos.aggregate import Totals, sum_per_sequence
from spmdrl.algos.preference import LOSSES, SFT, Pairs, matched_margins, needs_reference
from spmdrl.config.preference import PreferenceMethod
from spmdrl.data.batch import Batch
from spmdrl.data.dealing import gather_rows
from spmdrl.data.preferences import CHOSEN
from spmdrl.policy.contract import LossResult, Objective, Policy, Second, Shared
from spmdrl.policy.objectives.tokens import add_mean
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics


@dataclass
class PairObjective(Objective):
    """Averages a weighted sum of losses over the pairs of a step.

    Both responses of a pair are neighbours in every micro-batch (`seq["unit"]`), the chosen one first.
    """

    losses: dict[str, float]
    """Weights by name in `algos.preference.LOSSES`, or `sft`."""
    settings: PreferenceMethod
    policy: Policy
    peers: Peers
    temperature: float = 1.0

    @property
    def columns(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See the contract."""
        reference = ("token/ref_logp",) if needs_reference(self.losses) else ()
        return frozenset({"token/mask", "seq/unit", *reference})

    @property
    def second(self) -> Second:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See the contract."""
        return "collision" if self.settings.weighted else "top"

    def prepare(self, share: Batch, index: int) -> Shared:
        """Implements `prepare` of the contract: counts pairs and tokens of chosen responses.

        Adds `seq["matched/..."]` to the share for losses that sort.
        """
        mask_T, chosen_B = share.token["mask"], share.seq["sample"] == CHOSEN
        counts = torch.stack([chosen_B.sum(), (mask_T & share.per_token(chosen_B)).sum()]).double()
        pairs, tokens = self.peers.sum(counts).tolist()
        if self.matched:
            self._match(share)
        return Shared(Totals(tokens, pairs))

    @property
    def matched(self) -> list[str]:
        """Names of the losses that sort the pairs of the step."""
        return [name for name in self.losses if name != SFT and LOSSES[name].matched]

    def _match(self, share: Batch) -> None:
        """Add the margins that losses which sort need from pairs of other micro-batches and ranks."""
        logp_T, _ = self.policy.logprobs(share, self.temperature, self.second)
        columns = [self._sums(share, x_T.double()).view(-1, 2) for x_T in (logp_T, share.token["ref_logp"])]
        chosen_P = torch.nonzero(share.seq["sample"] == CHOSEN).flatten()
        everyone, mine = gather_rows(share, chosen_P, torch.cat(columns, 1), self.peers)
        for name, of_all in matched_margins(everyone[:, :2], everyone[:, 2:]).items():
            if name in self.matched:
                share.seq[f"matched/{name}"] = of_all[mine].flatten()

    def _sums(self, batch: Batch, x_T: torch.Tensor) -> torch.Tensor:
        """Sum x over the trained tokens of each response, [B]; tokens past the shorter length weigh `tail`."""
        device = x_T.device
        mask, seq = batch.token["mask"].to(device), batch.seq_index.to(device)
        x_T = torch.where(mask, x_T, torch.zeros_like(x_T))
        return sum_per_sequence(
            x_T if self.settings.tail == 1 else x_T * self._weights(batch).to(device), seq, len(batch)
        )

    def _weights(self, batch: Batch) -> torch.Tensor:
        """Return the weight of each token in the sum of its response, float64 [T]."""
        mask = batch.token["mask"].double()
        counts_B = batch.sum_tokens(torch.ones_like(mask))
        shorter_B = torch.minimum(counts_B[0::2], counts_B[1::2]).repeat_interleave(2)
        place_T = mask.cumsum(0) - mask - batch.per_token(counts_B.cumsum(0) - counts_B)
        return torch.where(place_T < batch.per_token(shorter_B), 1.0, self.settings.tail).double()

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Shared) -> LossResult:
        """Implements `loss` of the contract, from logp."""
        device, metrics = first_T.device, Metrics()
        mask, seq = micro.token["mask"].to(device), micro.seq_index.to(device)
        logp = torch.where(mask, first_T, torch.zeros_like(first_T)).double()
        counts_B = sum_per_sequence(mask, seq, len(micro))
        sums_B = self._sums(micro, logp)
        ref_T = micro.token.get("ref_logp")
        ref_B = torch.zeros_like(sums_B) if ref_T is None else self._sums(micro, ref_T.to(device).double())
        matched = {name: micro.seq[f"matched/{name}"].to(device).view(-1, 2) for name in self.matched}
        pairs = Pairs(*(x_B[side::2] for x_B in (sums_B, ref_B, counts_B) for side in (0, 1)), matched=matched)
        weight_P: Any = 1.0
        if self.settings.weighted:
            # WPO's weight of a pair: how likely both responses are under the policy.
            aligned = torch.where(mask, logp.detach() - second_T.double().log(), torch.zeros_like(logp))
            likely_B = (sum_per_sequence(aligned, seq, len(counts_B)) / counts_B).exp()
            weight_P = likely_B[0::2] * likely_B[1::2]
        total: Any = logp.sum() * 0.0
        for name, weight in self.losses.items():
            if name == SFT:
                chosen_T = micro.per_token(micro.seq["sample"] == CHOSEN).to(device)
                one = -(logp * chosen_T).sum() / max(1.0, shared.totals.tokens)
            else:
                one = (LOSSES[name].of(pairs, self.settings) * weight_P).sum() / max(1.0, shared.totals.sequences)
            metrics.add_sum(f"loss/{name}", one.detach())
            total = total + weight * one
        metrics.add_sum("loss", total)
        self._describe(metrics, pairs)
        return LossResult(total, metrics)

    def _describe(self, metrics: Metrics, x: Pairs) -> None:
        """Add the metrics that TRL calls rewards, beta times log-ratio, with accuracy and logp."""
        won, lost = (self.settings.beta * ratio.detach() for ratio in (x.ratio_chosen, x.ratio_rejected))
        for name, value in (
            ("rewards/chosen", won),
            ("rewards/rejected", lost),
            ("rewards/margin", won - lost),
            ("accuracy/mean", (won > lost).double()),
            ("logp/chosen", x.chosen.detach()),
            ("logp/rejected", x.rejected.detach()),
        ):
            add_mean(metrics, name, value.double())
