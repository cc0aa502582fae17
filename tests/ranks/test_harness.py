"""The harness itself: results in rank order, failures and hangs by name."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import RankError, run_ranks


def describe(world, text):
    x = torch.tensor([float(world.rank + 1)])
    dist.all_reduce(x)
    return text, world.rank, world.size, world.dp_mesh.shape, world.engine_count, world.engine_tp_rank, x.item()


@pytest.mark.parametrize(("n", "tp", "replicate"), [(1, 1, 1), (2, 1, 1), (4, 2, 2)])
def test_results_come_back_in_rank_order(n, tp, replicate):
    got = run_ranks(describe, n, "hello", rollout_tp=tp, dp_replicate=replicate)
    total = float(n * (n + 1) // 2)
    assert got == [("hello", r, n, (replicate, n // replicate), n // tp, r % tp, total) for r in range(n)]
    assert not dist.is_initialized()


def fail_on_one(world, how):
    if world.rank == 1:
        if how == "raise":
            raise KeyError("what went wrong")
        if how == "die":
            os._exit(7)
        time.sleep(60)
    if how == "hang":
        return None
    return dist.barrier()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rank 1 of 2: KeyError: 'what went wrong'[\s\S]*in fail_on_one"),
        ("die", "rank 1 of 2 died with exit code 7"),
        ("hang", r"rank\(s\) 1 of 2 still running"),
    ],
)
def test_a_rank_that_fails_or_hangs_is_named(how, message):
    began = time.monotonic()
    with pytest.raises(RankError, match=message):
        run_ranks(fail_on_one, 2, how, limit=4)
    assert time.monotonic() - began < 30
