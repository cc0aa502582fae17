"""Objective of a process reward model: cross-entropy of step labels, and metrics of the quality of its scores."""

from dataclasses import dataclass

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from spmdrl.data.batch import Batch
from spmdrl.policy.contract import LossResult, Objective, Shared
from spmdrl.policy.objectives.scores import add_calibration, add_mean
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics

BINS = 10
"""Bins of calibration: the probability that a step is right divides steps into them."""


@dataclass
class StepCount(Shared):
    """Counts of a whole optimizer step, over all ranks."""

    steps: float = 0.0


@dataclass
class StepObjective(Objective):
    """Averages the loss over the labelled steps of an optimizer step (https://arxiv.org/abs/2305.20050).

    The model outputs two logits for a token; the softmax of the second is the probability that the step which ends
    there is right. The loss of a step is the cross-entropy of its label, which may be a probability (Math-Shepherd,
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
    """Add accuracy, calibration and mean score of the probabilities that steps are right.

    right_n: probabilities of labelled steps, in the order of their responses; label_n: their labels; seq_n: the
    response of each. count: responses.
    """
    predicted, true = (right_n - 0.5).sign(), (label_n - 0.5).sign()
    add_mean(metrics, "accuracy/mean", (predicted * true + 1) / 2)
    found, expected = (first_wrong(sign_n, seq_n, count) for sign_n in (predicted, true))
    nonempty = torch.bincount(seq_n, minlength=count) > 0
    correct, has_error = (found == expected).double(), expected < len(seq_n)
    add_mean(metrics, "accuracy/first_wrong", correct[nonempty & has_error])
    add_mean(metrics, "accuracy/no_wrong", correct[nonempty & ~has_error])
    add_calibration(metrics, right_n, label_n, right_n, BINS)
    for name, which in (("right", true > 0), ("wrong", true < 0)):
        add_mean(metrics, f"score/{name}", right_n[which])


def first_wrong(sign_n: torch.Tensor, seq_n: torch.Tensor, count: int) -> torch.Tensor:
    """Return the index in [n] of each response's first step with a sign below 0, [B]; n if it has none."""
    none = len(sign_n)
    place_n = torch.arange(none, device=sign_n.device).masked_fill(sign_n >= 0, none)
    return torch.full((count,), none, device=sign_n.device).scatter_reduce(0, seq_n, place_n, "amin")
