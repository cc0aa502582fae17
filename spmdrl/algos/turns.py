"""Turn-level advantages: one number per turn, assigned to all of its sampled tokens.

The turns of an episode form a chain, or a tree if the episode forked (`tree.py`). A turn's return is the sum of its
token rewards plus gamma times the returns of the turns that follow it. In a tree, a turn's return therefore excludes
parallel branches. Estimators take `Samples`. Results do not depend on how sequences are distributed over ranks. Turns
without sampled tokens are ignored. Estimators raise ValueError if an input is missing or not finite, a setting is out
of range, or the turns have no consistent order (`Turns.of`). docs/credit.md lists the unbiased estimators.
"""

import torch

from spmdrl.algos.groups import Groups, normalise, subtract_mean
from spmdrl.algos.rows import in_range
from spmdrl.algos.samples import Result, Samples
from spmdrl.algos.tree import Turns, depths, discount, td_errors


def turn_rloo(x: Samples, *, gamma: float = 1.0) -> Result:
    """RLOO per turn: the return of a turn minus the mean return of other samples' turns at the same depth.

    Source: https://arxiv.org/abs/2402.14740

        G_n = reward of turn n + gamma * sum of G over the turns that follow it
        A   = G_n - mean of G over the turns at the same depth in the other samples of the group

    All sampled tokens of a turn get the turn's advantage. Returns are `G_n`. A turn's depth is the number of turns
    before it on its path. Without a fork, the depth is the turn index. Turns of the same sample are excluded from the
    mean, because the return of a later turn depends on this turn. With one turn per sample, the result equals that of
    `rloo`. If the data has no turns, every run of sampled tokens is a turn.

    A is `G_n` in a group of one, and at a depth that no other sample reaches. If two or more samples of a group reach
    a depth and all returns at this depth are equal, A is exactly 0.
    """
    turns = Turns.of(x)
    return_n, depth_n = _returns(x, turns, gamma), depths(turns.after_n)
    return_N, group_N, depth_N, mine_n = x.everyone(return_n, x.group[turns.seq_n], depth_n, seq_n=turns.seq_n)
    everyone = Groups.of([group_N, depth_N], return_N)
    # The lowest return is subtracted before the sums, so that equal returns give exactly 0.
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
    """Turn-level GAE (each turn is one time step), as in Turn-PPO.

    Source: https://arxiv.org/abs/2512.17008

        error_n  = reward of turn n + gamma * sum of V over the turns that follow it - V_n
        A_n      = error_n + gamma * lam * sum of A over the turns that follow it
        return_n = V_n + A_n with critic_lam instead of lam

    Requires a critic. `V_n` is the value before the first sampled token of the turn. The paper uses `gamma` 0.99 and
    `lam` 0.9. The paper's turn-level clipping belongs to its loss and is not part of this advantage. If `critic_lam` is
    None, returns use `lam`. All sampled tokens of a turn get the turn's advantage, and the critic is trained to predict
    `return_n` at all of them. `whiten` applies to the advantages, not to the returns.

    The estimator ignores groups.
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
    """GiGPO: an episode-level advantage within the group, plus a turn-level advantage among turns in the same state.

    Source: https://arxiv.org/abs/2505.10978

        A = GRPO's advantage of the episode
            + step_weight * GRPO's advantage of the turn's return among the turns of the group with the same state

    A turn's return is the sum of its rewards plus `gamma` times the returns of the turns that follow it: the next turn,
    or several turns after a fork (docs/credit.md#trees). With `std` False, means are subtracted, but nothing is divided
    by a std. If the data has no turns, every run of sampled tokens is a turn. If the data has no states, all first
    turns of a prompt share one state, and every later turn has its own. The second term is 0 for a turn if no other
    turn of the group shares its state. An environment sets its state with `state_key` (docs/credit.md#states). Without
    `state_key`, the history is the state. A turn with two states is an error.

    In a group of one, the episode-level term is `r / (1 + eps)`, or `r` with `std` False. If all total rewards of a
    larger group are equal, this term is 0.
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
    # `own_N` is 0 for turns that may share a state, and a distinct number for each turn whose state is unique.
    own_N = own_N * torch.arange(1, len(own_N) + 1)
    steps = Groups.of([group_N, state_N, own_N], return_N)
    step_N = normalise(return_N, steps, eps) if std else subtract_mean(return_N, steps)
    step_N = torch.where(steps.size_N > 1, step_N, 0.0)
    advantages_n = episode_N[mine][turns.seq_n] + step_weight * step_N[mine_n]
    advantages_T = x.spread(advantages_n[turns.of_S])
    return advantages_T, advantages_T


def _returns(x: Samples, turns: Turns, gamma: float) -> torch.Tensor:
    """Return the return of each turn, as defined in the module docstring, fp64 [n]."""
    reward_n = turns.sum(x.rewards[x.mask])
    return discount(reward_n, turns.after_n, torch.full_like(reward_n, in_range("gamma", gamma, 0, 1)))
