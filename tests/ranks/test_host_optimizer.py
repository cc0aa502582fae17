"""`--policy.host-optimizer`: AdamW in host memory learns what Megatron's own on the device does, and is resumed.

A CPU is both sides of it. Copies that nobody waits for, and Megatron's own clipping of gradients on a GPU, are in
tests/ranks/test_fake_gpu.py.
"""

import shutil
from pathlib import Path

import pytest
import torch

from spmdrl.hub.folder import TINY
from tests.ranks.cases import small_model, synthetic_batch, update_models
from tests.ranks.harness import run_ranks
from tests.ranks.megatron_cases import open_models, weights_of
from tests.ranks.test_megatron_policy import mixture, sections

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
CASES = ["dense bfloat16", "dense float32", "mixture bfloat16", "dense bfloat16 beside TransformerEngine"]


def settings(case: str, host: bool) -> dict:
    base = sections("grpo")
    optimizer = base["optimizer"] | {"weight_decay": 10.0}
    policy = base["policy"] | {"host_optimizer": host}
    return base | {"model": {"dtype": case.split()[1]}, "policy": policy, "optimizer": optimizer}


def trained(world, cases: dict, root: str) -> dict:
    """Returns (case, kind of optimizer) -> weights after step 3, also when step 2 was saved and loaded, by kind."""
    from megatron.core.optimizer import distrib_optimizer

    out = {}
    for case, folder in cases.items():
        folders = dict.fromkeys(("policy", "reference"), folder)
        # Its optimizer is told from torch's by this alone where steps are counted.
        distrib_optimizer.HAVE_APEX_OR_TE = "TransformerEngine" in case
        kinds = (True,) if "TransformerEngine" in case else (False, True)
        for host in kinds:
            cfg, here, models = open_models(world, {}, settings(case, host), folders, "megatron")
            for _ in range(2):
                update_models(cfg, here, models, synthetic_batch())
            held = copies(models.policy.trainer)
            models.policy.save(Path(root) / case / str(host))
            update_models(cfg, here, models, synthetic_batch())
            out[case, host] = {"held": held, "whole": weights_of(here, models)}
        for host in kinds:
            for source in kinds:
                cfg, here, models = open_models(world, {}, settings(case, host), folders, "megatron")
                models.policy.load(Path(root) / case / str(source))
                loaded = weights_of(here, models)
                update_models(cfg, here, models, synthetic_batch())
                out[case, host][source] = loaded, weights_of(here, models)
    return out


def copies(trainer) -> tuple[int, int]:
    """Counts elements that Megatron's optimizers hold beside the weights: (their float32 copies, in HostAdamW)."""
    from spmdrl.policy.megatron.host_adamw import HostAdamW

    own = sum(
        p.numel()
        for each in trainer._chained()
        for group in each.shard_fp32_from_float16_groups
        for p in group
        if p is not None
    )
    hosts = [each for each in trainer._optimizers() if isinstance(each, HostAdamW)]
    host = sum(state["master_param"].numel() for each in hosts for state in each.state.values())
    return own, host


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("host_optimizer")
    folders = {"dense": small_model(root / "dense"), "mixture": mixture(root / "mixture", 7)}
    for folder in folders.values():
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / name, folder)
    cases = {case: folders[case.split()[0]] for case in CASES}
    return run_ranks(trained, 2, cases, str(root / "saved"), limit=300)


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def close(one: dict, other: dict, case: str) -> bool:
    """Compares all but the last bits of a few: the optimizer on the host is torch's fused AdamW, Megatron's is not."""
    off = torch.cat([((one[name] - other[name]).abs() / other[name].abs().clamp(min=0.1)).flatten() for name in other])
    return bool(off.max() <= (1e-6 if "float32" in case else 2**-7) and (off > 1e-6).float().mean() < 0.01)


@pytest.mark.parametrize("case", CASES[:3])
def test_host_optimizer_learns_what_megatrons_own_does(case, results):
    assert len(results[0][case, True]["whole"]) > 10
    assert close(results[0][case, False]["whole"], results[0][case, True]["whole"], case)


@pytest.mark.parametrize("case", CASES)
def test_resume_with_the_optimizer_on_either_side(case, results):
    """A run that stays on its side resumes to the bit."""
    found = results[0]
    for host in (True,) if "TransformerEngine" in case else (False, True):
        for source in (True,) if "TransformerEngine" in case else (False, True):
            loaded, after = found[case, host][source]
            equal = same if host == source else lambda one, other: close(one, other, case)
            assert equal(after, found[case, host]["whole"]), (host, source)
            assert not close(loaded, after, case)


def test_device_holds_no_float32_weights_beside_those_of_the_host(results):
    for rank in results:
        own, host = rank["dense bfloat16", False]["held"]
        assert own > 1000 and host == 0
        assert rank["dense bfloat16", True]["held"] == (0, own)
