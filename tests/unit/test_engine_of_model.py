"""Engines refuse, before anything is built, models that they cannot run."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlavaConfig, Qwen2_5_VLConfig, Qwen3_5Config

from spmdrl.config.checks import check
from spmdrl.config.fields import ConfigError
from spmdrl.engines.build import check_engine, check_kind
from spmdrl.hub.folder import TINY
from tests.ranks.cases import config

HF = "--rollout.engine hf: transformers has no causal language model for llava; take --rollout.engine vllm on a GPU"
LLAVA = "--rollout.engine vllm: vLLM on a CPU cannot run llava; it needs a GPU"
VLLM = "--rollout.engine vllm: vLLM on a CPU cannot run qwen3_5; take --rollout.engine hf"


def with_weights(folder) -> None:
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("engine", "on_cpu", "config_class", "says"),
    [
        ("hf", True, LlavaConfig, HF),
        ("hf", False, LlavaConfig, HF),
        ("hf", True, Qwen2_5_VLConfig, ""),
        ("vllm", True, Qwen2_5_VLConfig, ""),
        ("vllm", True, Qwen3_5Config, VLLM),
        ("vllm", False, Qwen3_5Config, ""),
        ("vllm", True, LlavaConfig, LLAVA),
        ("vllm", False, Qwen2_5_VLConfig, ""),
    ],
)
def test_a_model_that_reads_more_than_text(engine, on_cpu, config_class, says, tmp_path):
    config_class().save_pretrained(tmp_path)
    with_weights(tmp_path)
    cfg = config(model={"path": str(tmp_path)}, rollout={"engine": engine})
    if says:
        with pytest.raises(ValueError) as error:
            check_engine(cfg, on_cpu)
        assert str(error.value) == says
    else:
        check_kind(cfg, engine, on_cpu)


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_language_models_pass_and_so_does_code_of_their_own(engine, tmp_path):
    check_kind(config(), engine, True)
    values = json.loads((TINY / "config.json").read_text())
    values |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    code = "from transformers import Qwen2Config\n\n\nclass Config(Qwen2Config):\n    model_type = 'own'\n"
    (tmp_path / "own.py").write_text(code)
    with_weights(tmp_path)
    check_kind(config(model={"path": str(tmp_path), "trust_remote_code": True}), engine, True)


def test_one_rank_is_told_how_to_have_more(monkeypatch):
    more = "torchrun starts more; for a dry run of N ranks set WORLD_SIZE=N"
    for told in (False, True):
        if told:
            monkeypatch.setenv("WORLD_SIZE", "1")
        else:
            monkeypatch.delenv("WORLD_SIZE", raising=False)
        for sections in (
            {"rollout": {"engine": "hf", "tp": 4}},
            {"policy": {"backend": "megatron", "share_prompts": False}, "parallel": {"ep": 8}},
        ):
            with pytest.raises(ConfigError) as error:
                check(config(**sections), 1)
            assert (more in str(error.value)) is not told
    with pytest.raises(ConfigError) as error:
        check(config(rollout={"engine": "hf", "tp": 4}), 2)
    assert more not in str(error.value)
