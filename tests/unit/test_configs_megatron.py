"""Configs of models past FSDP's reach: their layouts divide the real models, and their memory is as they say."""

import re
from pathlib import Path

import pytest

from benchmarks._models import published
from spmdrl.config.checks import check
from spmdrl.config.load import from_command_line
from spmdrl.config.schema import Config
from spmdrl.policy.megatron.families import describe
from spmdrl.policy.megatron.layout import Layout, as_list, check_model, check_ranks, stages

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# Billions of parameters that the models' pages give (without DeepSeek's layer for the token after the next).
SIZES = {"Qwen3-30B-A3B": 30.5, "Qwen3-235B-A22B": 235, "DeepSeek-V3": 671}
MODELS = {name: published(name) for name in SIZES}
RUNS = {
    "qwen3_30b_a3b.yaml": ("Qwen3-30B-A3B", 8),
    "qwen3_235b.yaml": ("Qwen3-235B-A22B", 32),
    "deepseek_671b.yaml": ("DeepSeek-V3", 96),
    "dapo_671b.yaml": ("DeepSeek-V3", 512),
}
"""Config -> model, GPUs."""
each_run = pytest.mark.parametrize("name", RUNS)


def run_of(name: str) -> Config:
    return from_command_line(["--config", str(CONFIGS / name)]).config


def layout_of(config: Config) -> Layout:
    axes = config.parallel
    sizes = (axes.tp, axes.cp, axes.pp, axes.virtual_stages, axes.ep, axes.etp)
    return Layout(*sizes, axes.sequence_parallel, axes.last_stage_layers, axes.first_stage_layers)


def layer(h, sparse: int, tp: int, ep: int) -> tuple[float, float]:
    """Parameters of one layer on one rank: those that all hold apart from tp, and its experts."""
    hidden = h.hidden_size
    if hasattr(h, "kv_lora_rank"):
        heads, head = h.num_attention_heads, h.qk_nope_head_dim + h.qk_rope_head_dim
        divided = h.q_lora_rank * heads * head + h.kv_lora_rank * heads * (h.qk_nope_head_dim + h.v_head_dim)
        divided += heads * h.v_head_dim * hidden
        whole = hidden * (h.q_lora_rank + h.kv_lora_rank + h.qk_rope_head_dim) + h.q_lora_rank + h.kv_lora_rank
        experts, shared = h.n_routed_experts, h.n_shared_experts * h.moe_intermediate_size
    else:
        divided = 2 * hidden * h.head_dim * (h.num_attention_heads + h.num_key_value_heads)
        whole, experts, shared = 2 * h.head_dim, h.num_experts, 0
    whole += 2 * hidden + (hidden * experts if sparse else 0)
    divided += 3 * hidden * (shared if sparse else h.intermediate_size)
    return whole + divided / tp, sparse * experts / ep * 3 * hidden * h.moe_intermediate_size


def held(h, layout: Layout) -> list[tuple[float, float]]:
    """Parameters of a rank of each stage: shared or divided over tp, and experts."""
    sparse = as_list(describe(h).settings["moe_layer_freq"])
    counts, found, first = stages(layout, len(sparse)), [], 0
    for stage, count in enumerate(counts):
        parts = [layer(h, kind, layout.tp, layout.ep * layout.etp) for kind in sparse[first : first + count]]
        ends = (stage == 0) + (stage == len(counts) - 1)
        outside = ends * h.vocab_size * h.hidden_size / layout.tp
        found.append((sum(a for a, _ in parts) + outside, sum(b for _, b in parts)))
        first += count
    return found


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_counted_as_the_models_pages_have_them(model):
    assert sum(held(MODELS[model], Layout())[0]) / 1e9 == pytest.approx(SIZES[model], rel=5e-3)


@each_run
def test_layout_divides_ranks_and_model(name):
    model, gpus = RUNS[name]
    config = run_of(name)
    assert config.policy.backend == "megatron" and config.model.dtype == "bfloat16"
    check(config, gpus)
    check_ranks(layout_of(config), gpus)
    check_model(layout_of(config), describe(MODELS[model]).settings)
    assert gpus % config.rollout.tp == 0 and MODELS[model].num_attention_heads % config.rollout.tp == 0


@pytest.mark.parametrize("change", ["tp 3", "ep 5", "last-stage-layers 3"])
def test_layout_that_does_not_divide_them_is_seen(change):
    flag, value = change.split()
    config = from_command_line(["--config", str(CONFIGS / "dapo_671b.yaml"), f"--parallel.{flag}", value]).config
    with pytest.raises(ValueError, match=f"--parallel.{flag}"):
        check_model(layout_of(config), describe(MODELS["DeepSeek-V3"]).settings)


@each_run
def test_sum_of_memory_is_what_the_comments_say(name):
    """Parameters are counted from the model's config; a GPU holds 2 + 4 bytes of each, AdamW 12, divided over data."""
    model, gpus = RUNS[name]
    config, text = run_of(name), (CONFIGS / name).read_text()
    layout, h = layout_of(config), MODELS[model]
    data = gpus // (layout.tp * layout.cp * layout.pp), gpus // (layout.etp * layout.ep * layout.pp)

    def optimizer(shared: float, experts: float) -> float:
        return 12 * (shared / data[0] + experts / data[1])

    most = max(held(h, layout), key=sum)
    mine, engine = sum(most), 2 * sum(held(h, Layout())[0]) / config.rollout.tp
    want = {
        "parameters of a rank": mine,
        "weights and gradients": 6 * mine,
        "optimizer": optimizer(*most),
        "weights of an engine": engine,
        "while weights are pushed": 2 * mine + engine,
    }
    lines = re.findall(r"^#   ([a-z ]+): .*?([\d.]+) (?:G|GB)$", text, re.MULTILINE)
    assert [what for what, _ in lines] == list(want)
    for what, value in lines:
        assert float(value) == pytest.approx(want[what] / 1e9, rel=0.01, abs=0.06), what
    (size,) = map(float, re.findall(r"GPUs of (\d+) GB", text))
    on_gpu = [6 * sum(x) + (0 if config.policy.host_optimizer else optimizer(*x)) for x in held(h, layout)]
    # A fifth is left for activations, NCCL and what else needs room.
    assert max(*on_gpu, want["while weights are pushed"]) < 0.8e9 * size
    assert f"{gpus} GPUs" in text
