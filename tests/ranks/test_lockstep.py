"""Law 1: the recorder names file and line of a rank that went elsewhere, and is quiet on a right program."""

import pytest
import torch
import torch.distributed as dist

from spmdrl.session.transfer import Transfer
from spmdrl.spmd.exchange import all_gather_rows, all_gather_text, all_reduce
from spmdrl.spmd.lockstep import Lockstep, LockstepError
from spmdrl.spmd.queue import PromptQueue
from tests.ranks.cases import build_policy, config, synthetic_batch, update_once
from tests.ranks.harness import run_ranks


def line_of(text: str) -> int:
    """Finds the line of this file that ends in a marker."""
    with open(__file__, encoding="utf-8") as f:
        return next(i for i, line in enumerate(f, 1) if line.rstrip().endswith(f"# {text}"))


def diverge(world, how):
    x = torch.ones(3)
    with Lockstep(world.store, timeout=3.0) as recorder:
        dist.all_reduce(x)
        all_reduce(x, "sum", dist.group.WORLD)
        try:
            if how == "branch":
                if world.rank == 1:
                    dist.all_reduce(x)  # mark: wrong branch
                else:
                    dist.all_reduce(x)  # mark: right branch
            elif how == "operation":
                if world.rank == 1:
                    dist.all_gather_into_tensor(torch.empty(world.size * 3), x)  # mark: gather
                else:
                    dist.all_reduce(x)  # mark: reduce
            elif how == "shape":
                dist.all_reduce(x[: 2 + world.rank // 2])  # mark: shape
            elif how == "helper":
                if world.rank == 1:
                    all_reduce(x, "sum", dist.group.WORLD)  # mark: helper wrong
                else:
                    all_reduce(x, "sum", dist.group.WORLD)  # mark: helper right
            elif how == "missing" and world.rank != 1:
                dist.all_reduce(x)  # mark: missing
            return None
        except LockstepError as error:
            return str(error), list(recorder.history)


@pytest.mark.parametrize(
    ("how", "marks"),
    [
        ("branch", ("right branch", "wrong branch", "right branch")),
        ("operation", ("reduce", "gather", "reduce")),
        ("shape", ("shape", "shape", "shape")),
        ("helper", ("helper right", "helper wrong", "helper right")),
        ("missing", ("missing", None, "missing")),
    ],
)
def test_lockstep_recorder_names_the_line_on_every_rank(how, marks):
    results = run_ranks(diverge, 3, how)
    for rank, result in enumerate(results):
        if how == "missing" and rank == 1:
            assert result is None  # it went on; the others name it
            continue
        message, history = result
        assert message.startswith("ranks differ at collective 2 of this group")
        lines = {int(line.split()[1][:-1]): line for line in message.splitlines()[1:]}
        assert sorted(lines) == [0, 1, 2]
        for r, mark in enumerate(marks):
            if mark is None:
                assert lines[r].endswith("did not come within 3 s")
            else:
                assert f"ranks/test_lockstep.py:{line_of('mark: ' + mark)}" in lines[r]
        if how == "operation":
            assert "allgather" in lines[1] and "allreduce" in lines[0]
        if how == "shape":
            assert "(2,)" in lines[0] and "(2,)" in lines[1] and "(3,)" in lines[2]
        assert len(history) == 3


def right_program(world):
    """Runs a step: exchange, queue, FSDP update with a rank that has nothing, gather, agreement on the host."""
    cfg = config(
        # In groups by layer, as a large model is.
        policy={"max_tokens_per_microbatch": 40, "gather": "layers"},
        algo={"kl_coef": 0.1},
        run={"lockstep_debug": True},
        rollout={"tp": world.rollout_mesh["tp"].size()},
    )
    policy, reference = build_policy(cfg, world), build_policy(cfg, world, trainable=False)
    with Lockstep(world.store, timeout=20.0) as recorder:
        # Few enough sequences that some rank runs the stand-in while others run real ones.
        update_once(cfg, world, policy, reference, synthetic_batch(prompts=1, samples=3))
        assert Transfer(world, policy, None, torch.float32, 1 << 16).push(0).bytes == 0
        all_gather_text("x" * world.rank, world.host_group)
        all_gather_rows(torch.zeros(world.rank, 2), dist.group.WORLD)
        queue = PromptQueue(world, 9, "right", "queue")
        # Engines take as often as they like: the group that decides is the engine's own.
        while queue.take(1 + world.engine_index):
            pass
        dist.barrier(group=world.host_group)
    return recorder.history, dict(recorder.counts)


@pytest.mark.parametrize(("n", "tp", "replicate"), [(2, 1, 1), (4, 2, 2)])
def test_lockstep_recorder_is_quiet_on_a_right_program(n, tp, replicate):
    results = run_ranks(right_program, n, rollout_tp=tp, dp_replicate=replicate)
    for history, counts in results:
        # It has seen FSDP's own collectives, at the line of the model that waits for them.
        assert sum("allgather" in h for h in history) > 10
        assert sum("reduce_scatter" in h for h in history) >= 4
        assert len(counts) >= 2
