"""Advantages that differ from turn to turn: every sampled token of a turn has the turn's.

The turns of an episode are a chain, or a tree where it forked (`tree.py`). The return of a turn is the sum of the
rewards of its tokens plus gamma times the returns of the turns that follow it: in a tree those of its descendants, and
of no branch beside it. Estimators are functions of `Samples`; a result does not depend on how the sequences are spread
over ranks. Turns without a sampled token do not count. ValueError: an input that is missing or not finite, settings out
of range, turns that fit no order (`Turns.of`). docs/credit.md says which estimators are unbiased.
"""

import torch

from spmdrl.algos.advantages import Groups, normalise, subtract_mean
from spmdrl.algos.samples import Result, Samples, in_range
from spmdrl.algos.tree import Turns, depths, discount, td_errors


def turn_rloo(x: Samples, *, gamma: float = 1.0) -> Result:
    """RLOO turn by turn: return of the turn - mean return of the turns at the same depth in other samples of the group.

    Source: https://arxiv.org/abs/2402.14740 (the leave-one-out mean, there over whole responses)

    The depth of a turn is the number of turns before it on its path; in a chain that is its number. Turns of the same
    sample are left out of the mean, as the return of a later one depends on what this one did. A turn at a depth that
    no other sample reaches keeps its raw return. Returns are the returns of the turns.
    """
    turns = Turns.of(x)
    return_n, depth_n = _returns(x, turns, gamma), depths(turns.after_n)
    return_N, group_N, depth_N, mine_n = x.everyone(return_n, x.group[turns.seq_n], depth_n, seq_n=turns.seq_n)
    everyone = Groups.of([group_N, depth_N], return_N)
    # Measured from the lowest return, so that equal ones give exactly 0.
    above_N = return_N - everyone.low(return_N)
    above_n = above_N[mine_n]
    own = Groups.of([turns.seq_n, depth_n], above_n)
    others_n = everyone.size_N[mine_n] - own.size_N
    mean_n = (everyone.sum(above_N)[mine_n] - own.sum(above_n)) / others_n.clamp(min=1)
    advantage_n = torch.where(others_n > 0, above_n - mean_n, return_n)
    return x.spread(advantage_n[turns.of_S]), x.spread(return_n[turns.of_S])


def turn_gae(
    x: Samples, *, gamma: float = 1.0, lam: float = 1.0, critic_lam: float | None = None, whiten: bool = False
) -> Result:
    """GAE with turns as the steps of time: sum over later turns of (gamma lam)^k * TD error.

    Source: https://arxiv.org/abs/2512.17008 (Turn-PPO, with gamma 0.99 and lam 0.9; its clipping by turn is a loss)

    Needs `values`; that of a turn is the critic's before its first sampled token. The TD error of a turn is its reward
    + gamma * the values of the turns that follow - its own value; after a turn that none follows it is 0. The default
    lam, 1, is the return minus the value.

    critic_lam: lambda of the returns (GAE + value), which the critic learns at all tokens of the turn; None: lam.
    whiten: advantages get mean 0 and variance 1 over all sampled tokens of the step; returns never do.
    """
    in_range("gamma", gamma, 0, 1)
    lams = [in_range("lam", lam, 0, 1), in_range("critic_lam", lam if critic_lam is None else critic_lam, 0, 1)]
    turns = Turns.of(x)
    value_n = x.need("values")[x.mask][turns.first_n]
    error_n = td_errors(turns.sum(x.rewards[x.mask]), value_n, turns.after_n, gamma)
    policy_n, critic_n = (discount(error_n, turns.after_n, torch.full_like(error_n, gamma * k)) for k in lams)
    advantages_T = x.spread(policy_n[turns.of_S])
    return x.whiten(advantages_T) if whiten else advantages_T, x.spread((critic_n + value_n)[turns.of_S])


def gigpo(x: Samples, *, gamma: float = 0.95, step_weight: float = 1.0, std: bool = True, eps: float = 1e-6) -> Result:
    """GiGPO: advantage of the episode within the group + step_weight * advantage of the turn within its state.

    Source: https://arxiv.org/abs/2505.10978

    The episode's is GRPO's (a group of one: reward / (1 + eps)). The turn's compares returns of all turns of the group
    that share `state`, of the same sequence too; a state met once gives 0.

    std: divide by (std + eps), unbiased, in both; False subtracts means alone. Without `turn` and `state` see Samples.
    ValueError: a turn of two states.
    """
    turns = Turns.of(x)
    return_n = _returns(x, turns, gamma)
    if x.state is None:
        state_n, own_n = torch.zeros_like(turns.seq_n), turns.after_n >= 0
    else:
        state_n, own_n = turns.one("state", x.state[x.mask]), torch.zeros_like(turns.seq_n)
    score_N, group_N, mine = x.everyone(x.scores, x.group)
    episode = Groups.of([group_N], score_N)
    episode_N = normalise(score_N, episode, eps) if std else subtract_mean(score_N, episode)
    return_N, group_N, state_N, own_N, mine_n = x.everyone(
        return_n, x.group[turns.seq_n], state_n, own_n, seq_n=turns.seq_n
    )
    own_N = own_N * torch.arange(1, len(own_N) + 1)  # 0 for a state that others may share
    steps = Groups.of([group_N, state_N, own_N], return_N)
    step_N = normalise(return_N, steps, eps) if std else subtract_mean(return_N, steps)
    step_N = torch.where(steps.size_N > 1, step_N, 0.0)
    advantages_n = episode_N[mine][turns.seq_n] + step_weight * step_N[mine_n]
    advantages_T = x.spread(advantages_n[turns.of_S])
    return advantages_T, advantages_T


def _returns(x: Samples, turns: Turns, gamma: float) -> torch.Tensor:
    """fp64 [n]: the return of each turn."""
    reward_n = turns.sum(x.rewards[x.mask])
    return discount(reward_n, turns.after_n, torch.full_like(reward_n, in_range("gamma", gamma, 0, 1)))
