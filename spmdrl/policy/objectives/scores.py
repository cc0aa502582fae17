"""The objectives of reward models, and metrics on the quality of their scores.

Reward models are trained on response pairs with a Bradley-Terry loss, or on labelled steps with cross-entropy.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from spmdrl.algos.aggregate import Totals, sum_per_sequence
from spmdrl.algos.preference import bradley_terry
from spmdrl.data.batch import Batch
from spmdrl.data.preferences import CHOSEN
from spmdrl.policy.contract import LossResult, Objective, Shared
from spmdrl.policy.objectives.tokens import TokenObjective, add_mean
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics

PAIR_BINS, STEP_BINS = 5, 10
"""Number of calibration bins: PAIR_BINS for the probability that the higher score wins (0.5 to 1), STEP_BINS for the
probability that a step is correct."""
MOMENTS = ("m", "l", "mm", "ll", "ml")
"""Means over pairs. m and l are the differences in score and in length, chosen minus rejected. mm and ll are the
squares of these differences, and ml is their product."""


@dataclass
class ScoreObjective(Objective):
    """Averages the Bradley-Terry loss over the pairs of an optimizer step.

    The two responses of a pair are adjacent in a micro-batch (`seq["unit"]`), and the chosen response comes first. The
    score of a response is the score at its last trained token.
    """

    outputs: tuple[str, ...]
    """Names of the model outputs; `seq["output"]` is the index of the output that a pair trains."""
    centre: float
    peers: Peers
    temperature: float = 1.0
    columns = frozenset({"token/mask", "seq/unit", "seq/margin", "seq/output"})
    second = "entropy"

    def prepare(self, share: Batch, index: int) -> Shared:
        """Implements `Objective.prepare`."""
        return Shared(Totals(0.0, float(self.peers.sum((share.seq["sample"] == CHOSEN).double().sum()))))

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Shared) -> LossResult:
        """Implements `Objective.loss`; first_T holds the scores."""
        metrics, output_B = Metrics(), micro.seq["output"].long()
        if first_T.dim() == 2:
            first_T = first_T.gather(1, micro.per_token(output_B)[:, None])[:, 0]
        first_T = torch.where(micro.token["mask"], first_T, torch.zeros_like(first_T))
        scores_B = sum_per_sequence(first_T, micro.seq_index, len(micro))
        chosen, rejected = scores_B[0::2], scores_B[1::2]
        margin = micro.seq["margin"][0::2]
        loss = bradley_terry(chosen, rejected, margin, self.centre).sum() / max(1.0, shared.totals.sequences)
        metrics.add_sum("loss", loss.detach())
        lead = (chosen - rejected).detach()
        self._describe(metrics, micro, lead, output_B[0::2])
        add_mean(metrics, "score/chosen", chosen.detach())
        add_mean(metrics, "score/rejected", rejected.detach())
        return LossResult(loss, metrics)

    def _describe(self, metrics: Metrics, micro: Batch, lead: torch.Tensor, output_P: torch.Tensor) -> None:
        """Add pair metrics: accuracy, and the sums from which `report` computes calibration and correlation.

        lead: chosen minus rejected score of each pair. output_P: index of the output that each pair trains.
        """
        right = (lead > 0).double() + 0.5 * (lead == 0)
        add_mean(metrics, "accuracy/mean", right)
        for i, name in enumerate(self.outputs if len(self.outputs) > 1 else ()):
            add_mean(metrics, f"accuracy/{name}", right[output_P == i])
        sure = lead.abs().sigmoid()
        _add_calibration(metrics, sure, right, (sure - 0.5) * 2, PAIR_BINS)
        longer = micro.lengths.to(lead.device).double()
        longer = longer[0::2] - longer[1::2]
        for name, x in zip(MOMENTS, (lead, longer, lead**2, longer**2, lead * longer), strict=True):
            add_mean(metrics, f"moment/{name}", x)


@dataclass
class StepObjective(TokenObjective):
    """Averages a loss over the labelled reasoning steps in an optimizer step (https://arxiv.org/abs/2305.20050).

    The model outputs two logits at the last token of a labelled step; the softmax probability of the second logit is
    the probability that the step is correct. The loss is the cross-entropy with the label, which can be a probability
    (Math-Shepherd, https://arxiv.org/abs/2312.08935).
    """

    peers: Peers
    temperature = 1.0
    columns = frozenset({"token/mask", "token/label"})

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: Shared) -> LossResult:
        """Implements `Objective.loss`; first_T holds two logits per token, [T, 2]."""
        metrics, place_n = Metrics(), micro.where(lambda batch: batch.token["mask"])
        number_n2 = first_T[place_n].double()
        # The probability of the second of two logits is the sigmoid of their difference.
        logit_n = number_n2[:, 1] - number_n2[:, 0]
        label_n = micro.token["label"][place_n]
        loss = binary_cross_entropy_with_logits(logit_n, label_n, reduction="sum") / max(1.0, shared.totals.tokens)
        metrics.add_sum("loss", loss.detach())
        describe_steps(metrics, logit_n.detach().sigmoid(), label_n, micro.seq_index[place_n], len(micro))
        return LossResult(loss, metrics)


def describe_steps(
    metrics: Metrics, right_n: torch.Tensor, label_n: torch.Tensor, seq_n: torch.Tensor, count: int
) -> None:
    """Add metrics on predicted step correctness: accuracy, calibration and mean.

    right_n: predicted probability that each labelled step is correct, ordered by response; label_n: step labels; seq_n:
    response index of each step. count: number of responses.
    """
    predicted, true = (right_n - 0.5).sign(), (label_n - 0.5).sign()
    add_mean(metrics, "accuracy/mean", (predicted * true + 1) / 2)
    found, expected = (_first_wrong(sign_n, seq_n, count) for sign_n in (predicted, true))
    nonempty = torch.bincount(seq_n, minlength=count) > 0
    correct, has_error = (found == expected).double(), expected < len(seq_n)
    add_mean(metrics, "accuracy/first_wrong", correct[nonempty & has_error])
    add_mean(metrics, "accuracy/no_wrong", correct[nonempty & ~has_error])
    _add_calibration(metrics, right_n, label_n, right_n, STEP_BINS)
    for name, which in (("right", true > 0), ("wrong", true < 0)):
        add_mean(metrics, f"score/{name}", right_n[which])


def _first_wrong(sign_n: torch.Tensor, seq_n: torch.Tensor, count: int) -> torch.Tensor:
    """Return the index of the first step with a negative sign in each response, [B], or n if there is none.

    sign_n: negative for the steps to find. seq_n: response index of each step. count: number of responses, B.
    """
    none = len(sign_n)
    place_n = torch.arange(none, device=sign_n.device).masked_fill(sign_n >= 0, none)
    return torch.full((count,), none, device=sign_n.device).scatter_reduce(0, seq_n, place_n, "amin")


def _add_calibration(
    metrics: Metrics, predicted: torch.Tensor, true: torch.Tensor, place: torch.Tensor, bins: int
) -> None:
    """Add the sums from which `report` computes the calibration error.

    predicted: predicted probabilities, [n]. true: labels, [n]. place: relative position of each probability in the
    binned range, from 0 to 1, [n]. bins: number of bins.
    """
    bin_n = (place * bins).long().clamp(max=bins - 1)
    for i in range(bins):
        metrics.add_sum(f"calibration/{i}", (predicted - true)[bin_n == i].sum())
    metrics.add_sum("calibration/count", len(predicted))


def report(values: dict[str, float]) -> dict[str, float]:
    """Return the metrics, with sums replaced by the values computed from them. Names may start with `eval/`.

    `calibration/error` is the expected calibration error of the probability that the higher score wins, or that a step
    is correct (https://arxiv.org/abs/1706.04599). `length/correlation` is the correlation between score difference and
    length difference over pairs.
    """
    out, sums, moments, seen = {}, [], {}, 0.0
    prefix = "eval/" if any(name.startswith("eval/") for name in values) else ""
    for name, value in values.items():
        kind, _, rest = name.removeprefix(prefix).partition("/")
        if kind == "moment":
            moments[rest] = value
        elif kind == "calibration" and rest == "count":
            seen = value
        elif kind == "calibration":
            sums.append(abs(value))
        else:
            out[name] = value
    if seen:
        out[f"{prefix}calibration/error"] = sum(sums) / seen
    if len(moments) == len(MOMENTS):
        spread = (moments["mm"] - moments["m"] ** 2) * (moments["ll"] - moments["l"] ** 2)
        if spread > 0:
            out[f"{prefix}length/correlation"] = (moments["ml"] - moments["m"] * moments["l"]) / math.sqrt(spread)
    return out
