"""`--policy.liger`: where its kernels are taken, and where they are refused; numbers are tested in tests/gpu
and, with a stand-in, in tests/ranks/test_self_check.py."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from spmdrl.config.checks import check
from spmdrl.config.fields import ConfigError
from spmdrl.config.schema import Config
from spmdrl.policy.fsdp.layers import use_liger

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def model(kind: str):
    return SimpleNamespace(config=SimpleNamespace(model_type=kind), modules=list)


@pytest.fixture
def patched(monkeypatch):
    """Returns the models on which a stand-in of Liger, which knows llama and mixtral, was applied."""
    done, find = [], importlib.util.find_spec
    stand_in: Any = ModuleType("liger_kernel.transformers")
    stand_in.monkey_patch = SimpleNamespace(
        MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": None, "mixtral": None},
        _apply_liger_kernel_to_instance=lambda model, **losses: done.append((model.config.model_type, losses)),
    )
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stand_in)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "liger_kernel" or find(name))
    return done


def test_liger_is_taken_by_default_where_it_is_installed_in_16_bits_on_a_gpu(patched, monkeypatch):
    for device, dtype in ((CPU, torch.bfloat16), (GPU, torch.float32), (torch.device("meta"), torch.bfloat16)):
        use_liger(model("llama"), "auto", device, dtype)
    use_liger(model("mixtral"), "auto", GPU, torch.bfloat16)
    use_liger(model("llama"), "off", GPU, torch.bfloat16)
    assert patched == []
    use_liger(model("llama"), "auto", GPU, torch.bfloat16)
    use_liger(model("mixtral"), "on", GPU, torch.float32)
    no_losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert patched == [("llama", no_losses), ("mixtral", no_losses)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    use_liger(model("llama"), "auto", GPU, torch.bfloat16)
    assert len(patched) == 2


def test_liger_is_refused_on_a_cpu_and_for_unknown_models(patched):
    with pytest.raises(ValueError, match="--policy.liger on: Liger's kernels need a GPU"):
        use_liger(model("llama"), "on", CPU, torch.float32)
    with pytest.raises(ValueError, match="no kernels for bloom; it has some for llama, mixtral"):
        use_liger(model("bloom"), "on", GPU, torch.float32)


@pytest.mark.parametrize(
    "backend, says", [("fsdp", "pip install liger-kernel"), ("megatron", "needs --policy.backend fsdp")]
)
def test_liger_is_refused_where_it_is_missing(backend, says, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else find(name))
    cfg = Config()
    cfg.policy.liger, cfg.policy.backend = "on", backend
    with pytest.raises(ConfigError, match=f"--policy.liger on.*{says}"):
        check(cfg, 1)
