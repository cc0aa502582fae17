"""The objective of a process reward model: cross-entropy of the labels of steps, and how good its scores are."""

from dataclasses import dataclass

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from spmdrl.data.batch import Batch
from spmdrl.policy.contract import LossResult, Objective, Shared
from spmdrl.policy.objectives.scores import add_calibration, add_mean
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics

BINS = 10
"""Stretches of the probability that a step is right whose steps are looked at together."""


@dataclass
class StepCount(Shared):
    """Counts of a whole optimizer step, over all ranks."""

    steps: float = 0.0


@dataclass
class StepObjective(Objective):
    """Mean over the labelled steps of an optimizer step (Lightman et al., https://arxiv.org/abs/2305.20050).

    The model gives two numbers for a token, and the softmax of the second is the probability that the step which ends
    there is right. The loss of a step is the cross-entropy of its label, which may be a probability too (Math-Shepherd,
    https://arxiv.org/abs/2312.08935).
    """

    peers: Peers
    temperature: float = 1.0
    columns = frozenset({"token/mask", "token/label"})
    second = "entropy"

    def prepare(self, share: Batch, index: int) -> StepCount:
        """Implements `prepare` of the contract."""
        return StepCount(steps=float(self.peers.sum(share.token["mask"].double().sum())))

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: StepCount) -> LossResult:
        """Implements `loss` of the contract, from two numbers of each token."""
        device, metrics = first_T.device, Metrics()
        place_n = micro.token["mask"].nonzero().flatten().to(device)
        number_n2 = first_T[place_n].double()
        # The softmax of two numbers is the sigmoid of their difference.
        logit_n = number_n2[:, 1] - number_n2[:, 0]
        label_n = micro.token["label"].to(device)[place_n]
        loss = binary_cross_entropy_with_logits(logit_n, label_n, reduction="sum") / max(1.0, shared.steps)
        metrics.add_sum("loss", loss.detach())
        describe(metrics, logit_n.detach().sigmoid(), label_n, micro.seq_index.to(device)[place_n], len(micro))
        return LossResult(loss, metrics)


def describe(metrics: Metrics, right_n: torch.Tensor, label_n: torch.Tensor, seq_n: torch.Tensor, count: int) -> None:
    """Add how good the probabilities are that steps are right.

    right_n: probabilities of labelled steps, in the order of their responses; label_n: their labels; seq_n: the
    response of each. count: responses.
    """
    told, true = (right_n - 0.5).sign(), (label_n - 0.5).sign()
    add_mean(metrics, "accuracy/mean", (told * true + 1) / 2)
    found, wanted = (first_wrong(side, seq_n, count) for side in (told, true))
    has = torch.bincount(seq_n, minlength=count) > 0
    met, errs = (found == wanted).double(), wanted < len(seq_n)
    add_mean(metrics, "accuracy/first_wrong", met[has & errs])
    add_mean(metrics, "accuracy/no_wrong", met[has & ~errs])
    add_calibration(metrics, right_n, label_n, right_n, BINS)
    for name, side in (("right", true > 0), ("wrong", true < 0)):
        add_mean(metrics, f"score/{name}", right_n[side])


def first_wrong(side_n: torch.Tensor, seq_n: torch.Tensor, count: int) -> torch.Tensor:
    """Return the index in [n] of the first step below 0 of each response [B], or n where it has none."""
    none = len(side_n)
    place_n = torch.arange(none, device=side_n.device).masked_fill(side_n >= 0, none)
    return torch.full((count,), none, device=side_n.device).scatter_reduce(0, seq_n, place_n, "amin")
