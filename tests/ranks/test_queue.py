"""The prompt queue gives every position exactly once, whoever asks; ranks of one engine get the same ones."""

import time

import pytest

from spmdrl.spmd.queue import PromptQueue
from tests.ranks.harness import run_ranks

CASES = [(mode, n, want) for mode in ("queue", "static") for n in (0, 1, 7, 50) for want in (1, 3, 64)]


def drain(world):
    out = []
    for mode, n, want in CASES:
        queue = PromptQueue(world, n, f"{mode}/{n}/{want}", mode)
        taken = []
        assert queue.take(0) == [] and queue.take(-2) == []  # a full engine asks for nothing, and may ask again
        while batch := queue.take(want):
            assert len(batch) <= want
            taken.append(batch)
            if world.engine_index % 2:
                time.sleep(0.002)  # engines of different speed
        assert queue.take(want) == []
        out.append(taken)
    return out


@pytest.mark.parametrize(("n", "tp"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
def test_lockstep_queue_hands_out_every_position_once(n, tp):
    results = run_ranks(drain, n, rollout_tp=tp)
    engines = n // tp
    for case, (mode, size, _) in enumerate(CASES):
        for engine in range(engines):
            members = [results[r][case] for r in range(engine * tp, (engine + 1) * tp)]
            assert all(m == members[0] for m in members)  # batch for batch
        taken = [[p for batch in results[e * tp][case] for p in batch] for e in range(engines)]
        assert sorted(p for part in taken for p in part) == list(range(size))
        assert all(part == sorted(part) for part in taken)
        if mode == "static":
            assert taken == [list(range(e, size, engines)) for e in range(engines)]


def fast_and_slow(world):
    queue = PromptQueue(world, 40, "race", "queue")
    taken = 0
    while batch := queue.take(1):
        taken += len(batch)
        time.sleep(0.001 if world.rank == 0 else 0.05)
    return taken


def test_an_engine_that_ends_early_takes_more():
    fast, slow = run_ranks(fast_and_slow, 2)
    assert fast + slow == 40 and fast > slow
