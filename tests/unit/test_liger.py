"""`--policy.liger` is refused where it cannot run; its numbers are tested on a GPU (tests/gpu/test_policy.py)."""

import importlib.util

import pytest
import torch

from spmdrl.config.checks import check
from spmdrl.config.fields import ConfigError
from spmdrl.config.schema import Config
from spmdrl.policy.fsdp.sharding import use_liger


def test_liger_is_refused_on_a_cpu():
    with pytest.raises(ValueError, match="--policy.liger: Liger's kernels need a GPU"):
        use_liger(None, torch.device("cpu"))


@pytest.mark.parametrize(
    "backend, says", [("fsdp", "pip install liger-kernel"), ("megatron", "needs --policy.backend fsdp")]
)
def test_liger_is_refused_where_it_is_missing(backend, says, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else find(name))
    cfg = Config()
    cfg.policy.liger, cfg.policy.backend = True, backend
    with pytest.raises(ConfigError, match=f"--policy.liger True.*{says}"):
        check(cfg, 1)
