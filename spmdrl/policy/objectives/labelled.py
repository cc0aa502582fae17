"""The objective of losses of single responses that are wanted or not: KTO, BCO and their like."""

import math
from dataclasses import dataclass, field

import torch

from spmdrl.algos.aggregate import sum_per_sequence
from spmdrl.algos.preference import LOSSES, Labelled
from spmdrl.config.preference import PreferenceMethod
from spmdrl.data.batch import Batch
from spmdrl.data.preferences import CHOSEN, REJECTED
from spmdrl.policy.contract import MEASURE, LossResult, Objective, Policy, Shared
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics

MISMATCHED = 2
"""Number of the first sample that is not trained: a response to another prompt than its own (KTO)."""


@dataclass
class LabelledShared(Shared):
    """Facts of a whole optimizer step, over all ranks."""

    responses: float = 0.0
    shift: float = 0.0
    """As the losses take it."""


@dataclass
class LabelledObjective(Objective):
    """Mean over the responses of a step."""

    loss_name: str
    """A name in `algos.preference.LOSSES`."""
    settings: PreferenceMethod
    policy: Policy
    peers: Peers
    moved: list[float] = field(default_factory=lambda: [0.0] * 4)
    """BCO: sum and number of the log-ratios so far of wanted responses, and of the others."""
    temperature: float = 1.0
    columns = frozenset({"token/mask", "token/ref_logp"})
    second = "top"

    def prepare(self, share: Batch, index: int) -> LabelledShared:
        """Implements `prepare` of the contract."""
        trained_B = share.seq["sample"] < MISMATCHED
        responses = float(self.peers.sum(trained_B.double().sum()))
        return LabelledShared(active=trained_B, responses=responses, shift=self._shift(share, index))

    def _shift(self, share: Batch, index: int) -> float:
        """KTO: the mean log-ratio of responses to other prompts, at least 0. BCO: the mean reward over steps."""
        source = LOSSES[self.loss_name].shift
        if not source:
            return 0.0
        asked = share
        if source == "other prompts":
            asked = share.select(torch.nonzero(share.seq["sample"] >= MISMATCHED).flatten())
        logp_T, _ = self.policy.logprobs(asked, self.temperature, self.second)
        ratio_B = asked.sum_tokens(logp_T.double() - asked.token["ref_logp"].double())
        if source == "other prompts":
            total, count = self.peers.sum(
                torch.tensor([float(ratio_B.sum()), len(asked)], dtype=torch.float64)
            ).tolist()
            return max(0.0, total / count) if count else 0.0
        sides = [ratio_B[asked.seq["sample"] == side] for side in (CHOSEN, REJECTED)]
        sums = [number for side_N in sides for number in (float(side_N.sum()), float(len(side_N)))]
        here = self.peers.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
        if index == MEASURE:
            return self.settings.beta * _half_of_each(self.moved if any(self.moved) else here)
        if all(map(math.isfinite, here)):
            # A step that is not finite is left out, and must not stay in the mean.
            self.moved[:] = [before + more for before, more in zip(self.moved, here, strict=True)]
        return self.settings.beta * _half_of_each(self.moved)

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: LabelledShared) -> LossResult:
        """Implements `loss` of the contract, from logp."""
        device, metrics = first_T.device, Metrics()
        mask = (micro.token["mask"] & micro.per_token(micro.seq["sample"] < MISMATCHED)).to(device)
        ratio_T = first_T.double() - micro.token["ref_logp"].to(device).double()
        ratio_B = sum_per_sequence(
            torch.where(mask, ratio_T, torch.zeros_like(ratio_T)), micro.seq_index.to(device), len(micro)
        )
        trained_B = (micro.seq["sample"] < MISMATCHED).to(device)
        x = Labelled(ratio_B[trained_B], (micro.seq["sample"].to(device) == CHOSEN)[trained_B])
        weights = self.settings.wanted_weight, self.settings.unwanted_weight
        weight = torch.where(x.wanted, *(torch.tensor(w, dtype=torch.float64, device=device) for w in weights))
        loss = (LOSSES[self.loss_name].of(x, self.settings, shared.shift) * weight).sum() / max(1.0, shared.responses)
        metrics.add_sum("loss", loss.detach())
        rewards = self.settings.beta * x.ratio.detach()
        for name, side in (("rewards/chosen", x.wanted), ("rewards/rejected", ~x.wanted)):
            count = int(side.sum())
            metrics.add(name, rewards[side].mean() if count else 0.0, count)
        metrics.add("kl" if self.loss_name == "kto" else "shift", shared.shift)
        return LossResult(loss, metrics)


def _half_of_each(sums: list[float]) -> float:
    """Mean of the means of both labels, or of the one that there is."""
    won, wons, lost, losts = sums
    means = [total / count for total, count in ((won, wons), (lost, losts)) if count]
    return sum(means) / len(means) if means else 0.0
