"""The host waits for the GPU a few times in a step, and never once per micro-batch (tests/contract/fake_waits.py)."""

import os
from collections import Counter
from datetime import timedelta

import pytest
import torch

from spmdrl.config.schema import ParallelConfig
from spmdrl.policy import heads
from spmdrl.policy.learner import Learner
from spmdrl.spmd.mesh import world_from_group
from spmdrl.train import train
from tests.contract.fake_cuda import FakeCuda
from tests.contract.fake_labels import CUDA
from tests.ranks.demo import open_demo
from tests.ranks.harness import run_ranks

BASE = dict(
    run={"steps": 1},
    rollout={"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6},
    eval={"every": 0},
    data={"limit": 16},
    algo={"updates_per_step": 1, "kl_coef": 0.05, "positive_coef": 0.1},
)
FSDP, MEGATRON = "fsdp/policy.py:gradient_norm", "megatron/training.py:norm"
MOST: dict[str, dict[str, int]] = {
    "read": {"spmd/peers.py:most": 1, "spmd/copies.py:_arrived": 1},
    "gradient": {},
    "_optimizer_step": {FSDP: 1, MEGATRON: 1, "policy/learner.py:_optimizer_step": 1},
}
"""Method of a learner -> the places of a call where the host may wait, and how often.

`most`: ranks agree on the number of micro-batches. `_arrived`: the last micro-batch's numbers. An optimizer step reads
the gradient's norm and the loss."""
CASES: dict[str, tuple[int, dict, dict]] = {
    "shared prompts, a likelihood ratio of sequences": (
        1,
        dict(policy={"share_prompts": True, "max_tokens_per_microbatch": 40}, algo={"loss": "gspo"}),
        {},
    ),
    "packed, a critic": (1, dict(policy={"share_prompts": False}, algo={"preset": "ppo"}), {}),
    "adapters, sharded": (2, dict(lora={"rank": 4}), {}),
    "megatron, two-way tensor parallel": (2, dict(policy={"backend": "megatron"}), {"tp": 2}),
}


def waits_of(world, folder, sections, parallel):
    """Trains a step on the fake GPU; returns for each call of a method its micro-batches, and where the host waited.

    Also returns the number of plans that the step made for its forwards.
    """
    os.environ["SPMDRL_KERNELS"] = "torch"
    # The fake GPU then refuses operations for which CUDA has no deterministic kernel.
    torch.use_deterministic_algorithms(True)
    values = {name: BASE.get(name, {}) | sections.get(name, {}) for name in BASE.keys() | sections.keys()}
    values["policy"] = {"max_tokens_per_microbatch": 24} | values.get("policy", {})
    found: list[tuple[str, int, Counter]] = []
    plans: list[int] = []
    with FakeCuda() as gpu:
        world = world_from_group(ParallelConfig(**parallel), 1, CUDA, world.rank, timedelta(seconds=100))
        run = open_demo(world, folder, values | {"parallel": parallel})
        micros: list[int] = []

        def counted(name, inner):
            def call(self, *args, **kwargs):
                before = len(gpu.waits)
                out = inner(self, *args, **kwargs)
                micros[:] = [len(out)] if name == "microbatches" else micros
                found.append((name, micros[0], Counter(place for _, place in gpu.waits[before:])))
                return out

            return call

        for owner, name in (
            (Learner, "microbatches"),
            (Learner, "read"),
            (type(run.models.policy), "gradient"),
            (Learner, "_optimizer_step"),
        ):
            setattr(owner, name, counted(name, getattr(owner, name)))
        module, name = heads, "plan_forward"
        if values["policy"].get("backend") == "megatron":
            from spmdrl.policy.megatron import attention

            module, name = attention, "make_pack"
        make = getattr(module, name)
        setattr(module, name, lambda *args: plans.append(1) or make(*args))
        train(run)
        run.close()
    return found, len(plans)


@pytest.mark.parametrize("case", CASES)
def test_waits_of_a_step_do_not_grow_with_micro_batches(tmp_path, case):
    n, sections, parallel = CASES[case]
    ranks = run_ranks(waits_of, n, str(tmp_path), sections, parallel, parallel=parallel, limit=200.0)
    for name, micros, waits in (call for calls, _ in ranks for call in calls if call[0] in MOST):
        assert waits <= Counter(MOST[name]) and (micros > 2 or name != "gradient"), (name, micros, waits)
        assert name != "_optimizer_step" or waits.total() == 2
    for calls, plans in ranks:
        assert {name for name, *_ in calls} >= MOST.keys()
        # The first pass checks the model. All others run the same micro-batches, and so share their plans.
        first, *passes = [micros for name, micros, _ in calls if name == "microbatches"]
        assert len(passes) > 1 and set(passes) == {passes[0]} and plans == first + passes[0]
