"""Megatron is made ready for the device that ranks work on, not for the one that the machine has."""

import sys
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


def required(world, gpus: bool, backend: str):
    """Returns (CPU stand-in is there, routers have a product of TransformerEngine's, latent attention relies on it)."""
    torch.cuda.is_available = lambda: gpus
    dist.get_backend = lambda group=None: backend
    from spmdrl.policy.megatron import cpu
    from spmdrl.policy.megatron.model import require

    require()
    routers = sys.modules["megatron.core.transformer.moe.moe_utils"]
    latent = sys.modules["megatron.core.transformer.multi_latent_attention"]
    assert (routers.torch is cpu.STAND_IN) is (latent.torch is cpu.STAND_IN)
    return routers.torch is cpu.STAND_IN, routers.te_general_gemm is not None, latent.HAVE_TE


@pytest.mark.parametrize("gpus", [False, True])
def test_ranks_on_cpus_get_the_stand_in_whatever_the_machine_has(gpus):
    assert run_ranks(required, 1, gpus, "gloo") == [(True, False, False)]


def test_ranks_on_gpus_have_what_megatron_lacks_without_transformer_engine():
    """Without it the first router ends with a NameError, and latent attention with a TypeError."""
    assert run_ranks(required, 1, True, "nccl") == [(False, False, False)]


def halves(world) -> dict:
    """Gives each half of the ranks Megatron's groups of its own, as on GPUs; returns what this rank sees of them."""
    from spmdrl.policy.megatron import ranks, repairs
    from spmdrl.policy.megatron.model import require

    repairs.on_gpus = lambda: True
    require()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers

    both = [dist.new_group(half) for half in ([0, 1], [2, 3])]
    place = ranks.over(both[world.rank // 2])
    # One half makes more groups than the other.
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    for _ in range(2 - world.rank // 2):
        parallel_state.destroy_model_parallel()
        with ranks.making_groups(place):
            parallel_state.initialize_model_parallel(**{sizes[world.rank // 2]: 2}, order="tp-cp-ep-dp-pp")
    seen = parallel_state.torch.distributed
    numbers = [None] * seen.get_world_size()
    seen.all_gather_object(numbers, world.rank)
    seen.barrier()
    tp, pp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
    everyone, total = dist.new_group(), torch.ones(1)
    dist.all_reduce(total, group=everyone)
    return dict(
        tp=dist.get_process_group_ranks(tp),
        pp=dist.get_process_group_ranks(pp),
        numbers=numbers,
        own=seen.get_world_size(tp),
        total=total.item(),
        replaced=[parallel_state.torch is ranks.STAND_IN, layers.torch is torch],
    )


def test_ranks_of_one_role_make_groups_without_the_others():
    one, two = {"own": 2, "total": 4.0, "replaced": [True, True]}, {"own": 1, "total": 4.0, "replaced": [True, True]}
    assert run_ranks(halves, 4) == [
        *({"tp": [0, 1], "pp": [rank], "numbers": [0, 1]} | one for rank in (0, 1)),
        *({"tp": [rank], "pp": [2, 3], "numbers": [2, 3]} | two for rank in (2, 3)),
    ]
