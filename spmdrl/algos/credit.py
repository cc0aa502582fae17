"""Token-level advantages, and the combination of reward and cost advantages.

S: sampled tokens on this rank. A token's time step is the number of sampled tokens before it on its path (`tree.py`),
not counting tool output. Estimators take `Samples` and raise ValueError if an input is missing or not finite, or if a
setting is out of range. Results do not depend on how sequences are distributed over ranks.
"""

import torch

from spmdrl.algos.groups import Groups, leave_one_out, normalise
from spmdrl.algos.rows import in_range
from spmdrl.algos.samples import Result, Samples
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
    """GAE: the discounted sum of a critic's temporal-difference errors over this and later tokens.

    Source: https://arxiv.org/abs/1506.02438

        error_t  = reward_t + gamma * V_(t+1) - V_t                    V after the last sampled token is 0
        A_t      = sum over k of (gamma * lam)^k * error_(t+k)         then whitened
        return_t = V_t + the same sum with critic_lam instead of lam, not whitened

    Requires a critic. Only sampled tokens count as time steps, so values and discounts skip tool output. With `lam` 1,
    the advantage before whitening is the discounted reward-to-go minus the value. For short responses, a `lam` of 0.95
    is typical. `length_adaptive` is VAPO's alpha (0.05 in https://arxiv.org/abs/2504.05118): for the advantages but not
    for the returns, it sets `lam` to `max(0, 1 - 1 / (alpha * sampled tokens))`. If `critic_lam` is None, returns use
    `lam`.

    The estimator ignores groups.
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
    """ReMax: reward-to-go minus the greedy response's reward.

    Source: https://arxiv.org/abs/2310.10505

        A_t = sum of the rewards from t on - reward of the greedy response to the same prompt

    The engine generates one extra greedy response per prompt, which is graded but not trained on. Returns are the
    reward-to-go.

    The estimator ignores groups, so `--rollout.samples-per-prompt 1` is the usual choice. If a response's only reward
    is its outcome, and this equals the greedy response's reward, A is 0.
    """
    baseline_B = x.need("baseline")
    returns_T = to_go(x, x.rewards, 1.0)
    return returns_T - x.at_tokens(baseline_B), returns_T


def reinforce_plus_plus(x: Samples, *, gamma: float = 1.0) -> Result:
    """REINFORCE++: discounted reward-to-go, whitened over the step.

    Source: https://arxiv.org/abs/2501.03262

        G_t = reward_t + gamma * G_(t+1)
        A_t = G_t, whitened

    Intended for use with the KL estimate `k1` in the reward. Returns are `G_t`.

    The estimator ignores groups. If `G_t` is equal at all tokens of the step, A is exactly 0.
    """
    return per_token(x, gamma=gamma, whiten=True)


def per_token(x: Samples, *, gamma: float = 0.0, whiten: bool = False) -> Result:
    """Reward-to-go of per-token rewards, without a baseline. In on-policy distillation, a token's reward is the
    teacher's logp minus the policy's.

    Source: https://arxiv.org/abs/2306.13649

        A_t = reward_t + gamma * A_(t+1)

    With `gamma` 0, a token's advantage is its own reward. With `whiten`, the advantages are whitened over the step, but
    the returns are not.

    The estimator ignores groups.
    """
    returns_T = to_go(x, x.rewards, in_range("gamma", gamma, 0, 1))
    return x.whiten(returns_T) if whiten else returns_T, returns_T


def prime(x: Samples, *, gamma: float = 1.0, process_coef: float = 1.0, outcome_coef: float = 1.0) -> Result:
    """PRIME: return-to-go of process rewards minus their baseline, plus RLOO on the outcome.

    Source: https://arxiv.org/abs/2502.01456

        A_t = process_coef * sum from t on of gamma^k * (process reward - baseline) + outcome_coef * RLOO of the outcome

    The formula is eq. 5 of the paper. A sequence's baseline is the mean per-token process reward, averaged over the
    other samples of its group. The baseline is subtracted at every token before summing, so a long run of tokens with
    average rewards adds nothing. Nothing is whitened. With a process reward model
    (docs/rewards.md#a-reward-model-in-a-file), its step scores serve as process rewards, and no implicit reward model
    is created.

    In a group of one, the baselines of both terms are 0. If all outcome rewards of a larger group are equal, the
    outcome term is 0 and only the process term remains.
    """
    in_range("gamma", gamma, 0, 1)
    process_T = x.need("process")
    mean_B = x.sum_tokens(process_T) / x.lengths.clamp(min=1)
    score_N, mean_N, group_N, mine = x.everyone(x.scores, mean_B, x.group)
    outcome_N = leave_one_out(score_N, Groups.of([group_N], score_N))
    groups = Groups.of([group_N], mean_N)
    low_N = groups.low(mean_N)
    # The lowest mean is subtracted before the sum, so that the mean of equal numbers is exactly that number.
    others_N = low_N + (groups.sum(mean_N - low_N) - (mean_N - low_N)) / (groups.size_N - 1).clamp(min=1)
    baseline_N = torch.where(groups.size_N > 1, others_N, 0.0)
    process_T = to_go(x, process_T - x.at_tokens(baseline_N[mine]), gamma)
    advantages_T = process_coef * process_T + outcome_coef * x.at_tokens(outcome_N[mine])
    return advantages_T, advantages_T


def grpo_process(x: Samples, *, eps: float = 1e-6) -> Result:
    """GRPO with process supervision: the sum of the normalised scores of all steps that end at or after this token.

    Source: https://arxiv.org/abs/2402.03300

        A_t = sum over the steps that end at t or later of
              (score - mean of the group's steps) / (std of the group's steps + eps)

    The estimator is described in section 4.1.3 of the paper. Requires a process reward model that scores each step
    (docs/rewards.md#a-reward-model-in-a-file). Mean and std are taken over all steps of all samples in the group. The
    outcome and its shaping are ignored.

    In a group of one, the sample's steps are compared with each other. For a single step, A is `score / (1 + eps)`, as
    if the mean were 0 and the std 1. If all scores of a group are equal, A is exactly 0.
    """
    process_S, ends_S = x.need("process")[x.mask], x.need("ends")[x.mask] != 0
    seq_n = x.seq[x.mask][ends_S]
    reward_N, group_N, mine_n = x.everyone(process_S[ends_S], x.group[seq_n], seq_n=seq_n)
    step_S = torch.zeros_like(process_S)
    step_S[ends_S] = normalise(reward_N, Groups.of([group_N], reward_N), eps)[mine_n]
    advantages_T = to_go(x, x.spread(step_S), 1.0)
    return advantages_T, advantages_T


def optimal_token_baseline(x: Samples, *, eps: float = 1e-8) -> Result:
    """Optimal token baseline: the return minus the group's mean return at the same time step, weighted by the squared
    gradient norm up to that step.

    Source: https://arxiv.org/abs/2602.07078

        W_t = sum up to t of (1 - 2 p + sum over the vocabulary of p^2)            G_t = sum of the rewards from t on
        A_t = G_t - (sum over the group of W_t * G_t) / (sum over the group of W_t + eps)

    `p` is the sampled token's probability under the policy at the start of the training step. `W_t` accumulates the
    squared norms of the gradient with respect to the logits. Group sums include only samples that reach time step `t`.
    Returns are `G_t`. The sum over the vocabulary costs one extra forward pass of the policy. Every rank stores four
    fp64 numbers per sampled token of all ranks.

    At a time step that only one sample reaches, the baseline is 0, because A would always be 0 if the sample's own
    return were the baseline. In a group of one, A is `G_t`. At a time step that two or more samples of a group reach, A
    is 0 (up to `eps`) if their `G_t` are equal.
    """
    in_range("eps", eps, 0)
    logp_S, collision_S = x.need("logp")[x.mask], x.need("collision")[x.mask]
    seq_S, returns_T = x.seq[x.mask], to_go(x, x.rewards, 1.0)
    energy_S = 1 - 2 * logp_S.exp() + collision_S
    # If p is near 1, rounding can make the squared norm slightly negative. Larger negative values indicate wrong inputs
    # and are not clamped.
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
    """Return the combined reward and cost advantage, (A - multiplier * A_cost) / (1 + multiplier), [T].

    Source: Safe RLHF, https://arxiv.org/abs/2310.12773

    Raises ValueError for a negative multiplier or mismatched shapes.
    """
    in_range("multiplier", float(multiplier), 0)
    if advantages_T.shape != cost_advantages_T.shape:
        raise ValueError(
            f"advantages of reward and cost must have one shape, got {tuple(advantages_T.shape)} and "
            f"{tuple(cost_advantages_T.shape)}"
        )
    return (advantages_T - multiplier * cost_advantages_T) / (1 + multiplier)


def to_go(x: Samples, x_T: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return the discounted sum of x from each sampled token to the end of its sequence.

    In a tree, the sum runs over all descendants. [T] -> [T], fp64, 0 at tokens that were not sampled.
    """
    x_S = x_T.double()[x.mask]
    return x.spread(discount(x_S, tokens_follow(x), torch.full_like(x_S, gamma)))
