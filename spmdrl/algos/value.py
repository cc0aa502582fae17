"""Critic, implicit reward model and imitation losses, and the Lagrange multiplier of a cost.

T: packed tokens of one micro-batch; B: its sequences. Losses are per token, before aggregation
(`aggregate.token_weights`). Losses with a mask are 0 where the mask is False, whatever the inputs are there.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from spmdrl.algos.aggregate import sum_per_sequence
from spmdrl.algos.loss_inputs import masked


def value_loss(
    values_T: torch.Tensor,
    old_values_T: torch.Tensor,
    returns_T: torch.Tensor,
    mask_T: torch.Tensor,
    clip: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the critic loss, 0.5 max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2).

    Source: value clipping as in https://github.com/openai/baselines (ppo2), used in RLHF since InstructGPT
    (https://arxiv.org/abs/2203.02155)

    values_T: v, with gradient. old_values_T: old, the critic's values at the start of the step. returns_T: R, the
    targets. clip: clip range > 0, or None for the unclipped squared error. Stats (detached [T]): `value_clip_fraction`,
    1 where the clip decides the loss; `value_error`, v - R.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"the value clip must be above 0, or None for off, got {clip}")
    values, returns = masked(values_T, mask_T), masked(returns_T, mask_T)
    loss = (values - returns).square()
    stats = {"value_error": (values - returns).detach()}
    if clip is not None:
        old = masked(old_values_T, mask_T)
        clipped = (torch.minimum(torch.maximum(values, old - clip), old + clip) - returns).square()
        stats["value_clip_fraction"] = masked((clipped > loss).to(loss.dtype), mask_T)
        loss = masked(torch.maximum(loss, clipped), mask_T)
    return 0.5 * loss, stats


def implicit_rewards(
    logp_T: torch.Tensor, ref_logp_T: torch.Tensor, mask_T: torch.Tensor, beta: float = 0.05
) -> torch.Tensor:
    """Return PRIME's process reward of each token, beta (logp - ref_logp): [T], 0 where the mask is False.

    Source: https://arxiv.org/abs/2502.01456

    logp_T: log p under the implicit reward model, with or without gradient. ref_logp_T: log p under its frozen
    reference. beta: > 0.
    """
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    return beta * (masked(logp_T, mask_T) - masked(ref_logp_T, mask_T))


def implicit_reward_loss(
    logp_T: torch.Tensor,
    ref_logp_T: torch.Tensor,
    mask_T: torch.Tensor,
    seq_T: torch.Tensor,
    outcome: torch.Tensor,
    beta: float = 0.05,
    sequences: int | None = None,
) -> torch.Tensor:
    """Return PRIME's implicit reward model loss: cross-entropy between sigmoid(sum of rewards) and the outcome.

    Source: https://arxiv.org/abs/2502.01456

    All unmasked tokens of a sequence have the same loss, so the aggregation `seq-mean-token-mean` gives the mean over
    sequences. outcome: in [0, 1], where 1 is a correct answer. Its shape is [B], or [T] with the sequence's outcome at
    each of its tokens. sequences: number of sequences, as in `aggregate.sum_per_sequence`. Raises ValueError if an
    outcome is out of range or beta is not positive.
    """
    total = sum_per_sequence(implicit_rewards(logp_T, ref_logp_T, mask_T, beta), seq_T, sequences)[seq_T]
    outcome_T = outcome if outcome.shape == mask_T.shape else outcome[seq_T]
    outcome_T = masked(outcome_T.double(), mask_T)
    if bool(((outcome_T < 0) | (outcome_T > 1)).any()):
        raise ValueError("outcomes must be in [0, 1], 1 for a right answer: rescale the reward")
    loss = F.binary_cross_entropy_with_logits(total, outcome_T, reduction="none")
    return masked(loss, mask_T).to(logp_T.dtype)


def positive_nll(logp_T: torch.Tensor, mask_T: torch.Tensor, good_T: torch.Tensor) -> torch.Tensor:
    """Return VAPO's imitation loss on good samples: -logp at their tokens, 0 elsewhere.

    Source: https://arxiv.org/abs/2504.05118, which adds it to the policy loss with a coefficient of 0.1

    good_T: bool [T], True at the tokens of good samples. The paper averages over the tokens of good samples only: use
    the aggregation `token-mean`, with totals and weights computed from the mask `mask_T & good_T`.
    """
    return -masked(logp_T, mask_T & good_T)


def dual_step(multiplier: float, mean_cost: float, limit: float, lr: float, most: float) -> float:
    """Return the Lagrange multiplier of a cost after one gradient ascent step on its logarithm.

    Source: https://arxiv.org/abs/2310.12773 (Safe RLHF)

    log multiplier += lr * multiplier * (mean_cost - limit), with the multiplier capped at `most`. The multiplier stays
    positive, increases if the mean cost is above the limit, and decreases if the mean cost is below. multiplier, lr,
    most: > 0. Raises ValueError if multiplier, lr or most is not positive, or if a cost or limit is not finite.
    """
    if not multiplier > 0 or not lr > 0 or not most > 0:
        raise ValueError(f"multiplier, lr and most must be above 0, got {multiplier}, {lr} and {most}")
    if not math.isfinite(mean_cost - limit):
        raise ValueError(f"mean_cost and limit must be finite, got {mean_cost} and {limit}: check the cost function")
    log = math.log(multiplier) + lr * multiplier * (mean_cost - limit)
    # The lower bound keeps the multiplier above 0, because a multiplier of 0 could never increase again.
    return min(math.exp(max(min(log, math.log(most)), -700.0)), most)


def nll(logp: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of the given tokens, -log p."""
    return -logp


def dft(logp: torch.Tensor) -> torch.Tensor:
    """Return the loss of dynamic fine-tuning: cross-entropy times the detached p (https://arxiv.org/abs/2508.05629)."""
    return -logp.detach().exp() * logp


TOKEN_LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"nll": nll, "dft": dft}
"""Name of a token loss -> function that computes it from the log p of each token."""
