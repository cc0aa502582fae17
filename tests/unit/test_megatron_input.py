"""Requests that `--policy.backend megatron` cannot meet, each as one line that names the setting to change."""

import importlib.util
import re
from itertools import product

import pytest

from spmdrl.config.checks import check
from spmdrl.config.fields import ConfigError
from spmdrl.config.load import from_command_line
from spmdrl.policy.megatron.layout import Layout, check_model, check_ranks, stages

SPLIT = "--parallel.placement split --parallel.rollout-ranks"


def problems(ranks: int, words: str) -> list[str]:
    """Returns lines of the message, without its head."""
    try:
        check(from_command_line(words.split()).config, ranks)
    except ConfigError as error:
        return [line.strip() for line in str(error).splitlines()[1:]]
    return []


@pytest.fixture
def installed(monkeypatch):
    """Makes the other checks independent of an installed megatron-core."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "megatron" else find(name))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("ranks", "words", "says"),
    [
        (4, "--parallel.tp 3", ["--parallel.tp 3", "multiply to 3", "must divide the 4 ranks"]),
        (4, "--parallel.tp 2 --parallel.pp 4", ["--parallel.pp 4", "multiply to 8", "the 4 ranks"]),
        (4, "--parallel.cp 3", ["--parallel.cp 3", "must divide the 4 ranks"]),
        (4, "--parallel.tp 2 --parallel.dp-shard 4", ["--parallel.dp-shard 4", "2 or -1"]),
        (4, "--parallel.ep 3", ["--parallel.ep 3", "pp x etp x ep = 3", "divide 4 ranks"]),
        (4, "--parallel.pp 2 --parallel.ep 2 --parallel.etp 2", ["--parallel.ep 2", "= 8 must divide 4 ranks"]),
        (4, "--parallel.virtual-stages 2", ["--parallel.virtual-stages 2", "--parallel.pp of at least 2"]),
        (4, "--parallel.last-stage-layers 2", ["--parallel.last-stage-layers 2", "--parallel.pp of at least 2"]),
        (4, "--parallel.first-stage-layers 2", ["--parallel.first-stage-layers 2", "--parallel.pp of at least 2"]),
        (4, "--parallel.pp 2 --parallel.last-stage-layers -1", ["--parallel.last-stage-layers -1", "0 or more"]),
        (4, "--parallel.pp 2 --parallel.first-stage-layers -1", ["--parallel.first-stage-layers -1", "0 or more"]),
        (4, "--parallel.sp 2", ["--parallel.sp 2", "--parallel.cp divides sequences"]),
        (8, f"{SPLIT} 3 --parallel.tp 3", ["--parallel.tp 3", "multiply to 3", "must divide the 5 ranks that train"]),
        (
            8,
            f"{SPLIT} 1 --parallel.pp 2 --parallel.scoring-ranks 3",
            ["--parallel.scoring-ranks 3", "tp x cp x pp = 2", "take a multiple of 2, or 0"],
        ),
        (
            8,
            f"{SPLIT} 2 --parallel.ep 4 --parallel.scoring-ranks 2",
            ["--parallel.scoring-ranks 2", "pp x etp x ep = 4", "take a multiple of 4, or 0"],
        ),
        (4, "--lora.rank 8", ["--lora.rank 8", "take 0"]),
        (4, "--policy.reduce-gradients each", ["--policy.reduce-gradients each", "all parameters", "take last"]),
        (4, "--model.dtype float64 --rollout.engine hf", ["--model.dtype float64", "take float32"]),
    ],
)
def test_bad_setting_is_one_line_that_says_what_to_change(ranks, words, says):
    (line,) = problems(ranks, f"--policy.backend megatron {words}")
    for word in says:
        assert word in line


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (8, "--parallel.tp 2 --parallel.pp 2 --parallel.cp 2"),
        (8, "--parallel.pp 2 --parallel.ep 4 --parallel.last-stage-layers 1"),
        (8, "--parallel.pp 4 --parallel.first-stage-layers 3 --parallel.last-stage-layers 1"),
        (4, "--parallel.tp 2 --parallel.dp-shard 2"),
        (3, f"{SPLIT} 1 --parallel.tp 2"),
        (9, f"{SPLIT} 1 --parallel.tp 2 --parallel.scoring-ranks 4 --parallel.ep 2"),
        (3, "--parallel.tp 3 --rollout.engine hf"),
    ],
)
def test_settings_that_fit_pass(ranks, words):
    assert problems(ranks, f"--policy.backend megatron {words}") == []


@pytest.mark.parametrize("end", ["first", "last"])
def test_bad_axis_of_megatron_under_fsdp(end):
    (line,) = problems(4, f"--parallel.{end}-stage-layers 2")
    assert line == f"--parallel.{end}-stage-layers 2: needs --policy.backend megatron; take 0"


def test_missing_megatron_core_is_told_with_the_line_that_installs_it(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "megatron" else find(name))
    (line,) = problems(2, "--policy.backend megatron --parallel.tp 2")
    assert line == (
        "--policy.backend megatron: megatron-core is not installed: "
        './launch/install.sh, or pip install "megatron-core>=0.16.1,<0.18" einops'
    )
    assert problems(2, "") == []


DENSE = dict(num_layers=6, num_attention_heads=12, num_query_groups=4, ffn_hidden_size=96)
MIXTURE = DENSE | dict(num_moe_experts=8, moe_ffn_hidden_size=24, moe_layer_freq=[1] * 6)


@pytest.mark.parametrize(
    ("settings", "layout", "says"),
    [
        (DENSE, Layout(tp=5), "--parallel.tp 5: the model has 12 attention heads; --parallel.tp may be 1, 2, 3, 4, 6"),
        (DENSE, Layout(tp=6), "--parallel.tp 6: the model has 4 key-value heads; --parallel.tp may be 1, 2, 4"),
        (DENSE | {"ffn_hidden_size": 90}, Layout(tp=4), "--parallel.tp 4: the model has 90 feed-forward columns"),
        (DENSE, Layout(pp=4), "--parallel.pp 4: the model has 6 layers; --parallel.pp may be 1, 2, 3, 6"),
        (DENSE, Layout(pp=4), "or this with --parallel.last-stage-layers 3"),
        (DENSE, Layout(pp=7), "--parallel.pp 7: the model has 6 layers; --parallel.pp may be 1, 2, 3, 6$"),
        (DENSE, Layout(pp=3, last_stage_layers=3), r"--parallel.last-stage-layers 3: the rest .* \(2 of --parallel"),
        (DENSE, Layout(pp=2, last_stage_layers=6), "--parallel.last-stage-layers may be 3, 2, 4, 1, 5$"),
        (
            DENSE,
            Layout(pp=3, first_stage_layers=3),
            r"--parallel.first-stage-layers 3: the rest .* \(2 of --parallel",
        ),
        (DENSE, Layout(pp=3, first_stage_layers=3), "--parallel.first-stage-layers may be 2, 4$"),
        (
            DENSE,
            Layout(pp=4, first_stage_layers=2, last_stage_layers=1),
            "last-stage-layers 1: with --parallel.first-stage-layers 2, the rest of 6 layers .*; .*-layers may be 2$",
        ),
        (
            DENSE,
            Layout(pp=2, first_stage_layers=2, last_stage_layers=3),
            "the two stages do not add up to 6 layers; --parallel.last-stage-layers may be 4$",
        ),
        (
            DENSE,
            Layout(pp=3, first_stage_layers=5, last_stage_layers=2),
            "no --parallel.last-stage-layers fits --parallel.first-stage-layers 5: change that number$",
        ),
        (
            DENSE,
            Layout(pp=2, virtual_stages=2, first_stage_layers=3),
            "virtual-stages 2: pipeline ranks hold 3 of the model's layers; --parallel.virtual-stages may be 1, 3$",
        ),
        (
            DENSE,
            Layout(pp=3, virtual_stages=2, first_stage_layers=3, last_stage_layers=1),
            "pipeline ranks hold 1 and 2 and 3 of the model's layers; --parallel.virtual-stages may be 1$",
        ),
        (
            DENSE | {"num_layers": 7},
            Layout(pp=2, virtual_stages=2),
            "7 layers; no --parallel.pp fits --parallel.virtual-stages 2; without it, --parallel.pp may be 1, 7$",
        ),
        (DENSE | {"num_layers": 10}, Layout(pp=4, virtual_stages=2), "may be 5, or this with --parallel.last-.* 4$"),
        (DENSE, Layout(pp=4, virtual_stages=2), "--parallel.pp may be 3$"),
        (DENSE, Layout(pp=2, virtual_stages=2), "--parallel.virtual-stages may be 1, 3$"),
        (DENSE, Layout(ep=2), "the model has no experts; leave both at 1"),
        (MIXTURE, Layout(ep=3), "--parallel.ep 3: the model has 8 experts; --parallel.ep may be 1, 2, 4, 8"),
        (MIXTURE, Layout(etp=5), "--parallel.etp 5: the model has 24 columns of an expert"),
        (MIXTURE, Layout(tp=2, sequence_parallel=False), "leave out --parallel.no-sequence-parallel"),
    ],
)
def test_bad_division_of_a_model_names_what_would_do(settings, layout, says):
    with pytest.raises(ValueError, match=says):
        check_model(layout, settings)


def test_suggested_stages_are_accepted():
    told = 0
    for layers in range(2, 25):
        for pp in range(2, 6):
            for virtual in range(1, 4):
                wanted = dict(num_layers=layers, num_attention_heads=1, ffn_hidden_size=1)
                try:
                    stages(Layout(pp=pp, virtual_stages=virtual), layers)
                except ValueError as error:
                    even = re.search(r"layers; --parallel.pp may be (\d+(?:, \d+)*)", str(error))
                    for n in even[1].split(", ") if even else []:
                        check_model(Layout(pp=int(n), virtual_stages=virtual), wanted)
                    plain = re.search(r"without it, --parallel.pp may be (\d+(?:, \d+)*)", str(error))
                    for n in plain[1].split(", ") if plain else []:
                        check_model(Layout(pp=int(n)), wanted)
                    if last := re.search("this with --parallel.last-stage-layers (.+)$", str(error)):
                        told += 1
                        check_model(Layout(pp=pp, virtual_stages=virtual, last_stage_layers=int(last[1])), wanted)
                    assert even or plain or last, str(error)
    assert told > 20


@pytest.mark.parametrize(
    ("kind", "says"),
    [("GPTNeoX", "gpt_neox has no rms_norm_eps; "), ("GPT2", "gpt2 has no rms_norm_eps and .* and no hidden_act; ")],
)
def test_config_without_what_families_share_is_refused(kind, says, monkeypatch):
    import transformers

    from spmdrl.policy.megatron.families import FAMILIES, Family, describe

    config = getattr(transformers, f"{kind}Config")()
    monkeypatch.setitem(FAMILIES, config.model_type, Family())
    with pytest.raises(ValueError, match=f"needs RMSNorm and a gated MLP: the config of {says}"):
        describe(config)


def test_groups_of_experts_that_limit_nothing_are_left_out():
    from transformers import DeepseekV3Config

    from spmdrl.policy.megatron.families import describe

    free = describe(DeepseekV3Config(n_group=1, topk_group=1, num_experts_per_tok=6)).settings
    assert free["moe_router_num_groups"] is free["moe_router_group_topk"] is None
    limited = describe(DeepseekV3Config(n_group=8, topk_group=4, num_experts_per_tok=8)).settings
    assert (limited["moe_router_num_groups"], limited["moe_router_group_topk"]) == (8, 4)
    with pytest.raises(ValueError, match="num_experts_per_tok other than twice topk_group"):
        describe(DeepseekV3Config(n_group=8, topk_group=4, num_experts_per_tok=6))


def test_rotary_embedding_of_a_part_of_each_head():
    from transformers import Glm4MoeConfig

    from spmdrl.policy.megatron.families import describe

    rope = dict(rope_theta=1e4, partial_rotary_factor=0.5)
    large = describe(Glm4MoeConfig(head_dim=128, attention_bias=True, use_qk_norm=True))
    assert (large.rotary_share, large.rope_base, large.frequencies) == (0.5, 1e4, None)
    assert large.settings["add_qkv_bias"] and large.settings["qk_layernorm"]
    assert large.settings["moe_router_num_groups"] is None and large.settings["moe_layer_freq"][:2] == [0, 1]
    longer = describe(Glm4MoeConfig(head_dim=128, rope_parameters=rope | dict(rope_type="linear", factor=2.0)))
    assert longer.frequencies is not None and longer.frequencies.shape == (32,)
    far = rope | dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    with pytest.raises(ValueError, match="rope_type yarn with a partial_rotary_factor is not supported for glm4_moe"):
        describe(Glm4MoeConfig(head_dim=128, rope_parameters=far))


def test_layers_of_stages_add_up():
    for layers in range(1, 14):
        for pp in range(1, 6):
            for first, last in product(range(layers + 2), repeat=2):
                given = (first > 0) + (last > 0)
                others, rest = pp - given, layers - first - last
                even = rest % others == 0 and rest >= others if others > 0 else others == rest == 0
                try:
                    found = stages(Layout(pp=pp, first_stage_layers=first, last_stage_layers=last), layers)
                except ValueError as error:
                    # Only layouts that divide in no way are refused: the others have as many layers each.
                    assert not even or (given and pp == 1), (layers, pp, first, last)
                    flag, _, fits = str(error).rpartition("; --parallel.")[2].partition("-stage-layers may be ")
                    for n in re.findall(r"\d+", fits):
                        told = {"first_stage_layers": first, "last_stage_layers": last}
                        told[f"{flag}_stage_layers"] = int(n)
                        assert sum(stages(Layout(pp=pp, **told), layers)) == layers
                else:
                    assert even and len(found) == pp and sum(found) == layers and min(found) > 0
                    assert len(set(found[bool(first) : pp - bool(last)])) <= 1
                    assert (not first or found[0] == first) and (not last or found[-1] == last)


@pytest.mark.parametrize("ranks", [4, 6])
def test_ranks_that_are_refused_are_told_what_would_do(ranks):
    with pytest.raises(ValueError, match=rf"--parallel.ep 5 .* {ranks} ranks; --parallel.ep may be 1, "):
        check_ranks(Layout(ep=5), ranks)
