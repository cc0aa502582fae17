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
