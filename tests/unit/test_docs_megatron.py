"""docs/megatron.md is right: flags, files, families, commands; and its worked example converts a model."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from spmdrl.config.checks import check
from spmdrl.config.fields import leaves
from spmdrl.config.schema import Config
from spmdrl.policy.megatron import families
from tests.ranks.harness import run_ranks
from tests.unit.test_docs_algorithms import load, parts, table
from tests.unit.test_docs_engines import commands

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
EXAMPLE = re.findall(r"```python\n(.*?)```", parts(DOC, 2)["Adding a family"], re.DOTALL)


def test_named_settings_exist():
    known = set(leaves(Config))
    named = re.findall(r"--([a-z_]+(?:-[a-z]+)*\.[a-z][a-z0-9_-]*[a-z0-9])", DOC)
    assert len(set(named)) > 8
    for flag in named:
        assert flag.replace("-", "_") in known, f"--{flag}"


def test_named_files_exist():
    paths = re.findall(r"(?<![\w/.-])((?:\w+/)+[\w.-]*\w)(?=[`)])", DOC)
    assert len(set(paths)) >= 5
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "spmdrl" / path).exists(), path


def test_axes_of_the_table_are_those_of_the_settings():
    rows = table(parts(DOC, 2)["Axes"])
    told = {row[0].strip("`").removeprefix("--parallel.").replace("-", "_") for row in rows}
    axes = {"tp", "sequence_parallel", "cp", "pp", "virtual_stages", "ep", "etp"}
    axes |= {"first_stage_layers", "last_stage_layers"}
    assert told == axes and all(f"parallel.{axis}" in leaves(Config) for axis in axes)


def test_families_are_those_of_the_table():
    text = re.sub(r"\(.*?\)", "", DOC, flags=re.DOTALL)
    (listed,) = re.findall(r"^Families: (.*?)\.\s", text, re.MULTILINE | re.DOTALL)
    assert {name.strip() for name in listed.split(",")} == set(families.FAMILIES)


def test_commands_pass_the_checks_on_their_number_of_ranks(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = commands(DOC)
    assert len(found) >= 2
    for ranks, flags in found:
        config = load(*flags)
        assert config.policy.backend == "megatron"
        check(config, ranks)


def converted(world, folder: str, example: str) -> dict:
    """Results of `tests/ranks/test_megatron_convert.py` for a family that the example adds, from a Qwen3 in folder."""
    from safetensors.torch import save_file

    from spmdrl.policy.megatron.layout import Layout
    from spmdrl.policy.megatron.model import initialize
    from tests.ranks.test_megatron_convert import compare, reference

    def renamed(tensors: dict) -> dict:
        return {name.replace("post_attention_layernorm", "ffn_norm"): x for name, x in tensors.items()}

    exec(compile(example, "docs/megatron.md", "exec"), vars(families))
    config, tensors, logits, gradients = reference(Path(folder))
    config.model_type = "newmodel"
    own = Path(folder) / f"rank_{world.rank}"
    own.mkdir()
    save_file(renamed(tensors), own / "model.safetensors")
    layout = Layout(tp=world.size)
    initialize(layout)
    return compare(world, own, layout, config, renamed(tensors), logits, renamed(gradients))


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed")
def test_worked_example_converts_a_model(tmp_path):
    """The model of transformers is llama with norms on queries and keys, its second norm under another name."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.ranks.test_megatron_convert import BASE, LENGTHS

    (example,) = EXAMPLE
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**BASE, head_dim=16))
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.2 * torch.randn_like(p))
    model.save_pretrained(tmp_path)
    ranks = run_ranks(converted, 2, str(tmp_path), example, limit=100)
    assert sum(rank["seen"] for rank in ranks) == 131 * sum(map(sum, LENGTHS))
    for rank in ranks:
        assert rank["difference"] <= 1e-5 < 1 < rank["scale"] and not rank["wrong"] and not rank["copies"]
        assert max(slope for _, slope in rank["slopes"]) <= 1e-4
    names = {name for rank in ranks for name, *_ in rank["ranges"]}
    assert sum("ffn_norm" in name for name in names) == 4 and not any("post_attention" in name for name in names)
    assert "newmodel" not in families.FAMILIES
