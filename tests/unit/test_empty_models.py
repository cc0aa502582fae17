"""A model built without values and filled box by box equals the one that transformers loads, bit for bit."""

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from spmdrl.hub.build import build_model, empty_model
from spmdrl.hub.folder import fp8_blocks
from spmdrl.policy.fsdp.sharding import fill_model
from spmdrl.weights.experts import full_box
from spmdrl.weights.folder import Tensors, chunks
from spmdrl.weights.sources import Sources
from spmdrl.weights.writer import SafetensorsWriter
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
    fill_model(wrapped, folder, torch.device("cpu"), head == "value", 0, fp8_blocks(folder))
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


@pytest.mark.slow
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


# ── boxes ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "jamba", "ernie4_5_moe"])
def test_any_box_of_any_parameter_is_read_alone(family, folders, monkeypatch):
    """Chunks are made so small that each box takes many of them."""
    folder, draw = folders(family), random.Random(0)
    whole = dict(filled(folder).named_parameters())
    monkeypatch.setattr("spmdrl.weights.folder.CHUNK", 256)
    shapes = {name: tuple(p.shape) for name, p in whole.items()}
    sources = Sources(empty_model(folder, "float32", False, "eager"), shapes, Tensors(folder))
    for name, p in whole.items():
        box = tuple(tuple(sorted(draw.sample(range(n + 1), 2))) for n in p.shape)
        got = torch.full([b - a for a, b in box], torch.nan)
        sources.copy(name, box, got)
        assert torch.equal(got, p.detach()[tuple(slice(a, b) for a, b in box)]), (name, box)


@pytest.mark.parametrize("most", [1, 5, 24, 100, 10**6])
def test_chunks_cover_a_box_once(most):
    for box in ((), ((3, 4),), ((2, 9), (1, 6)), ((0, 3), (5, 9), (2, 4))):
        seen = torch.zeros([12] * len(box))
        for part in chunks(box, most):
            seen[tuple(slice(a, b) for a, b in part)] += 1
            assert math.prod(b - a for a, b in part) <= max(most, 1)
        want = torch.zeros_like(seen)
        want[tuple(slice(a, b) for a, b in box)] = 1
        assert torch.equal(seen, want)


# ── heads, ties, folders that do not fit ─────────────────────────────────────


def test_heads_are_those_of_from_pretrained_and_a_value_head_starts_at_zero(tmp_path, folders):
    values = filled(folders("qwen2_tied"), head="value")
    assert values.score.weight.shape == (1, 32) and values.score.weight.eq(0).all()
    assert_same(values, build_model(folders("qwen2_tied"), "float32", False, "eager", "value"))
    with pytest.raises(ValueError, match=r"do not fit its config.json: missing or misshapen score.weight"):
        filled(folders("qwen2_tied"), head="score")
    config = transformers.Qwen2Config(**SMALL, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    for head in ("value", "score"):
        assert_same(filled(tmp_path, head=head), build_model(tmp_path, "float32", False, "eager", head))


def test_a_reward_model_is_no_language_model(tmp_path, folders):
    folder = shutil.copytree(folders("qwen2_tied"), tmp_path / "scorer")
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"architectures": ["Qwen2ForSequenceClassification"]}))
    for build in (build_model, empty_model):
        with pytest.raises(ValueError, match="names Qwen2ForSequenceClassification, a reward model"):
            build(folder, "float32")


def test_inner_model_alone_is_read_into_the_whole_one(tmp_path, folders):
    """A folder that was written from the model without its head has names without `model.`."""
    tensors = load_file(folders("qwen2_tied") / "model.safetensors")
    shutil.copy(folders("qwen2_tied") / "config.json", tmp_path)
    save_file({name.removeprefix("model."): x for name, x in tensors.items()}, tmp_path / "model.safetensors")
    assert_same(filled(tmp_path), filled(folders("qwen2_tied")))


def test_tied_weights_may_have_either_name_and_must_agree(tmp_path, folders):
    tensors = load_file(folders("qwen2_tied") / "model.safetensors")
    shutil.copy(folders("qwen2_tied") / "config.json", tmp_path)
    table = tensors.pop("model.embed_tokens.weight")
    both = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    for some in ({"lm_head.weight": table}, both):
        save_file(tensors | some, tmp_path / "model.safetensors", {"format": "pt"})
        ours = filled(tmp_path)
        assert ours.lm_head.weight is ours.model.embed_tokens.weight
        assert_same(ours, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    both["lm_head.weight"][3, 4] += 1
    save_file(tensors | both, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="ties lm_head.weight to model.embed_tokens.weight, but the folder has diff"):
        filled(tmp_path)


def test_folder_that_does_not_fit_is_refused_by_the_names_of_its_tensors(tmp_path, folders):
    for family, change, named in (
        ("llama", {"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight"),
        ("llama", {"intermediate_size": 50}, "model.layers.0.mlp.down_proj.weight"),
        ("mixtral", {"num_local_experts": 9}, "model.layers.0.mlp.experts.down_proj"),
        ("mixtral", {"intermediate_size": 50}, "model.layers.0.mlp.experts.down_proj"),
    ):
        shutil.copytree(folders(family), tmp_path, dirs_exist_ok=True)
        config = json.loads((tmp_path / "config.json").read_text()) | change
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=f"do not fit its config.json: missing or misshapen {named}"):
            filled(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="is not a complete safetensors file .* copy it again"):
        filled(tmp_path)


# ── fp8 ──────────────────────────────────────────────────────────────────────

BLOCKS = (16, 12)


def quantized(source: Path, folder: Path, drop: str = "", **settings) -> dict[str, torch.Tensor]:
    """Writes a copy whose linear layers are in fp8; returns a dequantised copy, by a formula of its own."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(BLOCKS)} | settings
    (folder / "config.json").write_text(json.dumps(config))
    written, plain = {}, {}
    for name, x in load_file(source / "model.safetensors").items():
        if "proj" not in name:
            written[name] = plain[name] = x
            continue
        rows, columns = (torch.arange(n) // block for n, block in zip(x.shape, BLOCKS, strict=True))
        scale = torch.rand(rows[-1] + 1, columns[-1] + 1) + 0.5
        small = (x.float() / scale[rows][:, columns]).to(torch.float8_e4m3fn)
        written |= {name: small, name + "_scale_inv": scale}
        plain[name] = small.float() * scale[rows][:, columns]
    written.pop(drop, None)
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    return plain


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_folder_is_its_dequantised_copy_bit_for_bit(family, dtype, tmp_path, folders, monkeypatch):
    """DeepSeek-V3's published form; boxes and chunks cut through blocks."""
    monkeypatch.setattr("spmdrl.weights.folder.CHUNK", 1000)
    plain = quantized(folders(family), tmp_path / "fp8")
    copy = tmp_path / "copy"
    shutil.copytree(folders(family), copy)
    save_file({name: x.to(dtype) for name, x in plain.items()}, copy / "model.safetensors", {"format": "pt"})
    ours = filled(tmp_path / "fp8", dtype)
    assert_same(ours, filled(copy, dtype))
    assert "quantization_config" not in ours.config.to_dict()
    tensors = Tensors(tmp_path / "fp8", fp8_blocks(tmp_path / "fp8"))
    name, draw = "model.layers.0.self_attn.o_proj.weight", random.Random(1)
    want = plain[name]
    for _ in range(30):
        box = tuple(tuple(sorted(draw.sample(range(n + 1), 2))) for n in want.shape)
        got = torch.empty([b - a for a, b in box], dtype=dtype)
        tensors.copy(name, box, got)
        assert torch.equal(got, want[tuple(slice(a, b) for a, b in box)].to(dtype)), box


def test_quantised_folders_that_cannot_be_read_are_refused_by_name(tmp_path, folders):
    source, weight = folders("qwen3"), "model.layers.1.mlp.up_proj.weight"
    quantized(source, tmp_path / "lacks", drop=weight + "_scale_inv")
    with pytest.raises(ValueError, match=rf"the fp8 weight {weight} \(48, 32\) has no scales \({weight}_scale_inv"):
        filled(tmp_path / "lacks")
    quantized(source, tmp_path / "blocks", weight_block_size=[8, 8])
    with pytest.raises(ValueError, match=r"_scale_inv has shape \(\d, 3\), but the blocks of .* need \(\d, 4\)"):
        filled(tmp_path / "blocks")
    for name, settings, message in (
        ("gptq", {"quant_method": "gptq"}, "is quantised by gptq: .* take a dequantised folder"),
        ("whole", {"weight_block_size": None}, "weight_block_size None is not supported"),
    ):
        quantized(source, tmp_path / name, **settings)
        with pytest.raises(ValueError, match=message):
            filled(tmp_path / name)
    plain = json.loads((source / "config.json").read_text())
    (tmp_path / "lacks" / "config.json").write_text(json.dumps(plain))
    with pytest.raises(ValueError, match="is in fp8, but config.json has no quantization_config"):
        filled(tmp_path / "lacks")


# ── files ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shard_bytes", [300, 5000, 1 << 20])
def test_files_that_are_written_as_tensors_come_open_everywhere(tmp_path, shard_bytes, monkeypatch):
    monkeypatch.setattr("spmdrl.weights.writer.FIRST_HEADER", 256)
    draw = torch.Generator().manual_seed(0)
    kinds = (torch.bfloat16, torch.float32, torch.float64, torch.int64)
    tensors = {
        f"tensor.{i}": torch.randint(0, 99, (1 + i % 7, i % 5), generator=draw).to(kinds[i % 4]) for i in range(40)
    } | {"scalar": torch.tensor(3.0), "odd": torch.ones(3, dtype=torch.bfloat16).t()}
    writer, names = SafetensorsWriter(tmp_path, shard_bytes), list(tensors)
    for first in range(0, len(names), 3):
        writer.add({name: tensors[name] for name in names[first : first + 3]})
    writer.close()
    files = sorted(tmp_path.glob("*.safetensors"))
    got = {name: x for file in files for name, x in load_file(file).items()}
    assert len(files) == (1 if shard_bytes > 5000 else len(files)) and got.keys() == tensors.keys()
    assert all(torch.equal(x, tensors[name]) and x.dtype == tensors[name].dtype for name, x in got.items())
    read = Tensors(tmp_path)
    assert all(torch.equal(read.read(name, full_box(x.shape)), x) for name, x in tensors.items())
