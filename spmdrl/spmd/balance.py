"""Equal work for every rank: Karmarkar-Karp number partitioning, with nearly equal counts where that is even enough.

Source: N. Karmarkar, R. Karp, The differencing method of set partitioning, 1982 (multiway form: largest differencing).
"""

import heapq

import torch


def karmarkar_karp(costs: list[int], parts: int) -> list[list[int]]:
    """Split item indices into `parts` lists whose cost sums are close; the same answer for the same input.

    Counts differ by one at most, unless that leaves the largest sum more than 1% above the mean and another split is
    more even. Deterministic: ties are broken by position. Complexity O(n log n * parts).
    """
    if parts == 1:
        return [list(range(len(costs)))]
    # Items of similar cost start as one partial solution, one item a part: counts stay equal within one, and the
    # heap holds n / parts entries instead of n. An entry is keyed by its spread, largest first.
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
        # The heaviest part of one solution meets the lightest of the other.
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], ticket, merged))
        ticket += 1
    even = heap[0][2]
    if even[0][0] * parts * 100 > sum(costs) * 101:
        # Few items a part and a heavy tail: a part with a very long one must take fewer others. DAPO's 8,192 sequences
        # on 1,024 ranks: 1.10 of the mean, so 1.01.
        free = longest_first(costs, parts)
        if max(total for total, _ in free) < even[0][0]:
            even = free
    return [sorted(items) for _, items in even]


def longest_first(costs: list[int], parts: int) -> list[tuple[int, list[int]]]:
    """(sum, item indices) of each part when the costliest item left always goes to the lightest part (Graham, 1969)."""
    bins = [(0, part) for part in range(parts)]
    members: list[list[int]] = [[] for _ in range(parts)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, part = bins[0]
        members[part].append(i)
        heapq.heapreplace(bins, (total + costs[i], part))
    return [(total, members[part]) for total, part in sorted(bins, key=lambda b: b[1])]


def assign_balanced(costs_N: torch.Tensor, share_N: torch.Tensor, ranks: int) -> torch.Tensor:
    """Rank of each item so that every share (optimizer step) on its own is balanced over ranks: int64 [N].

    costs_N: int64 [N], tokens or any estimate of work. share_N: int64 [N], which optimizer step uses the item.
    """
    target = torch.zeros(len(costs_N), dtype=torch.int64)
    for share in share_N.unique(sorted=True).tolist():
        items = torch.nonzero(share_N == share).flatten()
        parts = karmarkar_karp(costs_N[items].tolist(), ranks)
        for rank, part in enumerate(parts):
            target[items[part]] = rank
    return target
