"""Per-token estimates of KL(policy || reference) from the log-probabilities of the sampled tokens.

Source: http://joschu.net/blog/kl-approx.html (k1, k2, k3). An estimate is a function of d = logp - ref_logp, in nats.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from spmdrl.algos.loss_inputs import LOG_RATIO_LIMIT
from spmdrl.algos.rows import as_tensor, find

K3_LIMIT = 10.0
"""Upper bound on k3. Because k3 grows exponentially, a single token could dominate the mean without a bound. verl 0.9.1
uses the same bound."""


def k1(d: torch.Tensor) -> torch.Tensor:
    """An unbiased estimate, which can be negative. Its expected gradient is 0, so use it in the reward, not as a loss
    term.

    value: d; gradient: 1
    """
    return d


def absolute(d: torch.Tensor) -> torch.Tensor:
    """A biased estimate, which is never negative.

    value: |d|; gradient: sign of d
    """
    return d.abs()


def k2(d: torch.Tensor) -> torch.Tensor:
    """A biased estimate with low variance. Its expected gradient is the gradient of the KL.

    value: d^2 / 2; gradient: d
    """
    return 0.5 * d.square()


def k3(d: torch.Tensor) -> torch.Tensor:
    """An estimate that is never negative, and unbiased except for its upper bound of 10. Its expected gradient is the
    gradient of KL(reference || policy).

    value: exp(-d) - 1 + d; gradient: 1 - exp(-d)
    """
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # expm1 keeps precision. During training, d is so small that exp(-d) - 1 + d would be rounding noise in fp32.
    return (torch.expm1(-d) + d).clamp(max=K3_LIMIT)


def k1_straight_through(d: torch.Tensor) -> torch.Tensor:
    """The value of `k1` with the gradient of `k2`.

    value: d; gradient: d
    """
    return k1(d.detach()) + (k2(d) - k2(d).detach())


def k3_straight_through(d: torch.Tensor) -> torch.Tensor:
    """The value of `k3` with the gradient of `k2`.

    value: exp(-d) - 1 + d; gradient: d
    """
    return k3(d.detach()) + (k2(d) - k2(d).detach())


KL_KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k1+": k1_straight_through,
    "k3+": k3_straight_through,
}


def kl_estimate(kind: str, logp: torch.Tensor, ref_logp: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the KL estimate of each token in nats, with the shape of logp and differentiable with respect to logp.

    If logp and ref_logp are tensors of different dtypes, the result has the more precise dtype.

    Args:
        kind: a key of KL_KINDS.
        logp: log-probabilities of the sampled tokens under the policy, any shape.
        ref_logp: log-probabilities of the same tokens under the reference, as a tensor, an array or a list.
        mask: optional bool tensor; where it is False, the estimate and its gradient are exactly 0, whatever the inputs.

    Raises:
        ValueError: an unknown kind or mismatched shapes.
    """
    estimate, logp = find(kind, KL_KINDS, "KL estimate"), torch.as_tensor(logp)
    given = as_tensor("ref_logp", ref_logp, tuple(logp.shape))
    # Tensors keep their precision: the reference can be float64 while logp comes from the engine in float32.
    ref_logp = given.to(logp.device) if isinstance(ref_logp, torch.Tensor) else given.to(logp)
    if mask is not None:
        logp, ref_logp = torch.where(mask, logp, 0.0), torch.where(mask, ref_logp, 0.0)
    return estimate(logp - ref_logp)


def adaptive_coef(coef: float, kl: float, target: float, horizon: float, samples: float) -> float:
    """Return the KL coefficient after one step: larger if the measured KL is above the target, smaller if below.

    Source: https://arxiv.org/abs/1909.08593, section 2.2

    The result is coef * (1 + e * samples / horizon) with e = kl / target - 1 clipped to +-0.2. kl, target: in nats,
    both per token or both per sequence (as in the paper). samples: number of sequences in the step. horizon: number of
    sequences over which the coefficient changes by at most about 20 %. Raises ValueError for a negative coef, a
    non-positive target or horizon, more than 5 horizons in one step (the coefficient could turn negative), or a kl that
    is not finite.
    """
    if not coef >= 0 or not target > 0 or not horizon > 0:
        raise ValueError(f"coef must be >= 0, target and horizon > 0, got {coef}, {target} and {horizon}")
    if not 0 <= samples <= 5 * horizon:
        raise ValueError(f"horizon must be at least a fifth of the samples of a step, {samples:g}, got {horizon:g}")
    if not math.isfinite(kl):
        raise ValueError(
            f"the measured KL is {kl}: the policy or the reference gave a log-probability that is not a number"
        )
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * samples / horizon)
