"""Equal work for every rank: Karmarkar-Karp number partitioning with nearly equal counts.

Source: N. Karmarkar, R. Karp, The differencing method of set partitioning, 1982 (multiway form: largest differencing).
"""

import heapq

import torch


def karmarkar_karp(costs: list[int], parts: int) -> list[list[int]]:
    """Split item indices into `parts` lists whose cost sums are close; the same answer for the same input.

    Deterministic: ties are broken by position. Complexity O(n log n * parts).
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
    return [sorted(items) for _, items in heap[0][2]]


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
