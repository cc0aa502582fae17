"""Preference losses, per pair (a chosen and a rejected response to one prompt) or per labelled response.

A loss takes `Pairs` or `Labelled` and returns the loss of every pair or response. A step's loss is the mean of these
values, multiplied by pair or response weights if the settings define them. The mean does not depend on micro-batches or
ranks (law 2 of the design). AOT sorts the pairs of the whole step, so it needs values from other pairs, which are
computed before the first micro-batch (`Pairs.matched`).

The log-ratio of a response is its log p under the policy minus its log p under the reference.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn.functional import logsigmoid

from spmdrl.algos.rows import settings_of


@dataclass
class Pairs:
    """P pairs of responses. Tensors are [P]; `chosen` and `rejected` have a gradient."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    """log p of each response under the policy: the sum over its tokens, where tokens beyond the length of the shorter
    response have weight `tail`."""
    ref_chosen: torch.Tensor
    ref_rejected: torch.Tensor
    """log p of each response under the reference, or zeros if the loss uses no reference."""
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    """Number of tokens of each response."""
    matched: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name of a sorting loss -> [P, 2], without gradient: for each pair, the values to compare the chosen and the
    rejected response with. Two values are compared if they have the same rank within the step."""

    @property
    def ratio_chosen(self) -> torch.Tensor:
        """Return the log-ratio of each chosen response, [P]."""
        return self.chosen - self.ref_chosen

    @property
    def ratio_rejected(self) -> torch.Tensor:
        """Return the log-ratio of each rejected response, [P]."""
        return self.rejected - self.ref_rejected


def score(ratio: torch.Tensor, divergence: str, alpha: float) -> torch.Tensor:
    """Return the divergence's f'(u) at u = exp(ratio), up to a constant that cancels in pairs (f-DPO,
    https://arxiv.org/abs/2309.16240).

    divergence: `reverse_kl`, `forward_kl`, `js` or `alpha`. alpha: exponent of the `alpha` divergence.
    """
    if divergence == "forward_kl":
        return 1 - torch.exp(-ratio)
    if divergence == "js":
        return math.log(2) + logsigmoid(ratio)
    if divergence == "alpha" and abs(alpha - 1) > 1e-6:
        power = alpha - 1
        # The clamp keeps exp finite in float32.
        return torch.expm1((power * ratio).clamp(max=80.0)) / power
    return ratio


def difference(x: Pairs, divergence: str, alpha: float) -> torch.Tensor:
    """Return the chosen response's score minus the rejected response's score."""
    return score(x.ratio_chosen, divergence, alpha) - score(x.ratio_rejected, divergence, alpha)


def difference_per_token(x: Pairs, divergence: str, alpha: float) -> torch.Tensor:
    """Return the chosen response's per-token score minus the rejected response's per-token score."""
    chosen, rejected = (score(ratio, divergence, alpha) for ratio in (x.ratio_chosen, x.ratio_rejected))
    return chosen / x.chosen_tokens - rejected / x.rejected_tokens


def _smoothed(logits: torch.Tensor, smoothing: float) -> torch.Tensor:
    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


def sigmoid(x: Pairs, *, beta: float, label_smoothing: float, divergence: str, alpha: float) -> torch.Tensor:
    """DPO (https://arxiv.org/abs/2305.18290). With label smoothing, the loss is conservative DPO."""
    return _smoothed(beta * difference(x, divergence, alpha), label_smoothing)


def robust(x: Pairs, *, beta: float, label_smoothing: float, divergence: str, alpha: float) -> torch.Tensor:
    """DPO that is unbiased if a fraction `label_smoothing` of labels is wrong (https://arxiv.org/abs/2403.00409)."""
    wrong, logits = label_smoothing, beta * difference(x, divergence, alpha)
    return (-(1 - wrong) * logsigmoid(logits) + wrong * logsigmoid(-logits)) / (1 - 2 * wrong)


def hinge(x: Pairs, *, beta: float, divergence: str, alpha: float) -> torch.Tensor:
    """SLiC, a hinge loss (https://arxiv.org/abs/2305.10425)."""
    return torch.relu(1 - beta * difference(x, divergence, alpha))


def ipo(x: Pairs, *, beta: float, divergence: str, alpha: float) -> torch.Tensor:
    """IPO (https://arxiv.org/abs/2310.12036), on per-token scores, as its authors recommend."""
    per_token = difference_per_token(x, divergence, alpha)
    return (per_token - 1 / (2 * beta)) ** 2


def exo_pair(x: Pairs, *, beta: float, label_smoothing: float, divergence: str, alpha: float) -> torch.Tensor:
    """EXO for pairs (https://arxiv.org/abs/2402.00856, eq. 16). Requires a positive `label_smoothing`."""
    logits, wrong = beta * difference(x, divergence, alpha), label_smoothing
    won = logits.sigmoid() * (logsigmoid(logits) - math.log1p(-wrong))
    return won + (-logits).sigmoid() * (logsigmoid(-logits) - math.log(wrong))


def nca_pair(x: Pairs, *, beta: float) -> torch.Tensor:
    """NCA for pairs (https://arxiv.org/abs/2402.05369)."""
    won, lost = beta * x.ratio_chosen, beta * x.ratio_rejected
    return -logsigmoid(won) - 0.5 * logsigmoid(-won) - 0.5 * logsigmoid(-lost)


def bco_pair(x: Pairs, *, beta: float) -> torch.Tensor:
    """BCO for pairs, with a shift of 0 (https://arxiv.org/abs/2404.04656)."""
    return -logsigmoid(beta * x.ratio_chosen) - logsigmoid(-beta * x.ratio_rejected)


def sppo_hard(x: Pairs, *, beta: float) -> torch.Tensor:
    """SPPO in which the chosen response wins with probability 1 (https://arxiv.org/abs/2405.00675, eq. 4.7)."""
    half = 0.5 / beta
    return (x.ratio_chosen - half) ** 2 + (x.ratio_rejected + half) ** 2


def apo_zero(x: Pairs, *, beta: float) -> torch.Tensor:
    """APO-zero (https://arxiv.org/abs/2408.06266, eq. 7), for chosen responses that are better than the model's."""
    return 1 - (beta * x.ratio_chosen).sigmoid() + (beta * x.ratio_rejected).sigmoid()


def apo_down(x: Pairs, *, beta: float) -> torch.Tensor:
    """APO-down (https://arxiv.org/abs/2408.06266, eq. 8), for chosen responses that are worse than the model's."""
    margin = beta * (x.ratio_chosen - x.ratio_rejected)
    return (beta * x.ratio_chosen).sigmoid() + 1 - margin.sigmoid()


def discopop(x: Pairs, *, beta: float, divergence: str, alpha: float, tau: float) -> torch.Tensor:
    """DiscoPOP (https://arxiv.org/abs/2406.08414, eq. 5)."""
    logits = beta * difference(x, divergence, alpha)
    mixed = (logits / tau).sigmoid()
    return -logsigmoid(logits) * (1 - mixed) + torch.exp(-logits) * mixed


def sigmoid_norm(x: Pairs, *, beta: float, label_smoothing: float, divergence: str, alpha: float) -> torch.Tensor:
    """DPO on per-token scores (length-normalised, Tulu 3, https://arxiv.org/abs/2411.15124)."""
    per_token = difference_per_token(x, divergence, alpha)
    return _smoothed(beta * per_token, label_smoothing)


def aot(x: Pairs, *, beta: float, label_smoothing: float) -> torch.Tensor:
    """AOT for pairs (https://arxiv.org/abs/2406.05882): compares policy and reference margins of equal rank."""
    return _smoothed(beta * (x.chosen - x.rejected - x.matched["aot"][:, 0]), label_smoothing)


def aot_unpaired(x: Pairs, *, beta: float, label_smoothing: float) -> torch.Tensor:
    """AOT for unpaired responses (https://arxiv.org/abs/2406.05882): compares log-ratios of equal rank."""
    matched = x.matched["aot_unpaired"]
    chosen = _smoothed(beta * (x.ratio_chosen - matched[:, 0]), label_smoothing)
    rejected = _smoothed(beta * (matched[:, 1] - x.ratio_rejected), label_smoothing)
    # `chosen` and `rejected` have the same sum over the step. Adding `chosen` and `rejected` keeps both gradients, and
    # subtracting the detached `rejected` restores the value of the loss.
    return chosen + rejected - rejected.detach()


def simpo(x: Pairs, *, beta: float, label_smoothing: float, margin: float) -> torch.Tensor:
    """SimPO (https://arxiv.org/abs/2405.14734): mean log p per token with a target margin, and no reference."""
    per_token = x.chosen / x.chosen_tokens - x.rejected / x.rejected_tokens
    return _smoothed(beta * per_token - margin, label_smoothing)


def cpo(x: Pairs, *, beta: float, label_smoothing: float) -> torch.Tensor:
    """CPO (https://arxiv.org/abs/2401.08417) without its likelihood term, which `sft` adds. CPO uses no reference."""
    return _smoothed(beta * (x.chosen - x.rejected), label_smoothing)


def orpo(x: Pairs) -> torch.Tensor:
    """ORPO's odds-ratio loss on the mean log p per token (https://arxiv.org/abs/2403.07691), without its likelihood
    term, which `sft` adds. ORPO uses no reference.
    """
    won, lost = x.chosen / x.chosen_tokens, x.rejected / x.rejected_tokens
    odds = won - lost - (torch.log1p(-won.exp()) - torch.log1p(-lost.exp()))
    return -logsigmoid(odds)


def matched_margins(logp_P2: torch.Tensor, ref_P2: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return `Pairs.matched` for all pairs of a step, one float64 [P, 2] per sorting loss.

    logp_P2, ref_P2: log p of (chosen, rejected) under the policy and under the reference.
    """
    margin, ref_margin = logp_P2[:, 0] - logp_P2[:, 1], ref_P2[:, 0] - ref_P2[:, 1]
    chosen, rejected = (logp_P2 - ref_P2).unbind(1)
    at = _at_rank_of(margin, ref_margin)
    unpaired = torch.stack([_at_rank_of(chosen, rejected), _at_rank_of(rejected, chosen)], 1)
    return {"aot": torch.stack([at, at], 1), "aot_unpaired": unpaired}


def _at_rank_of(mine: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return, for each element of `mine`, the element of `others` with the same rank. Ties are ranked by index."""
    rank = torch.argsort(torch.argsort(mine, stable=True), stable=True)
    return others.sort().values[rank]


def bradley_terry(chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor, centre: float) -> torch.Tensor:
    """Return the reward-model loss of each pair, [P]: minus the log-probability that the chosen response wins by the
    margin, plus a centring term.

    Source: Bradley and Terry, 1952

    chosen, rejected: scores of the responses. margin: score difference that the loss asks for (Llama 2,
    https://arxiv.org/abs/2307.09288). centre: weight of the centring term, the squared sum of both scores, which keeps
    the mean score near 0 (https://arxiv.org/abs/2312.09244).
    """
    return -logsigmoid(chosen - rejected - margin) + centre * (chosen + rejected) ** 2


@dataclass
class Labelled:
    """N labelled responses. Tensors are [N]; `ratio` has a gradient."""

    ratio: torch.Tensor
    """Log-ratio of each response."""
    wanted: torch.Tensor
    """bool: the label, True for a desirable response."""


def kto(x: Labelled, shift: float, *, beta: float) -> torch.Tensor:
    """KTO (https://arxiv.org/abs/2402.01306, eq. 7). shift: estimate of the KL to the reference, at least 0."""
    sign = torch.where(x.wanted, 1.0, -1.0)
    return 1 - (sign * beta * (x.ratio - shift)).sigmoid()


def bco(x: Labelled, shift: float, *, beta: float) -> torch.Tensor:
    """BCO (https://arxiv.org/abs/2404.04656). shift: mean of beta times log-ratio, with weight 1/2 for each label."""
    sign = torch.where(x.wanted, 1.0, -1.0)
    return -logsigmoid(sign * (beta * x.ratio - shift))


def apo_zero_unpaired(x: Labelled, shift: float, *, beta: float) -> torch.Tensor:
    """APO-zero for unpaired responses (https://arxiv.org/abs/2408.06266, eq. 7)."""
    sign = torch.where(x.wanted, 1.0, -1.0)
    return 1 - (sign * beta * x.ratio).sigmoid()


@dataclass(frozen=True)
class PreferenceLoss:
    """A preference loss: the function that computes it, and the requirements of that function.

    The keyword-only parameters of the function are its settings.
    """

    function: Callable[..., torch.Tensor]
    labelled: bool = False
    """Whether the loss takes `Labelled` responses and a shift (one number for the whole step) instead of `Pairs`."""
    has_reference: bool = True
    matched: bool = False
    """Whether the loss sorts the pairs of the whole step, and therefore needs `Pairs.matched`."""
    needs_smoothing: bool = False
    """Whether `label_smoothing` must be above 0, because the loss assumes that some labels are wrong."""
    shift: Literal["", "other prompts", "steps so far"] = ""
    """Log-ratios from which the shift is computed. `other prompts`: log-ratios of prompts paired with responses to
    other prompts of the step. `steps so far`: log-ratios of all responses in the steps so far. Empty if the loss has no
    shift."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the names of the settings that the loss or its objective reads.

        A sorting loss compares responses from different pairs, so it cannot weight pairs.
        """
        of_pairs = ("tail",) if self.matched else ("tail", "weighted")
        return (*settings_of(self.function), *(("wanted_weight", "unwanted_weight") if self.labelled else of_pairs))

    def of(self, x: Pairs | Labelled, settings: Any, *shift: float) -> torch.Tensor:
        """Return the loss of each pair or response.

        settings: object with the loss settings as attributes. shift: one number if `labelled`, otherwise nothing.
        """
        return self.function(x, *shift, **{name: getattr(settings, name) for name in settings_of(self.function)})


LOSSES: dict[str, PreferenceLoss] = {
    "sigmoid": PreferenceLoss(sigmoid),
    "robust": PreferenceLoss(robust, needs_smoothing=True),
    "hinge": PreferenceLoss(hinge),
    "ipo": PreferenceLoss(ipo),
    "exo_pair": PreferenceLoss(exo_pair, needs_smoothing=True),
    "nca_pair": PreferenceLoss(nca_pair),
    "bco_pair": PreferenceLoss(bco_pair),
    "sppo_hard": PreferenceLoss(sppo_hard),
    "apo_zero": PreferenceLoss(apo_zero),
    "apo_down": PreferenceLoss(apo_down),
    "discopop": PreferenceLoss(discopop),
    "sigmoid_norm": PreferenceLoss(sigmoid_norm),
    "aot": PreferenceLoss(aot, matched=True),
    "aot_unpaired": PreferenceLoss(aot_unpaired, matched=True),
    "simpo": PreferenceLoss(simpo, has_reference=False),
    "cpo": PreferenceLoss(cpo, has_reference=False),
    "orpo": PreferenceLoss(orpo, has_reference=False),
    "apo_zero_unpaired": PreferenceLoss(apo_zero_unpaired, labelled=True),
    "bco": PreferenceLoss(bco, labelled=True, shift="steps so far"),
    "kto": PreferenceLoss(kto, labelled=True, shift="other prompts"),
}
SFT = "sft"
"""Name of the cross-entropy on the chosen responses, which can be added to pair losses and has no reference or
settings."""


def needs_reference(losses: Iterable[str]) -> bool:
    """Return whether any of these losses compares the policy with a reference. losses: loss names."""
    return any(name != SFT and LOSSES[name].has_reference for name in losses)
