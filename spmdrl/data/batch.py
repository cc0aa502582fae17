"""Episodes packed without padding: per-token tensors [T] and per-sequence tensors [B].

Element t of a per-token tensor describes token t itself: `logp[t]` is log p(tokens[t] | earlier tokens of the same
sequence). The first token of a sequence has no logp; its mask is False.

An episode that branches has one sequence per path. The sequences of an episode are adjacent, and the last one is the
path on which the episode ended. If several paths share a sampled token, its mask is True only in the first of them.
Losses and statistics treat an episode as one unit: they sum over its sequences and read its reward from the first one.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from spmdrl.spmd.copies import to_device
from spmdrl.spmd.exchange import Table, select
from spmdrl.spmd.payload import Payload

KEYS = ("position", "sample", "path")
"""Sort keys of every batch, which define the sample order (law 3)."""
IDENTITY = (*KEYS, "paths")
"""Columns that identify a sequence's episode and path."""


@dataclass
class Batch:
    """A packed batch of B sequences of E episodes with T tokens in total, sorted by (position, sample, path).

    lengths: int64 [B].

    token: name -> [T]. Sampled episodes always have tokens, version (int64), mask (bool) and rollout_logp (float32);
    supervised rows (`supervised/`) have tokens and mask. Optional columns are experts (int16 [T, W], see `Episode`) for
    routing replay; image (int64, see `data/placeholders.py`) for images; turn, state and parent (int64, see `Segment`)
    for turn-level advantages; and turn_reward (float64), each turn's reward at its last sampled token. mask is the loss
    mask. If it excludes some sampled tokens, sampled (bool) marks all tokens that the policy sampled. mask and sampled
    are False for tokens that also belong to an earlier path of the episode.

    seq: name -> [B]. Sampled episodes always have prompt, sample, position, version, finish, turns (int64), reward and
    baseline (float64), equal for all paths of an episode; supervised rows have sample and position. path (int64) is the
    sequence's path index, and paths (int64) the number of paths in its episode; in a batch without these columns every
    sequence is an episode. If a batch repeats an episode, the path indices of each copy continue those of the previous
    copy.

    images: per sequence, the payloads of its images in the order of their tokens, or None if the
    batches of all ranks are text. Payloads stay on the host and are shared by reference.

    host: the host batch from which this one was copied to a device; a host batch refers to itself.

    plans: cache of results that depend only on the batch's tokens, for later passes. Batches with the same tokens can
    share it.
    """

    lengths: torch.Tensor
    token: dict[str, torch.Tensor] = field(default_factory=dict)
    seq: dict[str, torch.Tensor] = field(default_factory=dict)
    images: list[tuple[Payload, ...]] | None = None

    def __post_init__(self):
        self.host: Batch = self
        self.plans: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def columns(self) -> set[str]:
        """Names of all columns: `token/<name>` and `seq/<name>`."""
        return {f"token/{name}" for name in self.token} | {f"seq/{name}" for name in self.seq}

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.lengths.device

    @property
    def n_tokens(self) -> int:
        """The number of tokens, T."""
        return int(self.host.lengths.sum())

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 [B + 1]: the index of each sequence's first token, followed by T."""
        ends = torch.cumsum(self.lengths, 0).to(torch.int32)
        return torch.cat([ends.new_zeros(1), ends])

    @property
    def seq_index(self) -> torch.Tensor:
        """int64 [T]: the index of the sequence that contains each token."""
        return self.per_token(torch.arange(len(self), device=self.device))

    @property
    def identity(self) -> dict[str, torch.Tensor]:
        """The columns of `IDENTITY`, int64 [B]."""
        ones = torch.ones_like(self.lengths)
        return {name: self.seq.get(name, ones * (name == "paths")) for name in IDENTITY}

    @property
    def keys(self) -> torch.Tensor:
        """int64 [B, 3]: the columns of `KEYS`."""
        return torch.stack([self.identity[name] for name in KEYS], 1)

    @property
    def begins(self) -> torch.Tensor:
        """bool [B]: True for the first path of an episode."""
        identity = self.identity
        return identity["path"] % identity["paths"] == 0

    @property
    def firsts(self) -> torch.Tensor:
        """int64 [E]: the index of each episode's first sequence."""
        return torch.nonzero(self.begins).flatten()

    @property
    def lasts(self) -> torch.Tensor:
        """int64 [E]: the index of each episode's last sequence, which is the path on which the episode ended."""
        ends = torch.full((len(self),), True, device=self.device)
        ends[:-1] = self.begins[1:]
        return torch.nonzero(ends).flatten()

    @property
    def episode(self) -> torch.Tensor:
        """int64 [B]: the index of each sequence's episode, 0 .. E - 1."""
        return torch.cumsum(self.begins, 0) - 1

    @property
    def episodes(self) -> int:
        """The number of episodes, E."""
        return int(self.host.begins.sum())

    @property
    def branches(self) -> bool:
        """True if an episode has several paths."""
        return bool((self.identity["paths"] > 1).any())

    @property
    def episode_index(self) -> torch.Tensor:
        """int64 [T]: the index of each token's episode, 0 .. E - 1."""
        return self.per_token(self.episode)

    @property
    def sampled(self) -> torch.Tensor:
        """bool [T]: True for tokens that the policy sampled, even if the loss mask excludes them."""
        return self.token.get("sampled", self.token["mask"])

    @property
    def sampled_per_seq(self) -> torch.Tensor:
        """int64 [B]: number of sampled tokens per sequence; a token shared by paths counts only for the first."""
        counts = torch.zeros(len(self), dtype=torch.int64, device=self.device)
        return counts.index_add_(0, self.seq_index, self.sampled.long())

    @property
    def sampled_per_episode(self) -> torch.Tensor:
        """int64 [E]: number of sampled tokens per episode."""
        counts = self.sampled_per_seq
        return torch.zeros_like(self.firsts).index_add_(0, self.episode, counts)

    @property
    def generated_per_episode(self) -> torch.Tensor:
        """int64 [E]: number of tokens after the prompt per episode; tokens shared by branches count once.

        Without `seq["made"]`, only sampled tokens are counted, not observed ones.
        """
        return self.seq["made"][self.firsts] if "made" in self.seq else self.sampled_per_episode

    @property
    def n_distinct(self) -> int:
        """The number of tokens in all episodes. With `seq["distinct"]`, tokens shared by branches count once."""
        return int(self.seq["distinct"][self.firsts].sum()) if "distinct" in self.seq else self.n_tokens

    def per_token(self, x_B: torch.Tensor) -> torch.Tensor:
        """Repeat a per-sequence value for each of its tokens: [B] -> [T]."""
        # Without `output_size`, torch would read it from the device.
        return torch.repeat_interleave(x_B, self.lengths, output_size=self.n_tokens)

    def where(self, test: Callable[["Batch"], torch.Tensor]) -> torch.Tensor:
        """Return the indices, int64 [m], where the result of `test` for the host batch, bool [n], is True."""
        return to_device(torch.nonzero(test(self.host)).flatten(), self.device)

    def group_differs(self) -> torch.Tensor:
        """Return bool [B]: True if rewards differ in the sequence's group. The batch must contain complete groups."""
        low = torch.full((int(self.seq["position"].max()) + 1 if len(self) else 0,), float("inf"), dtype=torch.float64)
        high = -low
        low.scatter_reduce_(0, self.seq["position"], self.seq["reward"], "amin")
        high.scatter_reduce_(0, self.seq["position"], self.seq["reward"], "amax")
        return (high > low)[self.seq["position"]]

    def sum_tokens(self, x_T: torch.Tensor) -> torch.Tensor:
        """Sum a per-token value over each sequence's unmasked tokens (loss mask True): [T] -> [B], float64."""
        masked = torch.where(self.token["mask"], x_T, torch.zeros((), dtype=x_T.dtype, device=self.device)).double()
        return torch.zeros(len(self), dtype=torch.float64, device=self.device).index_add_(0, self.seq_index, masked)

    def of_last(self, x_B: torch.Tensor) -> torch.Tensor:
        """Give each sequence the value of its episode's last path: [B] -> [B]."""
        return x_B[self.lasts][self.episode]

    def sum_episodes(self, x_T: torch.Tensor) -> torch.Tensor:
        """Sum `sum_tokens` over each episode and give the total to all its sequences: [T] -> [B], float64."""
        sums = torch.zeros(len(self.firsts), dtype=torch.float64, device=self.device)
        return sums.index_add_(0, self.episode, self.sum_tokens(x_T))[self.episode]

    def select(self, index: torch.Tensor) -> "Batch":
        """Return the sequences at the indices `index` (int64 [m]), in that order."""
        out = from_table(select(to_table(self), index))
        out.images = None if self.images is None else [self.images[i] for i in index.tolist()]
        return out

    def kept(self, which_B: torch.Tensor) -> "Batch":
        """Return the sequences where which_B, bool [B], is True; the result shares `plans` if all are kept."""
        return self.like() if bool(which_B.all()) else self.select(torch.nonzero(which_B).flatten())

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to `device` asynchronously."""
        out = Batch(*to_device((self.lengths, self.token, self.seq), device), self.images)
        out.host = self.host
        return out

    def like(self, **token: torch.Tensor) -> "Batch":
        """Return a batch of the same sequences with additional token columns; it shares `plans`."""
        out = Batch(self.lengths, self.token | token, dict(self.seq), self.images)
        out.plans = self.plans
        return out


def to_table(batch: Batch) -> Table:
    """Convert a batch to named ragged columns, which `spmd.exchange` moves; they do not include the images."""
    ones = torch.ones(len(batch), dtype=torch.int64)
    lengths = {f"token/{k}": batch.lengths for k in batch.token} | {f"seq/{k}": ones for k in batch.seq}
    values = {f"token/{k}": v for k, v in batch.token.items()} | {f"seq/{k}": v for k, v in batch.seq.items()}
    return Table(batch.keys, lengths, values)


def from_table(table: Table) -> Batch:
    """Convert named ragged columns back to a batch: the inverse of `to_table`."""
    token = {k[len("token/") :]: v for k, v in table.values.items() if k.startswith("token/")}
    seq = {k[len("seq/") :]: v for k, v in table.values.items() if k.startswith("seq/")}
    return Batch(table.lengths["token/tokens"], token, seq)


def concatenate(first: Batch, second: Batch) -> Batch:
    """Join two batches with the same columns; the sequences of the first batch come first."""
    images = None
    if first.images is not None or second.images is not None:
        images = [row for part in (first, second) for row in part.images or [()] * len(part)]
    return Batch(
        torch.cat([first.lengths, second.lengths]),
        {k: torch.cat([v, second.token[k]]) for k, v in first.token.items()},
        {k: torch.cat([v, second.seq[k]]) for k, v in first.seq.items()},
        images,
    )
