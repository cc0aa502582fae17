"""Preference objectives on response pairs, or on single responses labelled good or bad (KTO, BCO)."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from spmdrl.algos.aggregate import Totals, sum_per_sequence
from spmdrl.algos.preference import LOSSES, SFT, Labelled, Pairs, matched_margins, needs_reference
from spmdrl.config.preference import PreferenceMethod
from spmdrl.data.batch import Batch
from spmdrl.data.distribute import gather_rows
from spmdrl.data.preferences import CHOSEN, REJECTED
from spmdrl.policy.contract import MEASURE, LossResult, Objective, Policy, Second, Shared
from spmdrl.policy.objectives.tokens import add_mean
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics

MISMATCHED = 2
"""Responses with this sample index or a higher one are not trained on; KTO gives them another response's prompt."""


@dataclass
class PairObjective(Objective):
    """Averages a weighted sum of preference losses over the pairs of an optimizer step.

    The two responses of a pair are adjacent in a micro-batch (`seq["unit"]`), and the chosen response comes first.
    """

    losses: dict[str, float]
    """Maps each loss (a key of `algos.preference.LOSSES`, or `sft`) to its weight in the sum."""
    settings: PreferenceMethod
    policy: Policy
    peers: Peers
    temperature: float = 1.0

    @property
    def columns(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Implements `Objective.columns`."""
        reference = ("token/ref_logp",) if needs_reference(self.losses) else ()
        return frozenset({"token/mask", "seq/unit", *reference})

    @property
    def second(self) -> Second:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Implements `Objective.second`."""
        return "collision" if self.settings.weighted else "top"

    def prepare(self, share: Batch, index: int) -> Shared:
        """Implements `Objective.prepare`: counts pairs and tokens of chosen responses over all ranks.

        For losses that sort the pairs of a step, it also adds columns `seq["matched/..."]` to the share.
        """
        mask_T, chosen_B = share.token["mask"], share.seq["sample"] == CHOSEN
        counts = torch.stack([chosen_B.sum(), (mask_T & share.per_token(chosen_B)).sum()]).double()
        pairs, tokens = self.peers.sum(counts).tolist()
        if self.matched:
            self._match(share)
        return Shared(Totals(tokens, pairs))

    @property
    def matched(self) -> list[str]:
        """Names of the losses that sort all pairs of an optimizer step by margin."""
        return [name for name in self.losses if name != SFT and LOSSES[name].matched]

    def _match(self, share: Batch) -> None:
        """Add the columns that `matched_margins` computes from all pairs of the step, over all ranks."""
        logp_T, _ = self.policy.logprobs(share, self.temperature, self.second)
        columns = [self._sums(share, x_T.double()).view(-1, 2) for x_T in (logp_T, share.token["ref_logp"])]
        chosen_P = torch.nonzero(share.seq["sample"] == CHOSEN).flatten()
        everyone, mine = gather_rows(share, chosen_P, torch.cat(columns, 1), self.peers)
        for name, of_all in matched_margins(everyone[:, :2], everyone[:, 2:]).items():
            if name in self.matched:
                share.seq[f"matched/{name}"] = of_all[mine].flatten()

    def _sums(self, batch: Batch, x_T: torch.Tensor) -> torch.Tensor:
        """Sum x over the trained tokens of each response, [B].

        In the longer response, tokens beyond the length of the shorter response are weighted by `tail`.
        """
        x_T = torch.where(batch.token["mask"], x_T, torch.zeros_like(x_T))
        x_T = x_T if self.settings.tail == 1 else x_T * self._weights(batch)
        return sum_per_sequence(x_T, batch.seq_index, len(batch))

    def _weights(self, batch: Batch) -> torch.Tensor:
        """Return the weight of each token in the sum over its response (`_sums`), float64 [T]."""
        # Integer sums are exact, and there is a deterministic GPU kernel for them.
        mask = batch.token["mask"].long()
        counts_B = batch.sum_tokens(torch.ones_like(mask)).long()
        shorter_B = torch.minimum(counts_B[0::2], counts_B[1::2]).repeat_interleave(2)
        place_T = mask.cumsum(0) - mask - batch.per_token(counts_B.cumsum(0) - counts_B)
        return torch.where(place_T < batch.per_token(shorter_B), 1.0, self.settings.tail).double()

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Shared) -> LossResult:
        """Implements `Objective.loss`; first_T is logp."""
        metrics, mask, seq = Metrics(), micro.token["mask"], micro.seq_index
        logp = torch.where(mask, first_T, torch.zeros_like(first_T)).double()
        counts_B = sum_per_sequence(mask, seq, len(micro))
        sums_B = self._sums(micro, logp)
        ref_T = micro.token.get("ref_logp")
        ref_B = torch.zeros_like(sums_B) if ref_T is None else self._sums(micro, ref_T.double())
        matched = {name: micro.seq[f"matched/{name}"].view(-1, 2) for name in self.matched}
        pairs = Pairs(*(x_B[side::2] for x_B in (sums_B, ref_B, counts_B) for side in (0, 1)), matched=matched)
        weight_P: Any = 1.0
        if self.settings.weighted:
            # As in WPO, the weight of a pair is the likelihood of both responses under the policy.
            aligned = torch.where(mask, logp.detach() - second_T.double().log(), torch.zeros_like(logp))
            likely_B = (sum_per_sequence(aligned, seq, len(counts_B)) / counts_B).exp()
            weight_P = likely_B[0::2] * likely_B[1::2]
        total: Any = logp.sum() * 0.0
        for name, weight in self.losses.items():
            if name == SFT:
                chosen_T = micro.per_token(micro.seq["sample"] == CHOSEN)
                one = -(logp * chosen_T).sum() / max(1.0, shared.totals.tokens)
            else:
                one = (LOSSES[name].of(pairs, self.settings) * weight_P).sum() / max(1.0, shared.totals.sequences)
            metrics.add_sum(f"loss/{name}", one.detach())
            total = total + weight * one
        metrics.add_sum("loss", total)
        self._describe(metrics, pairs)
        return LossResult(total, metrics)

    def _describe(self, metrics: Metrics, x: Pairs) -> None:
        """Add pair metrics: rewards (beta times the log-ratio, as in TRL), accuracy and logp."""
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


@dataclass
class LabelledShared(Shared):
    """The `Shared` values of an optimizer step plus the reference point of the loss, the same on all ranks."""

    shift: float = 0.0
    """Reference point that the loss subtracts from the log-ratio (KTO) or from beta times the log-ratio (BCO)."""


@dataclass
class LabelledObjective(Objective):
    """Averages a preference loss over the labelled responses of an optimizer step."""

    loss_name: str
    """Key of the loss in `algos.preference.LOSSES`."""
    settings: PreferenceMethod
    policy: Policy
    peers: Peers
    running: list[float] = field(default_factory=lambda: [0.0] * 4)
    """Running sums for BCO: sum and count of log-ratios for good responses, then for bad responses."""
    temperature: float = 1.0
    columns = frozenset({"token/mask", "token/ref_logp"})
    second = "top"

    def prepare(self, share: Batch, index: int) -> LabelledShared:
        """Implements `Objective.prepare`."""
        trained_B = share.seq["sample"] < MISMATCHED
        responses = float(self.peers.sum(trained_B.double().sum()))
        return LabelledShared(Totals(0.0, responses), trained_B, shift=self._shift(share, index))

    def _shift(self, share: Batch, index: int) -> float:
        """Return the reference point of the loss, or 0 if the loss has none.

        For KTO, it is the mean log-ratio of mismatched responses, or 0 if this mean is negative. For BCO, it is the
        mean reward.
        """
        source = LOSSES[self.loss_name].shift
        if not source:
            return 0.0
        scored = share
        if source == "other prompts":
            scored = share.select(torch.nonzero(share.seq["sample"] >= MISMATCHED).flatten())
        logp_T, _ = self.policy.logprobs(scored, self.temperature, self.second)
        ratio_B = scored.sum_tokens(logp_T.double() - scored.token["ref_logp"].double())
        if source == "other prompts":
            local = torch.tensor([float(ratio_B.sum()), len(scored)], dtype=torch.float64)
            total, count = self.peers.sum(local).tolist()
            return max(0.0, total / count) if count else 0.0
        by_label = [ratio_B[scored.seq["sample"] == label] for label in (CHOSEN, REJECTED)]
        local = [number for ratio_N in by_label for number in (float(ratio_N.sum()), float(len(ratio_N)))]
        sums = self.peers.sum(torch.tensor(local, dtype=torch.float64)).tolist()
        if index == MEASURE:
            return self.settings.beta * _label_mean(self.running if any(self.running) else sums)
        if all(map(math.isfinite, sums)):
            # Exclude non-finite sums from the running mean, because the step will be skipped.
            self.running[:] = [before + more for before, more in zip(self.running, sums, strict=True)]
        return self.settings.beta * _label_mean(self.running)

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: LabelledShared) -> LossResult:
        """Implements `Objective.loss`; first_T is logp."""
        metrics = Metrics()
        mask = micro.token["mask"] & micro.per_token(micro.seq["sample"] < MISMATCHED)
        ratio_T = first_T.double() - micro.token["ref_logp"].double()
        ratio_T = torch.where(mask, ratio_T, torch.zeros_like(ratio_T))
        ratio_B = sum_per_sequence(ratio_T, micro.seq_index, len(micro))
        trained_n = micro.where(lambda batch: batch.seq["sample"] < MISMATCHED)
        x = Labelled(ratio_B[trained_n], (micro.seq["sample"] == CHOSEN)[trained_n])
        weights = self.settings.wanted_weight, self.settings.unwanted_weight
        weight = torch.where(x.wanted, *(ratio_B.new_full((), weight) for weight in weights))
        loss = (LOSSES[self.loss_name].of(x, self.settings, shared.shift) * weight).sum()
        loss = loss / max(1.0, shared.totals.sequences)
        metrics.add_sum("loss", loss.detach())
        reward_B = self.settings.beta * ratio_B.detach()
        for name, label in (("rewards/chosen", CHOSEN), ("rewards/rejected", REJECTED)):
            add_mean(metrics, name, reward_B[micro.where(lambda batch, label=label: batch.seq["sample"] == label)])
        metrics.add("kl" if self.loss_name == "kto" else "shift", shared.shift)
        return LossResult(loss, metrics)


def _label_mean(sums: list[float]) -> float:
    """Return the average of the per-label means, or the mean of the only label present.

    sums: like `LabelledObjective.running`.
    """
    means = [total / count for total, count in (sums[:2], sums[2:]) if count]
    return sum(means) / len(means) if means else 0.0
