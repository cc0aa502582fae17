"""Objective for losses of single responses that are labelled good or bad: KTO, BCO and their like."""

import math
from dataclasses import dataclass, field

import torch

from spmdrl.algos.aggregate import Totals, sum_per_sequence
from spmdrl.algos.preference import LOSSES, Labelled
from spmdrl.config.preference import PreferenceMethod
from spmdrl.data.batch import Batch
from spmdrl.data.preferences import CHOSEN, REJECTED
from spmdrl.policy.contract import MEASURE, LossResult, Objective, Policy, Shared
from spmdrl.policy.objectives.tokens import add_mean
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics

MISMATCHED = 2
"""Sample numbers from this one on are not trained: responses paired with another prompt than their own (KTO)."""


@dataclass
class LabelledShared(Shared):
    """The shift of an optimizer step beside its counts, over all ranks."""

    shift: float = 0.0
    """Reference point of the loss: subtracted from the log-ratio (KTO) or from beta times it (BCO)."""


@dataclass
class LabelledObjective(Objective):
    """Averages a loss over the responses of a step."""

    loss_name: str
    """A name in `algos.preference.LOSSES`."""
    settings: PreferenceMethod
    policy: Policy
    peers: Peers
    running: list[float] = field(default_factory=lambda: [0.0] * 4)
    """BCO's running sums: sum and count of the log-ratios of good responses, then of bad ones."""
    temperature: float = 1.0
    columns = frozenset({"token/mask", "token/ref_logp"})
    second = "top"

    def prepare(self, share: Batch, index: int) -> LabelledShared:
        """Implements `prepare` of the contract."""
        trained_B = share.seq["sample"] < MISMATCHED
        responses = float(self.peers.sum(trained_B.double().sum()))
        return LabelledShared(Totals(0.0, responses), trained_B, shift=self._shift(share, index))

    def _shift(self, share: Batch, index: int) -> float:
        """Compute the shift. KTO: mean log-ratio of mismatched responses, at least 0. BCO: mean reward so far."""
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
            # A step that is not finite is skipped and must not enter the running mean.
            self.running[:] = [before + more for before, more in zip(self.running, sums, strict=True)]
        return self.settings.beta * _label_mean(self.running)

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: LabelledShared) -> LossResult:
        """Implements `loss` of the contract, from logp."""
        device, metrics = first_T.device, Metrics()
        mask = (micro.token["mask"] & micro.per_token(micro.seq["sample"] < MISMATCHED)).to(device)
        ratio_T = first_T.double() - micro.token["ref_logp"].to(device).double()
        ratio_T = torch.where(mask, ratio_T, torch.zeros_like(ratio_T))
        ratio_B = sum_per_sequence(ratio_T, micro.seq_index.to(device), len(micro))
        trained_B = (micro.seq["sample"] < MISMATCHED).to(device)
        x = Labelled(ratio_B[trained_B], (micro.seq["sample"].to(device) == CHOSEN)[trained_B])
        weights = self.settings.wanted_weight, self.settings.unwanted_weight
        weight = torch.where(x.wanted, *(torch.tensor(w, dtype=torch.float64, device=device) for w in weights))
        loss = (LOSSES[self.loss_name].of(x, self.settings, shared.shift) * weight).sum() / max(
            1.0, shared.totals.sequences
        )
        metrics.add_sum("loss", loss.detach())
        rewards = self.settings.beta * x.ratio.detach()
        for name, which in (("rewards/chosen", x.wanted), ("rewards/rejected", ~x.wanted)):
            add_mean(metrics, name, rewards[which])
        metrics.add("kl" if self.loss_name == "kto" else "shift", shared.shift)
        return LossResult(loss, metrics)


def _label_mean(sums: list[float]) -> float:
    """Return the mean of the means of both labels, or the mean of the only label present."""
    means = [total / count for total, count in (sums[:2], sums[2:]) if count]
    return sum(means) / len(means) if means else 0.0
