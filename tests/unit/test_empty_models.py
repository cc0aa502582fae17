"""A model built without values and filled box by box equals the one that transformers loads, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from spmdrl.hub.build import empty_model
from spmdrl.policy.fsdp.loading import fill_model
from tests.unit.test_experts import FAMILIES as WITH_EXPERTS
from tests.unit.test_experts import SMALL

HEADS = {"head_dim": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
FAMILIES: dict[str, tuple[str, dict]] = WITH_EXPERTS | {
    "llama": ("LlamaConfig", {}),
    "yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", HEADS),
    "gemma2": ("Gemma2Config", HEADS),
    "gemma3": ("Gemma3TextConfig", HEADS),
    "phi3": ("Phi3Config", {}),
    "granite": ("GraniteConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "jamba": ("JambaConfig", {"num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False}),
    "deepseek_v2": ("DeepseekV2Config", WITH_EXPERTS["deepseek_v3"][1] | {"topk_method": "greedy"}),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", {"moe_num_experts": 8, "moe_k": 2}),
}


def folder_of(family: str, folder: Path, dtype=torch.bfloat16, **more) -> Path:
    """Writes a random model as its publishers would."""
    name, changes = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = getattr(transformers, name)(**SMALL | changes | more)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for x in model.state_dict().values():
            x.copy_(torch.randn(x.shape) if x.is_floating_point() else x)
        model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = folder_of(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


def filled(folder: Path, dtype=torch.float32, head: str = "lm"):
    hf = empty_model(folder, dtype, False, "eager", head)
    assert all(p.is_meta for p in hf.parameters())
    wrapped = torch.nn.Module()
    wrapped.hf = hf
    fill_model(wrapped, folder, torch.device("cpu"), head, 0)
    return wrapped.hf


def assert_same(ours, theirs) -> None:
    for kind in ("named_parameters", "named_buffers"):
        got, want = (dict(getattr(m, kind)(remove_duplicate=False)) for m in (ours, theirs))
        assert got.keys() == want.keys()
        for name, x in want.items():
            assert got[name].dtype == x.dtype and got[name].device == x.device, name
            assert torch.equal(got[name], x), name
    names = [[n for n, _ in m.named_parameters()] for m in (ours, theirs)]
    assert names[0] == names[1], "tied alike"


@pytest.mark.parametrize("family", FAMILIES)
def test_filled_model_is_that_of_from_pretrained(family, folders):
    folder = folders(family)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        ours = filled(folder, dtype)
        assert_same(ours, theirs)
        told = [json.loads(m.config.to_json_string(use_diff=False)) for m in (ours, theirs)]
        assert {k: v for k, v in told[0].items() if v != told[1].get(k)}.keys() <= {"transformers_weights"}
        assert not ours.training and ours.get_input_embeddings().padding_idx is None
