"""A custom policy loss: `--algo.loss recipes/own/loss.py:spo`.

A loss gets `spmdrl.algos.loss_inputs.LossInputs`, the packed tokens of one micro-batch, all [T]. It returns a loss for
each token, and detached statistics of each token to log. Both are 0 where the mask is False. A keyword-only parameter
with the name of a setting of --algo gets the value of that setting.
"""

from spmdrl.algos.loss_inputs import LossInputs, LossResult, exp_clamped, log_ratio_of, masked, ratio_stats, weighted


def spo(x: LossInputs, *, clip_high: float = 0.2) -> LossResult:
    """A quadratic penalty instead of PPO's clip. The loss is smallest at a ratio of 1 +- clip_high.

    Source: Simple Policy Optimization, https://arxiv.org/abs/2401.16025
    """
    advantages, log_ratio = masked(x.advantages, x.mask), log_ratio_of(x)
    ratio = exp_clamped(log_ratio)
    penalty = masked(advantages.abs() / (2 * clip_high) * (ratio - 1).square(), x.mask)
    stats = ratio_stats(ratio, log_ratio, x) | {"penalty": penalty.detach()}
    return weighted(penalty - advantages * ratio, x), stats
