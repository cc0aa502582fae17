"""Adapters on families with experts: what is saved and pushed is the base with every adapter, and PEFT opens them."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file

from spmdrl.hub.folder import TINY
from spmdrl.hub.lora import PREFIX, partner, target_modules
from spmdrl.policy.fsdp.lora import merged_pieces
from spmdrl.weights.experts import Layout
from tests.ranks.harness import run_ranks
from tests.ranks.test_lora import merged_here
from tests.unit.test_experts import GROUPED, MLA, SMALL

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")
RANK, ALPHA = 2, 5
FIRST_DENSE = GROUPED | {"n_group": 1, "topk_group": 1}
WINDOW = {"layer_types": ["full_attention"] * 2, "sliding_window": 8}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
FAMILIES: dict[str, tuple[str, dict]] = {
    "deepseek_v2": ("DeepseekV2Config", FIRST_DENSE | MLA),
    "deepseek_v3": ("DeepseekV3Config", GROUPED | MLA),
    "glm4_moe": ("Glm4MoeConfig", FIRST_DENSE | {"head_dim": 8}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", FIRST_DENSE | MLA | {"mlp_layer_types": ["dense", "sparse"]}),
    "dots1": ("Dots1Config", FIRST_DENSE | WINDOW | {"head_dim": 8}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        WINDOW | {"num_experts": 8, "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "afmoe": (
        "AfmoeConfig",
        WINDOW | {"num_experts": 8, "num_shared_experts": 1, "num_dense_layers": 1, "head_dim": 8},
    ),
    "qwen3_next": ("Qwen3NextConfig", DELTA | {"num_experts": 8, "shared_expert_intermediate_size": 24, "head_dim": 8}),
    "qwen2_moe": ("Qwen2MoeConfig", {"num_experts": 8, "shared_expert_intermediate_size": 20}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8}),
}
CASES = [(name, "all-linear") for name in FAMILIES]
CASES += [(name, "down_proj") for name in ("glm4_moe", "deepseek_v3", "qwen3_next")]


def make(family: str, folder: Path) -> None:
    name, changes = FAMILIES[family]
    torch.manual_seed(0)
    settings = getattr(transformers, name)(**SMALL | {"num_hidden_layers": 2} | changes)
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    with torch.no_grad():
        for x in model.state_dict().values():
            x.add_(torch.randn_like(x) * 0.05)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)


def pushed_and_saved(world, root: str) -> dict:
    """Saves a policy with changed adapters for each case; returns what a push would send, or the failure."""
    out = {}
    for family, targets in CASES:
        folder = Path(root) / f"{family}-{targets}"
        (folder / "state").mkdir(parents=True)
        try:
            out[family, targets] = merged_here(
                world, f"{root}/{family}", str(folder), {"rank": RANK, "alpha": ALPHA, "targets": (targets,)}
            )
        except Exception as error:  # one family shall not hide the others
            out[family, targets] = f"{type(error).__name__}: {error}"
    return out


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        make(family, root / family)
    return root, run_ranks(pushed_and_saved, 1, str(root))[0]


@pytest.mark.parametrize(("family", "targets"), CASES)
def test_export_is_the_base_with_every_adapter(root, family, targets):
    folder, pushed = root[0] / f"{family}-{targets}", root[1][family, targets]
    assert not isinstance(pushed, str), pushed
    base = transformers.AutoModelForCausalLM.from_pretrained(root[0] / family, dtype=torch.float64)
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    adapters = load_file(folder / "adapter" / "adapter_model.safetensors")
    used, opened = set(), saved.state_dict()
    for name, weight in base.state_dict().items():
        a, b = (PREFIX + n for n in partner(name))
        want = weight
        if a in adapters:
            used |= {a, b}
            want = weight + ALPHA / RANK * adapters[b].double() @ adapters[a].double()
            assert not torch.equal(want, weight), name
        assert (opened[name] - want).abs().max() < 1e-12, name
    assert used == adapters.keys() and any("down_proj" in name for name in used) is (family != "mixtral")
    for name, (parameter, index) in Layout(saved).places((n, p.shape) for n, p in saved.named_parameters()).items():
        assert torch.equal(pushed[name], opened[parameter][index]), name
    theirs = peft_of(base, folder).merge_and_unload().state_dict()
    assert all((theirs[name] - x).abs().max() < 1e-12 for name, x in opened.items())


def peft_of(base, folder: Path):
    from peft import PeftModel

    return PeftModel.from_pretrained(base, str(folder / "adapter"))


def test_an_adapter_that_cannot_be_merged_is_refused():
    weight = torch.zeros(2, 4, 3)
    named = [("layers.0.experts.lora_A.weight", weight[0]), ("layers.0.experts.lora_B.weight", weight[0])]
    with pytest.raises(ValueError, match="layers.0.experts.lora_A.weight .* choose other --lora.targets"):
        merged_pieces([("layers.0.experts.down_proj", weight)], named, 1.0, None, None)  # type: ignore[arg-type]


def test_layers_that_fused_kernels_read_take_no_adapter():
    settings = transformers.FalconH1Config(
        hidden_size=32, num_hidden_layers=1, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, vocab_size=61
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    assert "in_proj" in target_modules(model, ("all-linear",)) and "out_proj" not in target_modules(
        model, ("all-linear",)
    )
    with pytest.raises(ValueError, match="--lora.targets out_proj: the fused kernels of falcon_h1"):
        target_modules(model, ("in_proj", "out_proj"))


def test_names_that_layers_of_other_kinds_bear_take_no_adapter():
    """PEFT would adapt every module named 0, a whole decoder layer too."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.extra = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 2))

    layers = torch.nn.ModuleList([Layer(), Layer()])
    hf = SimpleNamespace(config=SimpleNamespace(model_type="toy"))
    with patch("spmdrl.hub.lora.decoder_layers", lambda hf: layers):
        assert target_modules(hf, ("all-linear",)) == ["q_proj"]
        with pytest.raises(ValueError, match="--lora.targets 0: no linear layer of the decoder has that name"):
            target_modules(hf, ("0",))
