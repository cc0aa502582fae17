"""Exchanges named ragged tensors between ranks in one all_to_all, by a plan that every rank computes locally.

A `Table` holds n items. Each named column holds any number of rows per item, concatenated. This module knows nothing
about episodes, which `data/` defines. Tensors are sent as bytes and never pickled (law 4, CONTRIBUTING.md).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist

from spmdrl.spmd.checksum import digest


@dataclass
class Table:
    """n items with named ragged columns.

    keys_nK: int64 [n, K], the keys by which `exchange` sorts items.
    lengths: column -> number of rows per item, int64 [n]. values: column -> rows of all items, [sum(lengths), ...].
    """

    keys_nK: torch.Tensor
    lengths: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys_nK)


def _group_rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_group_rank(group, dist.get_rank())


def all_gather_rows(rows_nK: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Gather rows from every rank r of the group into a list of [n_r, K]. Row counts may differ. Collective.

    group: process group, or None for a single-rank job, which does not communicate.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [rows_nK]
    count = torch.tensor([len(rows_nK)], dtype=torch.int64, device=rows_nK.device)
    counts = all_gather_alike(count, group).flatten()
    padded = rows_nK.new_zeros((int(counts.max()), *rows_nK.shape[1:]))
    padded[: len(rows_nK)] = rows_nK
    return [part[:n] for part, n in zip(all_gather_alike(padded, group), counts.tolist(), strict=True)]


def all_gather_alike(rows_nK: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Gather the same number of rows from every rank of the group: [ranks, n, K]. Collective."""
    if group is None or dist.get_world_size(group) == 1:
        return rows_nK[None]
    world = dist.get_world_size(group)
    everyone = rows_nK.new_empty((world * len(rows_nK), *rows_nK.shape[1:]))
    dist.all_gather_into_tensor(everyone, rows_nK.contiguous(), group=group)
    return everyone.view(world, *rows_nK.shape)


def all_gather_shared(rows_nK: torch.Tensor, counts: list[int], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Gather like `all_gather_rows`, but without padding, which is better if a few ranks have many rows. Collective.

    Rows are first split evenly across ranks and then all-gathered, so no rank holds more than one copy of all rows.
    counts: number of rows on each rank.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [rows_nK]
    world, me, total = len(counts), _group_rank(group), sum(counts)
    share = -(-total // world)
    begins = [0, *accumulate(counts)]

    def common(rank: int, holder: int) -> int:
        """Return the number of rows that `rank` contributes to the share of rank `holder`."""
        first, last = begins[rank], begins[rank] + counts[rank]
        return max(0, min(last, (holder + 1) * share) - max(first, holder * share))

    mine = rows_nK.new_zeros((share, *rows_nK.shape[1:]))
    received, sent = [common(r, me) for r in range(world)], [common(me, r) for r in range(world)]
    dist.all_to_all_single(mine[: sum(received)], rows_nK.contiguous(), received, sent, group=group)
    return list(all_gather_alike(mine, group).flatten(0, 1)[:total].split(counts))


def all_gather_distinct(rows_nK: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[list[torch.Tensor], list[int]]:
    """Gather the distinct row sets of all ranks on the host. Returns the sets, and each rank's index into them.
    Collective.

    Only the first of several ranks with equal rows sends them, so a thousand replicas take the memory of one. If all
    ranks have equal rows, each sends only 16 bytes.
    """
    facts = torch.tensor([[int(digest(rows_nK)), len(rows_nK)]])
    marks = [(mark, n) for mark, n in all_gather_alike(facts, group)[:, 0].tolist()]
    numbers = {mark: n for n, mark in enumerate(dict.fromkeys(marks))}
    of = [numbers[mark] for mark in marks]
    if len(numbers) == 1:
        return [rows_nK], of
    firsts = [marks.index(mark) for mark in numbers]
    me = _group_rank(group)
    counts = [0] * len(marks)
    for rank in firsts:
        counts[rank] = marks[rank][1]
    everyone = all_gather_shared(rows_nK if counts[me] else rows_nK[:0], counts, group)
    return [everyone[r] for r in firsts], of


def _bytes_of(text: str) -> torch.Tensor:
    """Encode a string as uint8 [n, 1]. An empty string becomes a space."""
    return torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)[:, None]


def _text_of(raw: torch.Tensor) -> str:
    return raw.numpy().tobytes().decode().strip()


def all_gather_text(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """Gather one string from every rank over a host-side group, stripped of surrounding whitespace. Collective.

    A string that several ranks share is sent only once, plus 16 bytes from each rank.
    """
    parts, of = all_gather_distinct(_bytes_of(text), group)
    texts = [_text_of(part) for part in parts]
    return [texts[n] for n in of]


def broadcast_text(text: str, group: dist.ProcessGroup | None, device: torch.device | str = "cpu") -> str:
    """Broadcast a string from the first rank of a group, stripped of surrounding whitespace. Collective.

    The strings of other ranks are ignored.
    device: device of the group's collectives; "cpu" for a host-side group.
    """
    if group is None or dist.get_world_size(group) == 1:
        return text.strip()
    return _text_of(broadcast_rows(_bytes_of(text), group, device))


def broadcast_rows(
    rows_nK: torch.Tensor, group: dist.ProcessGroup | None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Broadcast any number of rows [n, ...] from the first rank of a group, and return them on the CPU. Collective.

    The dtype and row shape must be equal on all ranks. device: device of the group's collectives; "cpu" for a host-side
    group.
    """
    if group is None or dist.get_world_size(group) == 1:
        return rows_nK.cpu()
    rows_nK = rows_nK.to(device)
    size = torch.tensor([len(rows_nK)], device=device)
    dist.broadcast(size, group=group, group_src=0)
    if dist.get_group_rank(group, dist.get_rank()):
        rows_nK = rows_nK.new_empty(int(size), *rows_nK.shape[1:])
    if int(size):
        dist.broadcast(rows_nK, group=group, group_src=0)
    return rows_nK.cpu()


def gather_names(names: Iterable[str], group: dist.ProcessGroup | None) -> list[str]:
    """Gather the names of all ranks, sorted and without duplicates. Collective."""
    texts = set(all_gather_text("\n".join(sorted(names)), group))
    return sorted({name for text in texts for name in text.splitlines()})


def all_reduce(x: torch.Tensor, op: str, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-reduce by `sum`, `max` or `min` over the group, in place. Collective."""
    if group is not None and dist.get_world_size(group) > 1:
        operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        dist.all_reduce(x, op=operation, group=group)
    return x


def lexsort(keys_nK: torch.Tensor) -> torch.Tensor:
    """Return the indices that sort rows lexicographically, first column first: int64 [n]."""
    order = torch.arange(len(keys_nK))
    for column in reversed(range(keys_nK.shape[1])):
        order = order[torch.argsort(keys_nK[order, column], stable=True)]
    return order


def _row_bytes(values: torch.Tensor) -> int:
    return values.element_size() * (values[0].numel() if len(values) else int(torch.tensor(values.shape[1:]).prod()))


def _places(lengths_n: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the indices of the rows that belong to the items in `order`, within the rows of all items."""
    starts = torch.cumsum(lengths_n, 0) - lengths_n
    picked = lengths_n[order]
    offsets = torch.arange(int(picked.sum())) - torch.repeat_interleave(torch.cumsum(picked, 0) - picked, picked)
    return torch.repeat_interleave(starts[order], picked) + offsets


def select(table: Table, order: torch.Tensor) -> Table:
    """Return the table's items at the indices `order` (int64 [m]), in that order."""
    # Columns can share a lengths tensor, as the columns of a batch do. Their row indices are computed only once.
    distinct = {id(lengths): lengths for lengths in table.lengths.values()}
    picked = {key: (lengths[order], _places(lengths, order)) for key, lengths in distinct.items()}
    of = {name: picked[id(lengths)] for name, lengths in table.lengths.items()}
    return Table(
        table.keys_nK[order],
        {name: lengths for name, (lengths, _) in of.items()},
        {name: values[of[name][1].to(values.device)] for name, values in table.values.items()},
    )


def redistribute(
    table: Table,
    everyone: list[torch.Tensor],
    destinations: list[torch.Tensor],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Table:
    """Send each item to its destination, and return the received items, sorted by key. Collective.

    table: this rank's items, on the host. everyone: for each rank, its items' keys, followed by their lengths in each
    column, in `table.values` order: int64 [n_r, K + C]. destinations: for each rank, the group ranks that receive its
    items: int64 [n_r]. group: process group, or None for a single-rank job. device: device of the group's collectives.
    """
    world, me = len(everyone), _group_rank(group)
    if world == 1:
        return select(table, lexsort(table.keys_nK))
    names, n_keys = list(table.values), table.keys_nK.shape[1]
    widths = [_row_bytes(table.values[name]) for name in names]
    # Visit only ranks that receive items from this rank, because most ranks of a large job receive none.
    send_sizes, send = [0] * world, [torch.empty(0, dtype=torch.uint8)]
    for rank in torch.unique(destinations[me]).tolist():
        part = select(table, torch.nonzero(destinations[me] == rank).flatten())
        raw = [part.values[name].contiguous().view(-1).view(torch.uint8) for name in names]
        send_sizes[rank] = sum(map(len, raw))
        send += raw
    incoming = torch.nonzero(torch.cat(destinations) == me).flatten()
    rows = torch.cat(everyone)[incoming]
    of = torch.repeat_interleave(torch.arange(world), torch.tensor([len(part) for part in everyone]))[incoming]
    row_bytes = (rows[:, n_keys:] * torch.tensor(widths)).sum(1)
    sizes = torch.zeros(world, dtype=torch.int64).index_add_(0, of, row_bytes).tolist()
    inbox = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(inbox, torch.cat(send).to(device), sizes, send_sizes, group=group)
    received = _unpack(inbox.cpu(), rows, of, widths, table)
    return select(received, lexsort(received.keys_nK))


def _unpack(inbox: torch.Tensor, rows: torch.Tensor, of: torch.Tensor, widths: list[int], like: Table) -> Table:
    """Unpack the received bytes into one table.

    inbox: uint8, the bytes from all senders in rank order, with each sender's columns concatenated. rows: int64
    [n, K + C], keys and lengths of the received items, in the same order. of: int64 [n], the sender of each item.
    widths: bytes per row of each column. like: a table with the same columns.
    """
    names, n_keys = list(like.values), like.keys_nK.shape[1]
    parts = {name: [like.values[name][:0]] for name in names}
    at = 0
    for mine in rows.split(torch.unique_consecutive(of, return_counts=True)[1].tolist()):
        for column, name in enumerate(names):
            ref = like.values[name]
            size = int(mine[:, n_keys + column].sum()) * widths[column]
            # Viewing bytes as a wider dtype needs an aligned start, which the copy has.
            parts[name].append(inbox[at : at + size].clone().view(ref.dtype).view(-1, *ref.shape[1:]))
            at += size
    lengths = {name: rows[:, n_keys + column] for column, name in enumerate(names)}
    return Table(rows[:, :n_keys], lengths, {name: torch.cat(p) for name, p in parts.items()})


def exchange(table: Table, assign, group: dist.ProcessGroup | None, device: torch.device) -> tuple[Table, torch.Tensor]:
    """Move every item to the rank that `assign` returns for it. Collective.

    table: this rank's items, with columns in the same order on every rank. assign: function from the rows of all ranks
    [N, K + C], sorted by key, to group ranks, int64 [N]. Every rank calls `assign` with the same rows, so the plan
    needs no broadcast. group: process group, or None for a single-rank job. device: device of the group's collectives.

    Returns the items that this rank received and the rows [N, K + C] of all ranks, both sorted by key.
    """
    columns = [table.lengths[name][:, None] for name in table.values]
    parts = all_gather_rows(torch.cat([table.keys_nK, *columns], 1).to(device), group)
    rows = torch.cat(parts).cpu()
    everyone = list(rows.split([len(part) for part in parts]))
    order = lexsort(rows[:, : table.keys_nK.shape[1]])
    target = torch.empty(len(rows), dtype=torch.int64)
    target[order] = assign(rows[order])
    destinations = list(target.split([len(part) for part in everyone]))
    return redistribute(table, everyone, destinations, group, device), rows[order]
