"""Inputs to advantage estimators: this rank's sequences, and a function that gathers the sequences of all ranks.

T: packed tokens of this rank; S: its sampled tokens, where the mask is True; B: its sequences; N: rows of all ranks. An
estimator is `f(x: Samples, **settings) -> (advantages_T, returns_T)`, fp64, 0 where the mask is False. An estimator
accesses other ranks' sequences only through `Samples.everyone`. The number of calls to `everyone` must not depend on
the data, because every rank must make the same calls (law 1 of the design).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from spmdrl.algos.groups import power_of_two
from spmdrl.algos.rows import LARGEST

Result = tuple[torch.Tensor, torch.Tensor]
"""advantages_T and returns_T. Returns are the critic's targets. For outcome advantages, advantages_T and returns_T are
the same tensor."""

Gather = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

WHOLE = 2**53
"""The largest n for which fp64 represents all integers from 0 to n exactly."""


def _given(shape: str, dtype: str = "floats", about: str = "", **more: Any) -> Any:
    """Declare a field of Samples. shape: `T` or `B`. dtype: `floats`, `integers` or `bool`. about: description of the
    field, for the error message if it is missing. more: other arguments to `dataclasses.field`.
    """
    return field(**more, metadata={"shape": shape, "dtype": dtype, "about": about})


def alone(seq_n: torch.Tensor, columns_nK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows unchanged, with their indices. Single-rank jobs use this function as `Samples.gather`."""
    return columns_nK, torch.arange(len(seq_n))


@dataclass(frozen=True)
class Samples:
    """Inputs to an advantage estimator: this rank's sequences in one step. Tensors are on the CPU, floats are fp64.

    `seq` is in ascending order. A sequence without sampled tokens counts in its group as a sample with reward 0.

    Raises:
        ValueError: mismatched shapes, or values that are not finite where the mask is True.
    """

    rewards: torch.Tensor = _given("T")
    """Reward of each token, 0 where the mask is False. A turn's reward is placed on its last sampled token, the outcome
    on the last sampled token of the last turn, and a KL term on every sampled token."""
    mask: torch.Tensor = _given("T", "bool")
    """True where the policy sampled."""
    seq: torch.Tensor = _given("T", "integers")
    """Sequence index of each token, 0 .. B - 1. All paths of a branching episode form one sequence, in the order in
    which the paths finished."""
    group: torch.Tensor = _given("B", "integers")
    """Prompt id of each sequence, in any numbering."""
    values: torch.Tensor | None = _given("T", about="the critic's value before each token", default=None)
    baseline: torch.Tensor | None = _given("B", about="the reward of the greedy response to each prompt", default=None)
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name -> [B]: the reward parts of each sequence, in addition to the total. A part that a sequence lacks is nan.
    Every rank has the same names in the same order."""
    logp: torch.Tensor | None = _given("T", about="log p of each sampled token", default=None)
    """log p of each sampled token under the policy at the start of the step."""
    collision: torch.Tensor | None = _given(
        "T", about="the sum over the vocabulary of p squared at each sampled token", default=None
    )
    process: torch.Tensor | None = _given("T", about="the process reward of each token", default=None)
    """Either an implicit reward per token, or the score of each step of a response at the token where the step ends,
    and 0 at all other tokens."""
    ends: torch.Tensor | None = _given(
        "T", about="a mark, 1 instead of 0, at the tokens where a step ends", default=None
    )
    """1 at each token that ends a step with a score in `process`, and 0 at all other tokens."""
    turn: torch.Tensor | None = _given("T", "integers", default=None)
    """Turn index of each token. The turns of a sequence are numbered 0, 1, ... in order of creation. If None, every run
    of sampled tokens is a turn."""
    state: torch.Tensor | None = _given("T", "integers", default=None)
    """Id of the environment state in which the token's turn acts. Equal ids within a prompt mean equal states. If None,
    all first turns of a prompt share one state, and every later turn has its own."""
    parent: torch.Tensor | None = _given("T", "integers", default=None)
    """Index of the turn that this token's turn follows in time, or -1 for a first turn. A turn's context need not
    contain the tokens of its parent. If the episode forks after a turn, several turns have it as their parent. If None,
    the parent is the previous turn of the sequence."""
    gather: Gather = alone
    """(seq_n, columns_nK) -> (rows of all ranks in sample order [N, K], indices of this rank's rows among them [n])."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def sequences(self) -> int:
        """Return the number of sequences, B."""
        return len(self.group)

    @property
    def scores(self) -> torch.Tensor:
        """Return the total reward of each sequence, [B]."""
        return self.sum_tokens(self.rewards)

    @property
    def lengths(self) -> torch.Tensor:
        """Return each sequence's number of sampled tokens, fp64 [B]."""
        return self.sum_tokens(torch.ones_like(self.mask, dtype=torch.float64))

    def sum_tokens(self, x_T: torch.Tensor) -> torch.Tensor:
        """Return the sum over each sequence's sampled tokens: [T] -> [B], fp64."""
        masked = torch.where(self.mask, x_T.double(), 0.0)
        return torch.zeros(self.sequences, dtype=torch.float64).index_add_(0, self.seq, masked)

    def need(self, name: str) -> torch.Tensor:
        """Return the input `name` in fp64. Raises ValueError if it is missing or not finite."""
        value, declared = getattr(self, name), INPUTS[name]
        if value is None:
            raise ValueError(f"this estimator needs `{name}`: {declared['about']}")
        return finite(self, name, value, per_token=declared["shape"] == "T")

    def everyone(self, *columns_n: torch.Tensor, seq_n: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Gather rows from all ranks, in sample order. Collective over all ranks of a run.

        Args:
            columns_n: columns of this rank's rows, [n] each. Integers must be at most 2^53, because they are converted
                to fp64.
            seq_n: int64 [n], ascending: sequence index of each row, or None for one row per sequence (n = B).

        Returns:
            one fp64 column [N] per given column, followed by the indices of this rank's rows among the N, int64 [n].
        """
        seq_n = torch.arange(self.sequences) if seq_n is None else seq_n
        rows_NK, places = self.gather(seq_n, torch.stack([c.double() for c in columns_n], 1))
        return [*rows_NK.unbind(1), places]

    def at_tokens(self, x_B: torch.Tensor) -> torch.Tensor:
        """Broadcast each sequence's value to all of its sampled tokens, with 0 elsewhere: [B] -> [T]."""
        return torch.where(self.mask, x_B.double()[self.seq], 0.0)

    def spread(self, x_S: torch.Tensor) -> torch.Tensor:
        """Scatter values of sampled tokens to their positions among all tokens, with 0 elsewhere: [S] -> [T]."""
        return torch.zeros(len(self.mask), dtype=torch.float64).masked_scatter_(self.mask, x_S.double())

    def outcome(self, advantage_B: torch.Tensor) -> Result:
        """Return the result of an estimator that assigns the same advantage to all tokens of a sequence."""
        advantages_T = self.at_tokens(advantage_B)
        return advantages_T, advantages_T

    def whiten(self, x_T: torch.Tensor) -> torch.Tensor:
        """Return (x - mean) / sqrt(variance + 1e-8) over the sampled tokens of all ranks, [T], 0 elsewhere.

        The variance is unbiased. Calls `everyone` twice, with one row per sequence. Terms are added in ascending order,
        so the result is bitwise identical for any sample order. If all values are equal, the result is exactly 0.
        """
        x_S, seq_S = x_T.double()[self.mask], self.seq[self.mask]
        # Minimum and maximum of each sequence, 0 for a sequence without sampled tokens.
        ends = torch.zeros(2, self.sequences, dtype=torch.float64)
        for row, reduce in zip(ends, ("amin", "amax"), strict=True):
            row.scatter_reduce_(0, seq_S, x_S, reduce, include_self=False)
        above_B = self.sum_tokens(self.spread(x_S - ends[0][seq_S]))
        count_N, low_N, high_N, above_N, _ = self.everyone(self.lengths, *ends, above_B)
        filled_N = count_N > 0
        lowest = low_N[filled_N].min() if filled_N.any() else torch.zeros((), dtype=torch.float64)
        highest = high_N[filled_N].max() if filled_N.any() else lowest
        # The lowest value is subtracted before the sums, so that the mean of equal values is exactly that value.
        sums_N = torch.where(filled_N, above_N + count_N * (low_N - lowest), 0.0)
        count, scale = count_N.sum(), power_of_two(highest - lowest)
        mean = lowest + sums_N.sort().values.sum() / count.clamp(min=1)
        squares_N, _ = self.everyone(self.sum_tokens(self.spread(((x_S - mean) / scale).square())))
        std = (squares_N.sort().values.sum() / (count - 1).clamp(min=1)).sqrt() * scale
        return self.spread((x_S - mean) / torch.hypot(std, torch.full_like(std, 1e-4)))


INPUTS: dict[str, Mapping[str, str]] = {each.name: each.metadata for each in fields(Samples) if each.metadata}
"""Name of each `Samples` tensor -> its shape, dtype and meaning, as declared by `_given`."""


def at_last_sampled(
    x_B: torch.Tensor, mask_T: torch.Tensor, seq_T: torch.Tensor, turn_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each sequence's value at the token that `last_sampled` finds, 0 elsewhere: fp64 [T]."""
    last_B = last_sampled(mask_T, seq_T, len(x_B), turn_T)
    x_T = torch.zeros(mask_T.shape, dtype=torch.float64)
    x_T[last_B[last_B >= 0]] = x_B.double()[last_B >= 0]
    return x_T


def last_sampled(
    mask_T: torch.Tensor, seq_T: torch.Tensor, sequences: int, turn_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the token index of each sequence's last sampled token, or -1 if it has none: int64 [B].

    turn_T: int64 [T], turn index of each token. If turn_T is given, the result is the last sampled token of the last
    turn, because the turns of a tree are not packed in order of creation.
    """
    if turn_T is not None:
        latest = torch.full((sequences,), -1).scatter_reduce_(0, seq_T, torch.where(mask_T, turn_T, -1), "amax")
        mask_T = mask_T & (turn_T == latest[seq_T])
    place = torch.where(mask_T, torch.arange(len(mask_T)), -1)
    return torch.full((sequences,), -1).scatter_reduce_(0, seq_T, place, "amax")


def finite(x: Samples, name: str, value: torch.Tensor, *, per_token: bool) -> torch.Tensor:
    """Check that the absolute values of an input [T] or [B] are at most 1e290, and return it in fp64.

    name: input name, for the error message. per_token: True for an input [T], which is only checked where the mask is
    True.

    Raises:
        ValueError: an absolute value is larger or nan. The message lists the sequences.
    """
    bad = ~(value.abs() <= LARGEST)  # nan counts as bad, too
    bad = x.seq[x.mask & bad].unique() if per_token else bad.nonzero().flatten()
    if len(bad):
        source = "the reward function" if name == "rewards" else "the code that computes them"
        raise ValueError(f"{name} of sequences {bad[:8].tolist()} are not finite (or beyond 1e290): check {source}")
    return value.detach().double()


def check(x: Samples) -> None:
    """Check shapes, dtypes and rewards. Estimators check that the optional inputs they use are finite.

    Raises:
        ValueError: mismatched shapes or dtypes, rewards that are not finite, integers beyond 2^53, or a `seq` that is
            not in ascending order.
    """
    shapes = {"T": tuple(x.mask.shape), "B": tuple(x.group.shape)}
    if x.mask.ndim != 1 or x.mask.dtype != torch.bool or x.group.ndim != 1:
        raise ValueError(f"mask must be bool [T] and group [B], got {x.mask.dtype} {shapes['T']} and {shapes['B']}")
    inputs = [(name, getattr(x, name), declared) for name, declared in INPUTS.items()]
    inputs += [(f"parts[{name!r}]", part, {"shape": "B", "dtype": "floats"}) for name, part in x.parts.items()]
    for name, value, declared in inputs:
        if value is None:
            continue
        if tuple(value.shape) != (shape := shapes[declared["shape"]]):
            like = {"T": "mask", "B": "group"}[declared["shape"]]
            raise ValueError(f"{name} must be {shape} like {like}, got {tuple(value.shape)}")
        if declared["dtype"] != "integers":
            continue
        if value.is_floating_point() or value.dtype == torch.bool:
            raise ValueError(f"{name} must hold integers, got {value.dtype}")
        if len(value) and not -WHOLE <= int(value.min()) <= int(value.max()) <= WHOLE:
            raise ValueError(f"{name} must be within +-2^53, so that fp64 can represent it: renumber it")
    if len(x.seq) and (bool((x.seq.diff() < 0).any()) or int(x.seq[0]) < 0 or int(x.seq[-1]) >= len(x.group)):
        raise ValueError(f"seq must ascend within 0 .. {len(x.group) - 1}: sort the tokens by their sequence")
    finite(x, "rewards", x.rewards, per_token=True)
