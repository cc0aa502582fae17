"""Groups that an engine makes: none is split off the run's own communicator, which would take all ranks of the run.

With a device bound to the default group, as a run on GPUs has it, torch splits NCCL communicators. Here gloo's group
has one bound, and what each new group would have been split off is noted; that NCCL then waits is not shown.
"""

from contextlib import contextmanager, suppress
from types import SimpleNamespace

import torch
import torch.distributed as dist

from spmdrl.engines.sglang.engine import SGLangEngine
from spmdrl.engines.sglang.transport import Broadcast
from spmdrl.engines.vllm.start import world_of
from tests.ranks.cases import config
from tests.ranks.harness import run_ranks

CPU = torch.device("cpu", 0)


@contextmanager
def noted():
    """Notes the bound device of the default group at the moments when groups are made."""
    c10d = dist.distributed_c10d
    default, make, seen = c10d._get_default_group(), c10d._new_process_group_helper, []

    def helper(*args, **kwargs):
        seen.append(default.bound_device_id)
        return make(*args, **kwargs)

    c10d._new_process_group_helper = helper
    default.bound_device_id = CPU
    try:
        yield seen
        seen.append(default.bound_device_id)
    finally:
        c10d._new_process_group_helper, default.bound_device_id = make, None


def groups(world):
    """Makes the groups of vLLM's world over all ranks, of an SGLang engine of two ranks, and of its broadcast."""
    with noted() as vllm, world_of(tuple(range(world.size))):
        for rank in range(world.size):
            dist.new_group([rank])
    engine = SGLangEngine.__new__(SGLangEngine)
    engine.world = world
    with noted() as sglang:
        made = engine._engine_group(config(rollout={"tp": 2}))
    process = SimpleNamespace(send=lambda *a, **k: None, answer=lambda: None)
    with noted() as broadcast:
        Broadcast(0, "gloo", 30.0)._join(process)
    # torch refuses to go on on a CPU.
    with noted() as plain, suppress(ValueError):
        dist.new_group([0, 1])
    return vllm, sglang, broadcast, plain, dist.get_world_size(made)


def test_layout_groups_of_engines_are_apart_from_the_runs_own():
    for vllm, sglang, broadcast, plain, size in run_ranks(groups, 2, rollout_tp=2):
        assert vllm == [None, None, CPU] and sglang == [None, CPU] and broadcast == [None, CPU] and size == 2
        # A group that is made without further ado would have been split off: the check can see it.
        assert plain == [CPU, CPU]
