"""Many episodes packed end to end: per-token tensors [T], per-sequence tensors [B], no padding.

Row t of a per-token tensor describes the token at t itself: `logp[t]` is log p(tokens[t] | earlier tokens of the same
sequence). The first token of a sequence has no such value; its mask is False.
"""

import math
from dataclasses import dataclass, field

import torch

from spmdrl.data.episode import FINISH_REASONS, Episode, episode_of
from spmdrl.spmd.balance import assign_balanced, assign_groups, assign_units
from spmdrl.spmd.exchange import Table, exchange, lexsort, select
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.world import World

KEYS = ("position", "sample")
"""Sample order: the keys by which every batch is sorted (law 3)."""


@dataclass
class Batch:
    """B sequences, T tokens, sorted by (position, sample).

    lengths: int64 [B]. token: name -> [T]; always holds tokens, version (int64), mask (bool), rollout_logp (float32);
    under routing replay also experts (int16 [T, W], see `Episode`); if turns are compared, turn and state (int64, see
    `Segment`). mask is the loss mask; if it omits sampled tokens, sampled (bool) marks all tokens that the policy
    sampled.
    seq: name -> [B]; always holds prompt, sample, position, version, finish, turns (int64), reward, baseline (float64).
    """

    lengths: torch.Tensor
    token: dict[str, torch.Tensor] = field(default_factory=dict)
    seq: dict[str, torch.Tensor] = field(default_factory=dict)

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
        return int(self.lengths.sum())

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 [B + 1]: the start of each sequence, and the end."""
        ends = torch.cumsum(self.lengths, 0).to(torch.int32)
        return torch.cat([ends.new_zeros(1), ends])

    @property
    def seq_index(self) -> torch.Tensor:
        """int64 [T]: the sequence of each token."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.device), self.lengths)

    @property
    def sampled(self) -> torch.Tensor:
        """bool [T]: True for tokens that the policy sampled, even if the loss omits them (`mask`)."""
        return self.token.get("sampled", self.token["mask"])

    @property
    def sampled_per_seq(self) -> torch.Tensor:
        """int64 [B]: number of tokens that the policy sampled."""
        counts = torch.zeros(len(self), dtype=torch.int64, device=self.device)
        return counts.index_add_(0, self.seq_index, self.sampled.long())

    def per_token(self, x_B: torch.Tensor) -> torch.Tensor:
        """Repeat a per-sequence value for each of its tokens: [B] -> [T]."""
        return torch.repeat_interleave(x_B, self.lengths)

    def group_differs(self) -> torch.Tensor:
        """bool [B]: True if rewards differ within the sequence's group, which must be in this batch completely."""
        low = torch.full((int(self.seq["position"].max()) + 1 if len(self) else 0,), float("inf"), dtype=torch.float64)
        high = -low
        low.scatter_reduce_(0, self.seq["position"], self.seq["reward"], "amin")
        high.scatter_reduce_(0, self.seq["position"], self.seq["reward"], "amax")
        return (high > low)[self.seq["position"]]

    def sum_tokens(self, x_T: torch.Tensor) -> torch.Tensor:
        """Sum of a per-token value over each sequence's loss mask: [T] -> [B], float64."""
        masked = torch.where(self.token["mask"], x_T, torch.zeros((), dtype=x_T.dtype, device=self.device)).double()
        return torch.zeros(len(self), dtype=torch.float64, device=self.device).index_add_(0, self.seq_index, masked)

    def select(self, index: torch.Tensor) -> "Batch":
        """Return the sequences `index` (int64 [m]), in that order."""
        picked = select(to_table(self), index)
        return from_table(picked)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on another device."""
        return Batch(
            self.lengths.to(device),
            {k: v.to(device) for k, v in self.token.items()},
            {k: v.to(device) for k, v in self.seq.items()},
        )


def from_episodes(
    episodes: list[Episode], part_names: tuple[str, ...] = (), experts_width: int = 0, turns: bool = False
) -> Batch:
    """Pack episodes in sample order; an empty list gives an empty batch with every column.

    The optional columns must be the same on every rank.

    Args:
        episodes: episodes of this rank.
        part_names: reward parts kept as `part/<name>` columns, nan where a sample has no such part.
        experts_width: columns of `Episode.experts`, kept as `token["experts"]`; 0: not kept.
        turns: keep `token["turn"]` and `token["state"]`.
    """
    ordered = sorted(episodes, key=lambda e: (e.position, e.sample))

    def pack(pick, dtype):
        return torch.cat([pick(e).to(dtype) for e in ordered]) if ordered else torch.zeros(0, dtype=dtype)

    def column(values, dtype=torch.int64):
        return torch.tensor(list(values), dtype=dtype)

    token = {
        "tokens": pack(lambda e: e.tokens, torch.int64),
        "mask": pack(lambda e: e.mask, torch.bool),
        "rollout_logp": pack(lambda e: e.rollout_logp, torch.float32),
        "version": pack(lambda e: e.versions, torch.int64),
    }
    if turns:
        token["turn"] = pack(lambda e: e.spread([s.turn for s in e.segments]), torch.int64)
        token["state"] = pack(lambda e: e.spread([s.state for s in e.segments]), torch.int64)
    if experts_width:
        none = torch.full((0, experts_width), -1, dtype=torch.int16)
        token["experts"] = torch.cat([none, *(all_experts(e, experts_width) for e in ordered)])
    names = ("prompt", "sample", "position", "version", "turns")
    seq = {name: column(getattr(e, name) for e in ordered) for name in names}
    seq["finish"] = column(FINISH_REASONS.index(e.finish) for e in ordered)
    seq["reward"] = column((e.reward for e in ordered), torch.float64)
    seq["baseline"] = column((e.baseline for e in ordered), torch.float64)
    for name in part_names:
        part = (e.parts.get(name, 0.0 if e.timed_out else math.nan) for e in ordered)
        seq[f"part/{name}"] = column(part, torch.float64)
    return Batch(column(len(e) for e in ordered), token, seq)


def all_experts(episode: Episode, width: int) -> torch.Tensor:
    """Return `Episode.experts` for all tokens, int16 [L, width], -1 if unknown."""
    out = torch.full((len(episode), width), -1, dtype=torch.int16)
    if episode.experts is not None:
        out[: len(episode.experts)] = episode.experts
    return out


def to_episodes(batch: Batch, leave_out: tuple[str, ...] = ()) -> list[Episode]:
    """Turn the sequences with sampled tokens back into episodes, to look at them. leave_out: parts of the reward."""
    lengths, token = batch.lengths.tolist(), batch.token
    columns = [x_T.split(lengths) for x_T in (token["tokens"], batch.sampled, token["rollout_logp"], token["version"])]
    names = ("prompt", "sample", "position", "finish", "reward")
    parts = {name.removeprefix("part/"): x_B.tolist() for name, x_B in batch.seq.items() if name.startswith("part/")}
    told = [
        {name: x_B[i] for name, x_B in parts.items() if name not in leave_out and not math.isnan(x_B[i])}
        for i in range(len(batch))
    ]
    rows = zip(*columns, *(batch.seq[name].tolist() for name in names), told, strict=True)
    return [
        episode_of(
            *(prompt, sample, position, tokens, mask, logp, version, FINISH_REASONS[finish]), reward=reward, parts=some
        )
        for tokens, mask, logp, version, prompt, sample, position, finish, reward, some in rows
        if bool(mask.any())
    ]


def to_table(batch: Batch) -> Table:
    """Convert a batch to named ragged columns, which `spmd.exchange` moves."""
    keys = torch.stack([batch.seq[k] for k in KEYS], 1)
    ones = torch.ones(len(batch), dtype=torch.int64)
    lengths = {f"token/{k}": batch.lengths for k in batch.token} | {f"seq/{k}": ones for k in batch.seq}
    values = {f"token/{k}": v for k, v in batch.token.items()} | {f"seq/{k}": v for k, v in batch.seq.items()}
    return Table(keys, lengths, values)


def from_table(table: Table) -> Batch:
    """Convert named ragged columns back to a batch: the inverse of `to_table`."""
    token = {k[len("token/") :]: v for k, v in table.values.items() if k.startswith("token/")}
    seq = {k[len("seq/") :]: v for k, v in table.values.items() if k.startswith("seq/")}
    return Batch(table.lengths["token/tokens"], token, seq)


def balance(batch: Batch, world: World) -> Batch:
    """Give every data position the same amount of work in every optimizer step. Collective over the world.

    Any rank may bring sequences, each of them once; the ranks of a position (`World.holders`) return the same share,
    and ranks that hold none an empty batch.
    `seq["update"]` is the optimizer step that uses a sequence, `seq["work"]` (int64) its cost there: both come from
    data, and only the latter may be an estimate (law 2). If prompts are shared, `seq["common"]` (int64) is the part of
    that work that samples of a prompt on one rank do once. If `seq["unit"]` is there, all sequences of a position go to
    the same data position.
    """
    return deal(batch, world.holders, Peers(world.group, world.device))


def deal(batch: Batch, holders: torch.Tensor, peers: Peers) -> Batch:
    """Do the work of `balance` over the ranks of a group. Collective.

    holders: int64 [data positions, copies], group ranks.
    """
    positions, copies = holders.shape
    table = to_table(batch)
    # These columns travel in the keys, so that every rank plans alike.
    shared, bound = "common" in batch.seq, "unit" in batch.seq
    plan = [batch.seq[name] for name in ("update", "work", *(["common"] if shared else []))]
    table.keys_nK = torch.cat([table.keys_nK, torch.stack(plan, 1)], 1)
    if copies > 1:
        # Repeat each row for each rank of its position; sorted by keys the copies stay together.
        table = select(table, torch.arange(len(batch)).repeat_interleave(copies))

    def assign(rows: torch.Tensor) -> torch.Tensor:
        position, _, share, work, *rest = rows[::copies, : len(KEYS) + len(plan)].unbind(1)
        common = rest[0] if shared else torch.zeros_like(work)
        if bound:
            return holders[assign_units(work, share, position, common, positions)].flatten()
        if not shared:
            return holders[assign_balanced(work, share, positions)].flatten()
        return holders[assign_groups(work, share, position, common, positions)].flatten()

    received, _ = exchange(table, assign, peers.group, peers.device)
    return from_table(received)


def share_out(batch: Batch, updates: int, prompts: int, order: list[int]) -> Batch:
    """Assign each sequence to an optimizer step: whole groups, an equal number of prompts per step, in `order`.

    order: permutation of the positions 0 .. prompts - 1, keyed by (seed, step), the same on every rank. A replayed
    sequence, whose position is higher, goes with the prompt at the same place of this step.
    """
    step_of = torch.zeros(prompts, dtype=torch.int64)
    step_of[torch.tensor(order)] = torch.arange(prompts) * updates // prompts
    batch.seq["update"] = step_of[batch.seq["position"] % prompts]
    return batch


def gather_rows(
    batch: Batch, seq_n: torch.Tensor, columns_nK: torch.Tensor, peers: Peers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather rows that belong to sequences from all ranks, in sample order. Collective.

    Args:
        batch: this rank's sequences.
        seq_n: int64 [n] ascending, the sequence of each row; rows of one sequence keep their order.
        columns_nK: float64 [n, K].
        peers: ranks that take part.

    Returns:
        float64 [N, K], the same on every rank, and int64 [n], the places of this rank's rows in it.
    """
    keys = torch.stack([batch.seq[k][seq_n].double() for k in KEYS], 1)
    rows = peers.rows(torch.cat([keys, columns_nK.double()], 1))
    start = sum(len(part) for part in rows[: peers.index])
    everyone = torch.cat([part.cpu() for part in rows])
    order = lexsort(everyone[:, : len(KEYS)].long())
    where = torch.empty(len(everyone), dtype=torch.int64)
    where[order] = torch.arange(len(everyone))
    return everyone[order, len(KEYS) :], where[start : start + len(seq_n)]


def concatenate(first: Batch, second: Batch) -> Batch:
    """Join two batches with the same columns, the first one's sequences first."""
    return Batch(
        torch.cat([first.lengths, second.lengths]),
        {k: torch.cat([v, second.token[k]]) for k, v in first.token.items()},
        {k: torch.cat([v, second.seq[k]]) for k, v in first.seq.items()},
    )
