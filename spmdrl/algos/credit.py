"""Advantages that differ from token to token, and the combination of reward and cost.

S: sampled tokens of this rank; time is the number of sampled tokens before one on its path (`tree.py`), so a tool's
text between them neither bootstraps nor decays anything. Estimators are functions of `Samples`; a result does not
depend on how the sequences are spread over ranks. ValueError: an input that is missing or not finite, settings out of
range.
"""

import torch

from spmdrl.algos.advantages import Groups, leave_one_out, normalise
from spmdrl.algos.samples import Result, Samples, in_range
from spmdrl.algos.tree import depths, discount, td_errors, tokens_follow


def gae(
    x: Samples,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    length_adaptive: float | None = None,
    critic_lam: float | None = None,
    whiten: bool = True,
) -> Result:
    """GAE: sum over later tokens of (gamma lam)^k * TD error, where the TD error is r + gamma V(next) - V.

    Source: https://arxiv.org/abs/1506.02438; length-adaptive and decoupled lambda: VAPO, https://arxiv.org/abs/2504.05118

    Needs `values`; the value after the last sampled token is 0. The default lam, 1, is the return minus the value;
    0.95 is usual for short responses.

    length_adaptive: alpha of lambda = 1 - 1 / (alpha * sampled tokens of the sequence), not below 0, for the advantages
    in place of lam; VAPO takes 0.05. critic_lam: lambda of the returns (GAE + value); None: lam. whiten: advantages get
    mean 0 and variance 1 over all sampled tokens of the step; returns never do.
    """
    in_range("gamma", gamma, 0, 1)
    for name, value in (("lam", lam), ("critic_lam", critic_lam)):
        in_range(name, lam if value is None else value, 0, 1)
    value_S, seq_S, after_S = x.need("values")[x.mask], x.seq[x.mask], tokens_follow(x)
    error_S = td_errors(x.rewards[x.mask], value_S, after_S, gamma)

    def estimate(lam_B: torch.Tensor) -> torch.Tensor:
        return discount(error_S, after_S, gamma * lam_B[seq_S])

    policy_B = critic_B = torch.full_like(x.lengths, lam)
    if critic_lam is not None:
        critic_B = torch.full_like(policy_B, critic_lam)
    if length_adaptive is not None:
        if not 0 < length_adaptive < torch.inf:
            raise ValueError(f"length_adaptive must be above 0 (VAPO takes 0.05), got {length_adaptive}")
        policy_B = (1 - 1 / (length_adaptive * x.lengths.clamp(min=1))).clamp(min=0)
    advantage_S = estimate(policy_B)
    returns_T = x.spread((advantage_S if critic_B is policy_B else estimate(critic_B)) + value_S)
    advantages_T = x.spread(advantage_S)
    return x.whiten(advantages_T) if whiten else advantages_T, returns_T


def remax(x: Samples) -> Result:
    """ReMax: reward-to-go minus the reward of the greedy response.

    Source: https://arxiv.org/abs/2310.10505

    Needs `baseline`. Returns are the reward-to-go.
    """
    baseline_B = x.need("baseline")
    returns_T = to_go(x, x.rewards, 1.0)
    return returns_T - x.at_tokens(baseline_B), returns_T


def reinforce_plus_plus(x: Samples, *, gamma: float = 1.0) -> Result:
    """REINFORCE++: discounted reward-to-go, whitened over all sampled tokens of the step.

    Source: https://arxiv.org/abs/2501.03262

    Returns are the reward-to-go before whitening.
    """
    return per_token(x, gamma=gamma, whiten=True)


def per_token(x: Samples, *, gamma: float = 0.0, whiten: bool = False) -> Result:
    """Discounted reward-to-go of token rewards without a baseline; with gamma 0 each token's own reward.

    For rewards that say what a single token is worth, such as teacher logp - own logp in on-policy distillation,
    https://arxiv.org/abs/2306.13649. Returns are the reward-to-go before whitening.
    """
    returns_T = to_go(x, x.rewards, in_range("gamma", gamma, 0, 1))
    return x.whiten(returns_T) if whiten else returns_T, returns_T


def prime(x: Samples, *, gamma: float = 1.0, process_coef: float = 1.0, outcome_coef: float = 1.0) -> Result:
    """PRIME: discounted return-to-go of process rewards minus their baseline, plus RLOO of the outcome.

    Source: https://arxiv.org/abs/2502.01456

    Needs `process`. The baseline is one number for each sequence: the mean over the other samples of the group of their
    mean process reward per token. It is taken from every token before the sum, so a long rest of average tokens adds
    nothing. A group of one has baseline 0 and its raw outcome. Coefficients multiply the two terms (1 in the paper).
    No whitening.
    """
    in_range("gamma", gamma, 0, 1)
    process_T = x.need("process")
    mean_B = x.sum_tokens(process_T) / x.lengths.clamp(min=1)
    score_N, mean_N, group_N, mine = x.everyone(x.scores, mean_B, x.group)
    outcome_N = leave_one_out(score_N, Groups.of([group_N], score_N))
    groups = Groups.of([group_N], mean_N)
    low_N = groups.low(mean_N)
    # From the lowest mean up, so that equal means give exactly that mean.
    others_N = low_N + (groups.sum(mean_N - low_N) - (mean_N - low_N)) / (groups.size_N - 1).clamp(min=1)
    baseline_N = torch.where(groups.size_N > 1, others_N, 0.0)
    process_T = to_go(x, process_T - x.at_tokens(baseline_N[mine]), gamma)
    advantages_T = process_coef * process_T + outcome_coef * x.at_tokens(outcome_N[mine])
    return advantages_T, advantages_T


def grpo_process(x: Samples, *, eps: float = 1e-6) -> Result:
    """GRPO with process supervision: the sum of the normalised rewards of all steps that end at the token or later.

    Source: https://arxiv.org/abs/2402.03300, section 4.1.3

    Needs `process`, the reward of a step at the token where it ends, and `ends`, which marks these tokens. A step's
    reward is normalised over all steps of all samples of its group: (reward - mean) / (std + eps), unbiased std. A
    group of one step has mean 0 and std 1, as in `grpo`; equal rewards give exactly 0. The outcome is not looked at.
    """
    process_S, ends_S = x.need("process")[x.mask], x.need("ends")[x.mask] != 0
    seq_n = x.seq[x.mask][ends_S]
    reward_N, group_N, mine_n = x.everyone(process_S[ends_S], x.group[seq_n], seq_n=seq_n)
    step_S = torch.zeros_like(process_S)
    step_S[ends_S] = normalise(reward_N, Groups.of([group_N], reward_N), eps)[mine_n]
    advantages_T = to_go(x, x.spread(step_S), 1.0)
    return advantages_T, advantages_T


def optimal_token_baseline(x: Samples, *, eps: float = 1e-8) -> Result:
    """Reward-to-go minus, at each time, the group's mean of it weighted by the energy spent until then.

    Source: https://arxiv.org/abs/2602.07078

    Baseline at time t: sum of G_t W_t / (sum of W_t + eps) over the samples of the group that reach t, with G_t the
    reward-to-go and W_t the sum up to t of 1 - 2 p + sum over the vocabulary of p^2 (squared norm of the gradient with
    respect to the logits). A time that one sample alone reaches has baseline 0: its own return would take all credit
    away. Returns are the reward-to-go.

    Needs `logp` and `collision`. Memory: every rank holds 4 fp64 columns of the sampled tokens of all ranks, and a few
    more while it works.
    """
    in_range("eps", eps, 0)
    logp_S, collision_S = x.need("logp")[x.mask], x.need("collision")[x.mask]
    seq_S, returns_T = x.seq[x.mask], to_go(x, x.rewards, 1.0)
    energy_S = 1 - 2 * logp_S.exp() + collision_S
    # Where p is near 1 rounding of the inputs may leave less than 0.
    energy_S = torch.where(energy_S > -1e-4, energy_S.clamp(min=0), energy_S)
    after_S = tokens_follow(x)
    energy_S, time_S = discount(energy_S, after_S, torch.ones_like(energy_S), forward=True), depths(after_S)
    return_N, energy_N, group_N, time_N, mine = x.everyone(
        returns_T[x.mask], energy_S, x.group[seq_S], time_S, seq_n=seq_S
    )
    _, group_N = torch.unique(group_N, return_inverse=True)
    _, cell_N = torch.unique(group_N * (len(time_N) + 1) + time_N.long(), return_inverse=True)

    def total(x_N: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x_N).index_add_(0, cell_N, x_N)[cell_N]

    weight_N, weighted_N = total(energy_N) + eps, total(return_N * energy_N)
    shared_N = torch.bincount(cell_N)[cell_N] > 1
    baseline_N = torch.where(shared_N & (weight_N != 0), weighted_N / weight_N, 0.0)
    return returns_T - x.spread(baseline_N[mine]), returns_T


def lagrangian(advantages_T: torch.Tensor, cost_advantages_T: torch.Tensor, multiplier: float) -> torch.Tensor:
    """Reward against cost: (A - multiplier * A_cost) / (1 + multiplier), [T].

    Source: Safe RLHF, https://arxiv.org/abs/2310.12773

    ValueError: negative multiplier, shapes that differ.
    """
    in_range("multiplier", float(multiplier), 0)
    if advantages_T.shape != cost_advantages_T.shape:
        raise ValueError(
            f"advantages of reward and cost must have one shape, got {tuple(advantages_T.shape)} and "
            f"{tuple(cost_advantages_T.shape)}"
        )
    return (advantages_T - multiplier * cost_advantages_T) / (1 + multiplier)


def to_go(x: Samples, x_T: torch.Tensor, gamma: float) -> torch.Tensor:
    """Discounted sum from each sampled token to the end of its sequence, in a tree over all that follows it.

    [T] -> [T], fp64, 0 elsewhere.
    """
    x_S = x_T.double()[x.mask]
    return x.spread(discount(x_S, tokens_follow(x), torch.full_like(x_S, gamma)))
