"""Token and turn order in episodes that may fork, and sums along this order.

Every sampled token of an episode except the first follows an earlier token. After a fork, several tokens follow the
same token, so the tokens form a tree. For each row (a token or a turn), `after_n` contains the index of the row that it
follows, or -1 for none.

S: sampled tokens on this rank; n: rows on this rank. Functions raise ValueError if the turns have no consistent order.
"""

from dataclasses import dataclass

import torch

from spmdrl.algos.samples import Samples


@dataclass(frozen=True)
class Turns:
    """The n turns with at least one sampled token, sorted by sequence and then by creation."""

    of_S: torch.Tensor
    """int64: index of each sampled token's turn, among the n turns."""
    seq_n: torch.Tensor
    """int64, ascending: sequence index of each turn."""
    after_n: torch.Tensor
    """int64: index of the earlier turn that each turn follows, or -1 for a first turn."""

    @staticmethod
    def of(x: Samples) -> "Turns":
        """Return the turns of this rank's sequences. Within a sequence they form a chain, or a tree if `x.parent` is
        given.

        Raises:
            ValueError: without `x.parent`, turn numbers decrease within a sequence. With `x.parent`, turn numbers are
                missing, or a turn follows itself, a later turn, two turns or a turn of another sequence.
        """
        if x.parent is not None:
            return _tree(x)
        place_S, seq_S = x.mask.nonzero().flatten(), x.seq[x.mask]
        # Without turn numbers, the difference below grows at every gap between two runs of sampled tokens.
        turn_S = x.turn[x.mask] if x.turn is not None else place_S - torch.arange(len(place_S))
        same_S = chain(seq_S) >= 0
        step_S = torch.zeros_like(turn_S)
        step_S[1:] = turn_S.diff()
        _refuse(seq_S, same_S & (step_S < 0), "without parent, turn must not decrease within a sequence, as it does")
        starts_S = ~same_S | (step_S != 0)
        return Turns(torch.cumsum(starts_S, 0) - 1, seq_S[starts_S], chain(seq_S[starts_S]))

    @property
    def first_n(self) -> torch.Tensor:
        """Return the index of each turn's first sampled token among the S sampled tokens, int64 [n]."""
        place_S = torch.arange(len(self.of_S))
        return torch.zeros_like(self.seq_n).scatter_reduce_(0, self.of_S, place_S, "amin", include_self=False)

    def sum(self, x_S: torch.Tensor) -> torch.Tensor:
        """Return the sum over the sampled tokens of each turn, fp64 [n]."""
        return torch.zeros(len(self.seq_n), dtype=torch.float64).index_add_(0, self.of_S, x_S.double())

    def one(self, name: str, x_S: torch.Tensor) -> torch.Tensor:
        """Return, for each turn, the value that all of its sampled tokens share, [n].

        name: what the values are, for the error message. Raises ValueError if the values of a turn differ.
        """
        x_n = x_S[self.first_n]
        _refuse(self.seq_n[self.of_S], x_n[self.of_S] != x_S, f"all tokens of a turn must have the same {name}, unlike")
        return x_n


def tokens_follow(x: Samples) -> torch.Tensor:
    """Return the index of the token that each sampled token follows, or -1 for the first of a sequence: int64 [S].

    In a tree, the first token of a turn follows the last token of the parent turn.
    """
    seq_S = x.seq[x.mask]
    if x.parent is None:
        return chain(seq_S)
    turns = Turns.of(x)
    # Tokens are sorted by turn, and the tokens of a turn keep their order.
    order_S = torch.argsort(turns.of_S, stable=True)
    ends_n = torch.cumsum(torch.bincount(turns.of_S, minlength=len(turns.seq_n)), 0) - 1
    last_n = order_S[ends_n]
    after_S = torch.full_like(seq_S, -1)
    after_S[order_S[1:]] = order_S[:-1]
    after_S[turns.first_n] = torch.where(turns.after_n >= 0, last_n[turns.after_n], -1)
    return after_S


def chain(seq_n: torch.Tensor) -> torch.Tensor:
    """Return the index of the row before each row in its sequence, or -1 for the first: int64 [n]. seq_n: ascending."""
    after_n = torch.arange(len(seq_n)) - 1
    after_n[1:][seq_n[1:] != seq_n[:-1]] = -1
    return after_n


def depths(after_n: torch.Tensor) -> torch.Tensor:
    """Return the number of rows before each row on its path, int64 [n]."""
    # Rows that follow the row directly before them form runs. There are few runs, so it is fast to follow only the
    # first row of each run towards the root.
    rows_n = torch.arange(len(after_n))
    first_n = after_n != rows_n - 1
    first_n[:1] = True
    run_n, firsts_r = torch.cumsum(first_n, 0) - 1, rows_n[first_n]
    place_n, above_r = rows_n - firsts_r[run_n], after_n[firsts_r]
    up_r = torch.where(above_r >= 0, run_n[above_r], -1)
    depth_r = torch.where(above_r >= 0, place_n[above_r] + 1, 0)
    while bool((up_r >= 0).any()):  # every iteration doubles how far a run jumps towards the root
        depth_r = depth_r + torch.where(up_r >= 0, depth_r[up_r], 0)
        up_r = torch.where(up_r >= 0, up_r[up_r], -1)
    return depth_r[run_n] + place_n


def sum_following(x_n: torch.Tensor, after_n: torch.Tensor) -> torch.Tensor:
    """Return the sum of x over each row's direct successors, fp64 [n]."""
    has_n = after_n >= 0
    return torch.zeros(len(x_n), dtype=torch.float64).index_add_(0, after_n[has_n], x_n.double()[has_n])


def discount(x_n: torch.Tensor, after_n: torch.Tensor, decay_n: torch.Tensor, *, forward: bool = False) -> torch.Tensor:
    """Return y = x + decay * (sum of y over the direct successors), fp64 [n].

    forward: return y = x + decay * (y of the predecessor) instead. decay_n: [n], equal for all rows of a tree. The loop
    has one iteration per depth, so its time grows with the longest path.
    """
    depth_n = depths(after_n)
    order_n = torch.argsort(depth_n, stable=True)
    place_n = torch.empty_like(order_n)
    place_n[order_n] = torch.arange(len(order_n))
    y_n, decay_n = x_n.double()[order_n], decay_n.double()[order_n]
    up_n = place_n[after_n[order_n]]
    ends = torch.cumsum(torch.bincount(depth_n), 0).tolist()
    levels = list(zip(ends[:-1], ends[1:], strict=True))  # depth 0 is omitted: its rows have no predecessor
    for a, b in levels if forward else reversed(levels):
        if forward:
            y_n[a:b] += decay_n[a:b] * y_n[up_n[a:b]]
        else:
            y_n.index_add_(0, up_n[a:b], decay_n[a:b] * y_n[a:b])
    return y_n[place_n]


def td_errors(reward_n: torch.Tensor, value_n: torch.Tensor, after_n: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return reward + gamma * (sum of the direct successors' values) - value, fp64 [n]."""
    return reward_n.double() + gamma * sum_following(value_n, after_n) - value_n


def _tree(x: Samples) -> Turns:
    """Return the turns of sequences with `x.parent`."""
    assert x.parent is not None
    if x.turn is None:
        raise ValueError("parent holds numbers of turns: give turn, too")
    seq_S, turn_S, parent_S = (column_T[x.mask] for column_T in (x.seq, x.turn, x.parent))
    early_S = (turn_S < 0) | (parent_S < -1) | (parent_S >= turn_S)
    _refuse(seq_S, early_S, "turn must be 0 or more and parent -1 or an earlier turn, unlike")
    # A turn without a sampled token is skipped. The children of such a turn follow the turn's parent, which is read
    # from the turn's unsampled tokens.
    number_t, turn_T = torch.unique(x.turn, return_inverse=True)
    key_m, row_T = torch.unique(x.seq * (len(number_t) + 1) + turn_T, return_inverse=True)
    row_S = row_T[x.mask]
    sampled_m = torch.zeros(len(key_m), dtype=torch.bool).index_fill_(0, row_S, True)
    seq_m = torch.zeros_like(key_m).index_copy_(0, row_T, x.seq)
    earlier_T = torch.where(x.parent < x.turn, x.parent, -1)
    parent_m = torch.full_like(key_m, -1).scatter_reduce_(0, row_T, earlier_T, "amax")
    parent_m.scatter_reduce_(0, row_S, parent_S, "amax", include_self=False)
    _refuse(seq_S, parent_m[row_S] != parent_S, "all tokens of a turn must have the same parent, unlike")
    parent_t = torch.searchsorted(number_t, parent_m).clamp(max=max(0, len(number_t) - 1))
    wanted_m = seq_m * (len(number_t) + 1) + parent_t
    up_m = torch.searchsorted(key_m, wanted_m).clamp(max=max(0, len(key_m) - 1))
    found_m = (parent_m >= 0) & (number_t[parent_t] == parent_m) & (key_m[up_m] == wanted_m)
    _refuse(seq_m, sampled_m & (parent_m >= 0) & ~found_m, "parent must name a turn of the same sequence, unlike")
    up_m = torch.where(found_m, up_m, -1)
    while bool((through_m := (up_m >= 0) & ~sampled_m[up_m]).any()):
        up_m = torch.where(through_m, up_m[up_m], up_m)
    row_m = torch.cumsum(sampled_m, 0) - 1
    after_m = torch.where(up_m >= 0, row_m[up_m], -1)
    return Turns(row_m[row_S], seq_m[sampled_m], after_m[sampled_m])


def _refuse(seq_n: torch.Tensor, bad_n: torch.Tensor, message: str) -> None:
    if bool(bad_n.any()):
        raise ValueError(f"{message} in sequences {seq_n[bad_n].unique()[:8].tolist()}")
