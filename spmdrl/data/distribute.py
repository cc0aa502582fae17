"""Distributes a batch's episodes over ranks and optimizer steps, and gathers rows from all ranks."""

import torch

from spmdrl.data.batch import KEYS, Batch, from_table, to_table
from spmdrl.spmd.balance import assign_balanced, assign_groups, assign_units
from spmdrl.spmd.exchange import exchange, lexsort, select
from spmdrl.spmd.payload import fetch, names_of, numbers_of
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.world import World

SHOWN = "shown"
"""Column of a travelling table with the names of each sequence's images, int64 [images, 2]."""


def balance(batch: Batch, world: World) -> Batch:
    """Balance the work of every optimizer step across data positions (`World.holders`). Collective over the world.

    Every sequence must be in exactly one rank's batch. All ranks of a data position return the same share of the
    sequences; ranks without a data position return an empty batch. All paths of an episode go to the same data
    position. `seq["update"]` is the optimizer step that uses a sequence, and `seq["work"]` (int64) its cost in that
    step. Both are computed from the data, and only the cost may be an estimate (law 2). If prompts are shared,
    `seq["common"]` (int64) is the part of the work that a rank does once for all samples of a prompt. If the batch has
    `seq["unit"]`, all sequences with the same `seq["position"]` go to the same data position.
    """
    return distribute(batch, world.holders, Peers(world.group, world.device))


def distribute(batch: Batch, holders: torch.Tensor, peers: Peers) -> Batch:
    """Balance a batch like `balance`, over the ranks of a group. Collective.

    holders: int64 [data positions, copies], the group ranks that receive each data position's share. Images travel once
    to each rank that needs them; either all ranks' batches have images, which may be empty, or none has.
    """
    positions, copies = holders.shape
    table = to_table(batch)
    if batch.images is not None:
        table.lengths[SHOWN] = torch.tensor([len(row) for row in batch.images], dtype=torch.int64)
        table.values[SHOWN] = numbers_of([payload.name for row in batch.images for payload in row])
    # Every rank receives all keys, so all ranks compute the same plan if these columns are among the keys.
    shared, bound = "common" in batch.seq, "unit" in batch.seq
    seq = batch.seq | batch.identity
    plan = [seq[name] for name in ("paths", "update", "work", *(["common"] if shared else []))]
    table.keys_nK = torch.cat([table.keys_nK, torch.stack(plan, 1)], 1)
    if copies > 1:
        # Each row is repeated for every rank that receives it. Sorting by keys keeps these copies adjacent.
        table = select(table, torch.arange(len(batch)).repeat_interleave(copies))

    def assign(rows: torch.Tensor) -> torch.Tensor:
        place, _, path, paths, step, cost, *rest = rows[::copies, : len(KEYS) + len(plan)].unbind(1)
        begins = path % paths == 0
        episode, first = torch.cumsum(begins, 0) - 1, torch.nonzero(begins).flatten()
        position, share = place[first], step[first]
        work = torch.zeros_like(share).index_add_(0, episode, cost)
        common = rest[0][first] if shared else torch.zeros_like(work)
        if bound:
            target = assign_units(work, share, position, common, positions)
        elif shared:
            target = assign_groups(work, share, position, common, positions)
        else:
            target = assign_balanced(work, share, positions)
        return holders[target[episode]].flatten()

    received, _ = exchange(table, assign, peers.group, peers.device)
    out = from_table(received)
    if batch.images is not None:
        held = {payload.name: payload for row in batch.images for payload in row}
        rows = [names_of(part) for part in received.values[SHOWN].split(received.lengths[SHOWN].tolist())]
        found = fetch(held, list(dict.fromkeys(name for row in rows for name in row)), peers)
        out.images = [tuple(found[name] for name in row) for row in rows]
    return out


def assign_updates(batch: Batch, updates: int, prompts: int, order: list[int]) -> Batch:
    """Assign all samples of a prompt to one optimizer step; each step gets the same number of prompts, in `order`.

    order: permutation of the positions 0 .. prompts - 1, keyed by (seed, step) and the same on every rank. Replayed
    sequences have positions from `prompts` upwards; these are taken modulo `prompts`.
    """
    step_of = torch.zeros(prompts, dtype=torch.int64)
    step_of[torch.tensor(order)] = torch.arange(prompts) * updates // prompts
    batch.seq["update"] = step_of[batch.seq["position"] % prompts]
    return batch


def gather_rows(
    batch: Batch, seq_n: torch.Tensor, columns_nK: torch.Tensor, peers: Peers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather numeric rows from all ranks, in the sample order of their sequences. Collective.

    seq_n: int64 [n], for each row the index of its sequence in `batch`, in ascending order. Rows of one sequence keep
    their order. columns_nK: float64 [n, K].

    Returns the rows of all ranks, float64 [N, K], the same on every rank, and the indices of this rank's rows among
    them, int64 [n].
    """
    keys = batch.keys[seq_n].double()
    rows = peers.rows(torch.cat([keys, columns_nK.double()], 1))
    start = sum(len(part) for part in rows[: peers.index])
    everyone = torch.cat([part.cpu() for part in rows])
    order = lexsort(everyone[:, : len(KEYS)].long())
    where = torch.empty(len(everyone), dtype=torch.int64)
    where[order] = torch.arange(len(everyone))
    return everyone[order, len(KEYS) :], where[start : start + len(seq_n)]
