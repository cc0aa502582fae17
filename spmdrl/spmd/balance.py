"""Balances work across ranks by Karmarkar-Karp number partitioning, with nearly equal item counts if possible.

Source: N. Karmarkar, R. Karp, The differencing method of set partitioning, 1982 (multiway form: largest differencing).
"""

import heapq

import torch

CHEAPEST, FEW = 4, 32
"""`with_swaps` swaps items with the CHEAPEST lowest-cost parts, and only if parts have at most FEW items on average."""


def karmarkar_karp(costs: list[int], parts: int) -> list[list[int]]:
    """Partition item indices into `parts` lists with nearly equal total costs.

    Item counts differ by more than one only if the maximum total cost would otherwise be more than 1% above the mean
    and another partition is more even. Deterministic: ties are broken by position. Complexity: O(n log n * parts).
    """
    if parts == 1:
        return [list(range(len(costs)))]
    # Items of similar cost start as one partial solution with one item in each part, so item counts differ by at most
    # one and the heap holds n / parts entries instead of n. Entries are keyed by their spread, largest first.
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for ticket, start in enumerate(range(0, len(order), parts)):
        bins = [(costs[i], [i]) for i in order[start : start + parts]]
        bins += [(0, []) for _ in range(parts - len(bins))]
        heap.append((bins[-1][0] - bins[0][0], ticket, bins))
    heapq.heapify(heap)
    if not heap:
        return [[] for _ in range(parts)]
    ticket = len(heap)
    while len(heap) > 1:
        _, _, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        # The heaviest part of one solution is merged with the lightest part of the other.
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], ticket, merged))
        ticket += 1
    even = with_swaps([items for _, items in heap[0][2]], costs)
    if largest(even, costs) * parts * 100 > sum(costs) * 101:
        # If parts have few items and some items are very long, a part with such an item must take fewer other items.
        # For DAPO's 8,192 sequences on 1,024 ranks this reduces the maximum total cost from 1.10 to at most 1.01 times
        # the mean.
        free = with_swaps([items for _, items in longest_first(costs, parts)], costs)
        if largest(free, costs) < largest(even, costs):
            even = free
    return [sorted(items) for items in even]


def largest(parts: list[list[int]], costs: list[int]) -> int:
    """Return the maximum total cost over all parts, or 0 if there are none."""
    return max((sum(costs[i] for i in part) for part in parts), default=0)


def with_swaps(parts: list[list[int]], costs: list[int]) -> list[list[int]]:
    """Even out total costs by swapping items of the costliest part for items of cheap parts, and return the new parts.

    Each part keeps its item count. If parts have more than FEW items on average, they are returned unchanged.

    Karmarkar-Karp is uneven if parts have few items: for 256 SFT samples on 32 ranks the maximum total cost is 1.024
    times the mean, and 1.001 times after swapping. Swapping stops when the maximum is within 0.1% of the mean, when no
    swap reduces it, or after two swaps per part.
    """
    if len(costs) > FEW * len(parts):
        return parts
    sums, parts = [sum(costs[i] for i in part) for part in parts], [list(part) for part in parts]
    for _ in range(2 * len(parts)):
        *order, top = sorted(range(len(parts)), key=lambda part: (sums[part], part))
        if sums[top] * len(parts) * 1000 <= sum(sums) * 1001:
            break
        best: tuple[int, int, int, int] | None = None
        for part in order[:CHEAPEST]:
            gap = sums[top] - sums[part]
            for a in parts[top]:
                for b in parts[part]:
                    # The best swap moves half of the gap. Moving the whole gap gains nothing.
                    left = abs(gap - 2 * (costs[a] - costs[b]))
                    if left < gap and (best is None or left < best[0]):
                        best = left, part, a, b
            if best:
                break
        if not best:
            break
        _, part, a, b = best
        parts[top][parts[top].index(a)], parts[part][parts[part].index(b)] = b, a
        sums[top] -= costs[a] - costs[b]
        sums[part] += costs[a] - costs[b]
    return parts


def longest_first(costs: list[int], parts: int) -> list[tuple[int, list[int]]]:
    """Assign items, costliest first, to the cheapest part so far (Graham, 1969). Returns (cost, items) per part."""
    bins = [(0, part) for part in range(parts)]
    members: list[list[int]] = [[] for _ in range(parts)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, part = bins[0]
        members[part].append(i)
        heapq.heapreplace(bins, (total + costs[i], part))
    return [(total, members[part]) for total, part in sorted(bins, key=lambda b: b[1])]


def assign_groups(
    costs_N: torch.Tensor, share_N: torch.Tensor, group_N: torch.Tensor, common_N: torch.Tensor, ranks: int
) -> torch.Tensor:
    """Assign like `assign_balanced`, but count `common_N` (int64 [N]) once for all items of a group on one rank.

    Either all groups stay together or all items are assigned individually, whichever gives the busiest rank less work.
    """
    alone = assign_balanced(costs_N, share_N, ranks)
    together = assign_units(costs_N, share_N, group_N, common_N, ranks)
    return min(together, alone, key=lambda rank_N: _busiest(rank_N, costs_N, share_N, group_N, common_N, ranks))


def _busiest(rank_N, costs_N, share_N, group_N, common_N, ranks: int) -> int:
    """Sum the busiest rank's work over all shares. A rank counts the common work of a group once."""
    pairs, place_N = torch.unique(torch.stack([share_N * ranks + rank_N, group_N], 1), dim=0, return_inverse=True)
    common = torch.zeros(len(pairs), dtype=torch.int64).scatter_reduce_(0, place_N, common_N, "amax")
    slots = (int(share_N.max()) + 1) * ranks if len(share_N) else 0
    work = torch.zeros(slots, dtype=torch.int64).index_add_(0, share_N * ranks + rank_N, costs_N - common_N)
    work.index_add_(0, pairs[:, 0], common)
    return int(work.view(-1, ranks).amax(1).sum()) if slots else 0


def assign_balanced(costs_N: torch.Tensor, share_N: torch.Tensor, ranks: int) -> torch.Tensor:
    """Assign items to ranks, int64 [N], so that each share (optimizer step) is balanced separately across ranks.

    costs_N: int64 [N], tokens or another estimate of work. share_N: int64 [N], the optimizer step that uses the item.
    """
    target = torch.zeros(len(costs_N), dtype=torch.int64)
    for share in share_N.unique(sorted=True).tolist():
        items = torch.nonzero(share_N == share).flatten()
        for rank, part in enumerate(karmarkar_karp(costs_N[items].tolist(), ranks)):
            target[items[part]] = rank
    return target


def assign_units(
    costs_N: torch.Tensor, share_N: torch.Tensor, unit_N: torch.Tensor, common_N: torch.Tensor, ranks: int
) -> torch.Tensor:
    """Assign like `assign_balanced`, but keep items of a share with the same `unit_N` (int64 [N]) on one rank.

    common_N: int64 [N], the part of an item's cost that is counted once per unit.
    """
    pairs, unit_N = torch.unique(torch.stack([share_N, unit_N], 1), dim=0, return_inverse=True)
    own = torch.zeros(len(pairs), dtype=torch.int64).index_add_(0, unit_N, costs_N - common_N)
    common = torch.zeros(len(pairs), dtype=torch.int64).scatter_reduce_(0, unit_N, common_N, "amax")
    return assign_balanced(own + common, pairs[:, 0], ranks)[unit_N]
