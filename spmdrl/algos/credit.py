"""Advantages that differ from token to token or from turn to turn, and the combination of reward and cost.

S: sampled tokens of this rank; time is the index among the sampled tokens of the sequence, so a tool's text between
them neither bootstraps nor decays anything. Estimators are functions of `Samples`; a result does not depend on how the
sequences are spread over ranks. ValueError: an input that is missing or not finite, settings out of range.
"""

import torch

from spmdrl.algos.advantages import Groups, leave_one_out, normalise, subtract_mean
from spmdrl.algos.samples import Result, Samples, in_range


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
    value_S, seq_S = x.need("values")[x.mask], x.seq[x.mask]
    next_S = torch.zeros_like(value_S)
    next_S[:-1] = torch.where(seq_S[1:] == seq_S[:-1], value_S[1:], 0.0)
    error_S = x.rewards.double()[x.mask] + gamma * next_S - value_S

    def estimate(lam_B: torch.Tensor) -> torch.Tensor:
        return discount(error_S, seq_S, gamma * lam_B)

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
    energy_S = discount(energy_S, seq_S, torch.ones_like(x.lengths), forward=True)
    time_S = _places(seq_S)
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


def gigpo(x: Samples, *, gamma: float = 0.95, step_weight: float = 1.0, std: bool = True, eps: float = 1e-6) -> Result:
    """GiGPO: advantage of the episode within the group + step_weight * advantage of the turn within its state.

    Source: https://arxiv.org/abs/2505.10978

    The episode's is GRPO's (a group of one: reward / (1 + eps)). The turn's compares returns of all turns of the group
    that share `state`, of the same sequence too: the return of a turn is the sum of its tokens' rewards plus gamma
    times the return of the next turn; a state met once gives 0. Turns without a sampled token do not count.

    std: divide by (std + eps), unbiased, in both; False subtracts means alone. Without `turn` and `state` see Samples.
    ValueError: turns that fall within a sequence, a turn of two states.
    """
    in_range("gamma", gamma, 0, 1)
    turn_S, seq_n, state_n, own_n = _turns(x)
    reward_n = torch.zeros(len(seq_n), dtype=torch.float64).index_add_(0, turn_S, x.rewards.double()[x.mask])
    return_n = discount(reward_n, seq_n, torch.full((x.sequences,), gamma, dtype=torch.float64))
    score_N, group_N, mine = x.everyone(x.scores, x.group)
    episode = Groups.of([group_N], score_N)
    episode_N = normalise(score_N, episode, eps) if std else subtract_mean(score_N, episode)
    return_N, group_N, state_N, own_N, mine_n = x.everyone(return_n, x.group[seq_n], state_n, own_n, seq_n=seq_n)
    own_N = own_N * torch.arange(1, len(own_N) + 1)  # 0 for a state that others may share
    steps = Groups.of([group_N, state_N, own_N], return_N)
    step_N = normalise(return_N, steps, eps) if std else subtract_mean(return_N, steps)
    step_N = torch.where(steps.size_N > 1, step_N, 0.0)
    advantages_n = episode_N[mine][seq_n] + step_weight * step_N[mine_n]
    advantages_T = x.spread(advantages_n[turn_S])
    return advantages_T, advantages_T


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


# ── time ─────────────────────────────────────────────────────────────────────


def to_go(x: Samples, x_T: torch.Tensor, gamma: float) -> torch.Tensor:
    """Discounted sum from each sampled token to the end of its sequence: [T] -> [T], fp64, 0 elsewhere."""
    seq_S = x.seq[x.mask]
    return x.spread(discount(x_T.double()[x.mask], seq_S, torch.full((x.sequences,), gamma, dtype=torch.float64)))


def discount(x_n: torch.Tensor, seq_n: torch.Tensor, decay_B: torch.Tensor, *, forward: bool = False) -> torch.Tensor:
    """y_t = x_t + decay * y_(t + 1) along the rows of each sequence, or * y_(t - 1) with `forward`: [n] -> [n], fp64.

    seq_n: int64 ascending; row t of a sequence is its t-th here. decay_B: one for each sequence. Loops over time only:
    memory is sequences * most rows of one.
    """
    assert decay_B.dtype == torch.float64
    place_n = _places(seq_n)
    times = int(place_n.max()) + 1 if len(place_n) else 0
    x_tB = torch.zeros(times, len(decay_B), dtype=torch.float64)
    x_tB[place_n, seq_n] = x_n.double()
    y_B = torch.zeros(len(decay_B), dtype=torch.float64)
    for t in range(times) if forward else reversed(range(times)):
        y_B = x_tB[t] + decay_B * y_B
        x_tB[t] = y_B
    return x_tB[place_n, seq_n]


def _places(seq_n: torch.Tensor) -> torch.Tensor:
    """int64 [n]: index of each row among those of its sequence."""
    counts = torch.bincount(seq_n)
    return torch.arange(len(seq_n)) - (torch.cumsum(counts, 0) - counts)[seq_n]


def _turns(x: Samples) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """turn_S: the turn of each sampled token, numbered over this rank; then, for each turn [n], its sequence, its
    state, and whether that is a state of its own.
    """
    place_S, seq_S = x.mask.nonzero().flatten(), x.seq[x.mask]
    turn_S = x.turn[x.mask] if x.turn is not None else place_S - torch.arange(len(place_S))  # grows at every gap
    same_S = torch.zeros(len(seq_S), dtype=torch.bool)
    same_S[1:] = seq_S[1:] == seq_S[:-1]
    step_S = torch.zeros_like(turn_S)
    step_S[1:] = turn_S.diff()
    if bool((same_S & (step_S < 0)).any()):
        bad = seq_S[same_S & (step_S < 0)].unique()[:8].tolist()
        raise ValueError(f"turn must not fall within a sequence, as it does in sequences {bad}")
    starts_S = ~same_S | (step_S != 0)
    turn_S, seq_n = torch.cumsum(starts_S, 0) - 1, seq_S[starts_S]
    if x.state is None:
        state_n = torch.zeros_like(seq_n)
        return turn_S, seq_n, state_n, _places(seq_n) > 0
    state_S = x.state[x.mask]
    state_n = state_S[starts_S]
    if bool((state_n[turn_S] != state_S).any()):
        bad = seq_S[state_n[turn_S] != state_S].unique()[:8].tolist()
        raise ValueError(f"all tokens of a turn must have the same state; they differ in sequences {bad}")
    return turn_S, seq_n, state_n, torch.zeros_like(seq_n)
