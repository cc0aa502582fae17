"""Objective of a reward model: the Bradley-Terry loss of pairs, and metrics of the quality of its scores."""

import math
from dataclasses import dataclass

import torch

from spmdrl.algos.aggregate import sum_per_sequence
from spmdrl.algos.preference import bradley_terry
from spmdrl.data.batch import Batch
from spmdrl.data.preferences import CHOSEN
from spmdrl.policy.contract import LossResult, Objective, Shared
from spmdrl.spmd.peers import Peers
from spmdrl.tracking.metrics import Metrics

BINS = 5
"""Bins of calibration: the probability that the chosen response wins, from 0.5 to 1, divides pairs into them."""
MOMENTS = ("m", "l", "mm", "ll", "ml")
"""Means over pairs: chosen minus rejected score, chosen minus rejected length, their squares and their product."""


@dataclass
class PairCount(Shared):
    """Counts of a whole optimizer step, over all ranks."""

    pairs: float = 0.0


@dataclass
class ScoreObjective(Objective):
    """Averages the loss over the pairs of a step.

    Both responses of a pair are neighbours in every micro-batch (`seq["unit"]`), the chosen one first. A response's
    score is the one at its last trained token.
    """

    outputs: tuple[str, ...]
    """Names of the scores; `seq["output"]` is the number of the score that a pair trains."""
    centre: float
    peers: Peers
    temperature: float = 1.0
    columns = frozenset({"token/mask", "seq/unit", "seq/margin", "seq/output"})
    second = "entropy"

    def prepare(self, share: Batch, index: int) -> PairCount:
        """Implements `prepare` of the contract."""
        return PairCount(pairs=float(self.peers.sum((share.seq["sample"] == CHOSEN).double().sum())))

    def loss(self, micro: Batch, first_T: torch.Tensor, second_T: torch.Tensor, shared: PairCount) -> LossResult:
        """Implements `loss` of the contract, from scores."""
        device, metrics = first_T.device, Metrics()
        output_B = micro.seq["output"].to(device).long()
        if first_T.dim() == 2:
            first_T = first_T.gather(1, torch.repeat_interleave(output_B, micro.lengths.to(device))[:, None])[:, 0]
        mask = micro.token["mask"].to(device)
        scores_B = sum_per_sequence(
            torch.where(mask, first_T, torch.zeros_like(first_T)), micro.seq_index.to(device), len(micro)
        )
        chosen, rejected = scores_B[0::2], scores_B[1::2]
        margin = micro.seq["margin"].to(device)[0::2]
        loss = bradley_terry(chosen, rejected, margin, self.centre).sum() / max(1.0, shared.pairs)
        metrics.add_sum("loss", loss.detach())
        lead = (chosen - rejected).detach()
        self._describe(metrics, micro, lead, output_B[0::2])
        count = len(lead)
        for name, value in (("chosen", chosen), ("rejected", rejected)):
            metrics.add(f"score/{name}", value.detach().mean() if count else 0.0, count)
        return LossResult(loss, metrics)

    def _describe(self, metrics: Metrics, micro: Batch, lead: torch.Tensor, output_P: torch.Tensor) -> None:
        """Add accuracy, also by output, and the sums from which `report` computes calibration and correlation."""
        right = (lead > 0).double() + 0.5 * (lead == 0)
        add_mean(metrics, "accuracy/mean", right)
        for i, name in enumerate(self.outputs if len(self.outputs) > 1 else ()):
            add_mean(metrics, f"accuracy/{name}", right[output_P == i])
        sure = lead.abs().sigmoid()
        add_calibration(metrics, sure, right, (sure - 0.5) * 2, BINS)
        longer = micro.lengths.to(lead.device).double()
        longer = longer[0::2] - longer[1::2]
        for name, x in zip(MOMENTS, (lead, longer, lead**2, longer**2, lead * longer), strict=True):
            add_mean(metrics, f"moment/{name}", x)


def add_mean(metrics: Metrics, name: str, x: torch.Tensor) -> None:
    """Add the numbers of x, which may be empty, to a mean."""
    metrics.add(name, x.mean() if len(x) else 0.0, len(x))


def add_calibration(
    metrics: Metrics, predicted: torch.Tensor, true: torch.Tensor, place: torch.Tensor, bins: int
) -> None:
    """Add the sums from which `report` computes the calibration error.

    predicted, true: probabilities [n]. place: numbers in [0, 1], [n], by which they are divided into bins.
    """
    bin_n = (place * bins).long().clamp(max=bins - 1)
    for i in range(bins):
        metrics.add_sum(f"calibration/{i}", (predicted - true)[bin_n == i].sum())
    metrics.add_sum("calibration/count", len(predicted))


def report(values: dict[str, float]) -> dict[str, float]:
    """Replace the sums in a step's metrics, whose names may start with `eval/`, by the metrics computed from them.

    `calibration/error`: expected calibration error, over bins of the probability that the higher score wins or that a
    step is right (https://arxiv.org/abs/1706.04599). `length/correlation`: correlation over pairs of the difference in
    score with the difference in length.
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
