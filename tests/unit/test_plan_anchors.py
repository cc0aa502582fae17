"""Published layouts and their mutations (tests/golden/plan): they agree with the models' configs.

Nothing here runs a plan: counts and sums are made from the config.json alone, so that a plan can be compared with them.
"""

import ast
import json
import operator
import re
from pathlib import Path

import pytest

from spmdrl.config.checks import check
from spmdrl.config.load import from_command_line
from spmdrl.config.placement import trainers
from spmdrl.hub.folder import read_config
from spmdrl.hub.shipped import shipped
from spmdrl.plan.gpus import GPUS, Gpu
from spmdrl.policy.megatron.families import describe
from spmdrl.policy.megatron.layout import check_model, check_ranks
from spmdrl.policy.megatron.policy import layout_of

ROOT = Path(__file__).resolve().parents[2]
PLAN = ROOT / "tests" / "golden" / "plan"
ANCHORS = {a["name"]: a for a in json.loads((PLAN / "anchors.json").read_text())["anchors"]}
MUTATIONS = json.loads((PLAN / "mutations.json").read_text())["mutations"]
each_anchor = pytest.mark.parametrize("anchor", ANCHORS.values(), ids=ANCHORS)
FLAGS = {
    "tp": "--parallel.tp",
    "pp": "--parallel.pp",
    "cp": "--parallel.cp",
    "ep": "--parallel.ep",
    "etp": "--parallel.etp",
    "virtual_stages": "--parallel.virtual-stages",
    "first_stage_layers": "--parallel.first-stage-layers",
    "last_stage_layers": "--parallel.last-stage-layers",
}


def config_of(anchor: dict) -> dict:
    return json.loads((shipped(anchor["model"]) / "config.json").read_text())


def given(flags: list[str]) -> dict[str, str]:
    assert len(flags) % 2 == 0 and all(name.startswith("--") for name in flags[::2]), flags
    return dict(zip(flags[::2], flags[1::2], strict=True))


def sections(anchor: dict) -> dict:
    import yaml

    return yaml.safe_load((ROOT / anchor["config"]).read_text())


def value(anchor: dict, flag: str) -> str:
    """The text of a setting: a flag's, else the config's."""
    flags = given(anchor["flags"])
    section, name = flag.removeprefix("--").split(".")
    return flags.get(flag, str(sections(anchor).get(section, {}).get(name.replace("-", "_"), "")))


def layers(anchor: dict) -> list[int]:
    """Layers of each stage."""
    layout, count = anchor["layout"], config_of(anchor)["num_hidden_layers"]
    ends = [n for n in (layout["first_stage_layers"], layout["last_stage_layers"]) if n]
    middle = layout["pp"] - len(ends)
    assert (count - sum(ends)) % middle == 0
    equal = [(count - sum(ends)) // middle] * middle
    return [*ends[: bool(layout["first_stage_layers"])], *equal, *([ends[-1]] if layout["last_stage_layers"] else [])]


def one_layer(h: dict, sparse: bool, tp: int, ep: int) -> tuple[float, float]:
    """Parameters of a layer on one rank: whole or divided by tp, and its experts."""
    hidden, heads = h["hidden_size"], h["num_attention_heads"]
    if "kv_lora_rank" in h:
        q, kv, rope, v = h["q_lora_rank"], h["kv_lora_rank"], h["qk_rope_head_dim"], h["v_head_dim"]
        nope = h["qk_nope_head_dim"]
        whole = hidden * (q + kv + rope) + q + kv
        divided = heads * (q * (nope + rope) + kv * (nope + v) + v * hidden)
    else:
        whole = 2 * h["head_dim"]
        divided = 2 * hidden * h["head_dim"] * (heads + h["num_key_value_heads"])
    experts = h.get("n_routed_experts") or h["num_experts"]
    columns = h.get("n_shared_experts", 0) * h["moe_intermediate_size"] if sparse else h["intermediate_size"]
    whole += 2 * hidden + (hidden * experts if sparse else 0)
    divided += 3 * hidden * columns
    return whole + divided / tp, sparse * experts / ep * 3 * hidden * h["moe_intermediate_size"]


@each_anchor
def test_the_largest_stage_is_counted_from_the_config(anchor):
    h, layout = config_of(anchor), anchor["layout"]
    found, at = [], 0
    for stage, count in enumerate(layers(anchor)):
        dense = h.get("first_k_dense_replace", 0)
        parts = [one_layer(h, i >= dense, layout["tp"], layout["ep"]) for i in range(at, at + count)]
        ends = (stage == 0) + (stage == layout["pp"] - 1)
        outside = ends * h["vocab_size"] * h["hidden_size"] / layout["tp"]
        found.append((outside + sum(a for a, _ in parts), sum(b for _, b in parts)))
        at += count
    shared, experts = max(found, key=sum)
    told = anchor["largest_stage"]
    assert shared / 1e9 == pytest.approx(told["shared_g"], abs=6e-4)
    assert experts / 1e9 == pytest.approx(told["experts_g"], abs=6e-4)


@each_anchor
def test_layouts_divide_ranks_and_models(anchor):
    h, layout, engine, place = config_of(anchor), anchor["layout"], anchor["engine"], anchor["placement"]
    train, sample = place["train"], place["sample"]
    assert anchor["gpus"] == (train if place["kind"] == "colocated" else train + sample)
    assert train % (layout["tp"] * layout["cp"] * layout["pp"]) == 0
    assert train % (layout["ep"] * layout["etp"] * layout["pp"]) == 0
    assert len(layers(anchor)) == layout["pp"] == anchor["stages"]
    experts = h.get("n_routed_experts") or h["num_experts"]
    assert experts % layout["ep"] == 0 and h["num_attention_heads"] % layout["tp"] == 0
    if "kv_lora_rank" not in h:
        assert h["num_key_value_heads"] % layout["tp"] == 0
    assert engine["ranks"] == engine["tp"] * engine["dp"] and sample % engine["ranks"] == 0
    assert engine["ep"] in (1, engine["ranks"]) and experts % engine["ep"] == 0
    assert h["num_attention_heads"] % engine["tp"] == 0
    assert anchor["gpu_gib"] == GPUS[anchor["gpu"]].memory_gib
    assert (anchor["prompts"] * anchor["samples"]) % anchor["updates"] == 0
    assert anchor["microbatch_tokens"] >= anchor["prompt_tokens"] + anchor["new_tokens"]
    assert anchor["sources"] and all(s["url"].startswith("https://") and s["says"] for s in anchor["sources"])


@each_anchor
def test_flags_say_what_the_anchor_says(anchor):
    layout, engine, place = anchor["layout"], anchor["engine"], anchor["placement"]
    want = {flag: str(layout[name]) for name, flag in FLAGS.items()}
    want |= {
        "--rollout.engine": engine["kind"],
        "--rollout.tp": str(engine["tp"]),
        "--rollout.dp": str(engine["dp"]),
        "--rollout.ep": str(engine["ep"]),
        "--rollout.gpu-memory-utilization": str(engine["memory_share"]),
        "--rollout.max-sequences": str(engine["max_sequences"]),
        "--rollout.prompts-per-step": str(anchor["prompts"]),
        "--rollout.samples-per-prompt": str(anchor["samples"]),
        "--rollout.max-prompt-tokens": str(anchor["prompt_tokens"]),
        "--rollout.max-new-tokens": str(anchor["new_tokens"]),
        "--algo.updates-per-step": str(anchor["updates"]),
        "--policy.max-tokens-per-microbatch": str(anchor["microbatch_tokens"]),
        "--policy.offload": anchor["offload"],
        "--parallel.placement": place["kind"],
        "--parallel.rollout-ranks": str(place["sample"] if place["kind"] == "split" else 0),
        "--model.path": anchor["model"],
        "--policy.backend": "megatron",
        "--model.dtype": "bfloat16",
        "--policy.activation-checkpointing": anchor["recompute"],
        "--policy.host-optimizer": "true" if anchor["optimizer"] == "host" else "false",
    }
    default = dict.fromkeys(["--parallel.cp", "--parallel.etp", "--parallel.virtual-stages", "--parallel.tp"], "1")
    default |= dict.fromkeys(["--rollout.dp", "--rollout.ep"], "1") | {"--parallel.placement": "colocated"}
    default |= dict.fromkeys([FLAGS["first_stage_layers"], FLAGS["last_stage_layers"], "--parallel.rollout-ranks"], "0")
    default |= {"--policy.host-optimizer": "false"}
    found = {flag: value(anchor, flag) or default.get(flag, "") for flag in want}
    assert {flag: text.lower() if text in ("True", "False") else text for flag, text in found.items()} == want


# ── mutations ────────────────────────────────────────────────────────────────

DO = {ast.Add: operator.add, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value_of(text: str) -> float:
    """Value of a sum: numbers, x, /, + and parentheses; a remark stands in parentheses and begins with a letter."""
    before = None
    while before != text:  # remarks, the innermost first
        before, text = text, re.sub(r"\((?![\d.\s(x/+e-]*\))[^()]*\)", "", text)

    def walk(node: ast.AST) -> float:
        if isinstance(node, ast.BinOp):
            return DO[type(node.op)](walk(node.left), walk(node.right))
        assert isinstance(node, ast.Constant), ast.dump(node)
        return node.value

    return walk(ast.parse(text.replace("x", "*").strip(), mode="eval").body)


def device(mutation: dict) -> Gpu:
    changed = mutation.get("gpu", ANCHORS[mutation["anchor"]]["gpu"])
    return GPUS[changed] if isinstance(changed, str) else Gpu(**changed)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m['anchor']}: {m['what']}")
def test_a_mutation_is_one_change_with_its_reason(mutation):
    anchor = ANCHORS[mutation["anchor"]]
    assert mutation["flags"] or "world" in mutation or "gpu" in mutation
    for flag, text in given(mutation["flags"]).items():
        assert value(anchor, flag) != text, "changes nothing"
    if mutation["reason"] == "rules":
        assert mutation["flag"].startswith("--") and "sum" not in mutation
        return
    left, right = mutation["sum"].split(" = ")
    need, limit = map(float, re.fullmatch(r"([\d.]+) GB of ([\d.]+) GB", right).groups())
    assert value_of(left) == pytest.approx(need, rel=2e-3)
    assert need > 1.1 * limit, "must be clearly over"
    all_of_it = device(mutation).memory_gib * 2**30 / 1e9
    if mutation["reason"] == "kv cache":
        assert limit == pytest.approx(float(given(mutation["flags"])["--rollout.kv-cache-gib"]) * 2**30 / 1e9, abs=6e-4)
    else:
        assert mutation["reason"] == "memory" and mutation["phase"] in ("training", "rollout", "push")
        share = anchor["engine"]["memory_share"] if mutation["phase"] == "rollout" else 1
        assert limit in (pytest.approx(all_of_it, abs=0.06), pytest.approx(share * all_of_it, abs=0.06))


def test_there_are_enough_of_every_kind():
    kinds = [m["reason"] for m in MUTATIONS]
    assert len(MUTATIONS) >= 20 and {kinds.count(k) >= 4 for k in ("memory", "kv cache", "rules")} == {True}
    assert {m.get("phase") for m in MUTATIONS if m["reason"] == "memory"} == {"training", "rollout", "push"}
    assert {m["anchor"] for m in MUTATIONS} == ANCHORS.keys()
    seen = [json.dumps([m["anchor"], m["flags"], m.get("world"), m.get("gpu")]) for m in MUTATIONS]
    assert len(seen) == len(set(seen))


# ── the settings' own checks ─────────────────────────────────────────────────

ABSENT = (
    "has no converter for glm4_moe",
    "--parallel.placement split: not with the megatron",
)
"""Messages about parts that are not there; other tests are of those."""


def refusal(anchor: dict, flags: tuple[str, ...] | list[str] = (), world: int = 0) -> str:
    """The message of the checks of settings and layout; empty if they let the job through."""
    config = from_command_line(["--config", str(ROOT / anchor["config"]), *anchor["flags"], *flags]).config
    world = world or anchor["gpus"]
    try:
        check(config, world)
        layout = layout_of(config)
        check_ranks(layout, trainers(config, world))
        check_model(layout, describe(read_config(shipped(config.model.path))).settings)
    except ValueError as error:
        return str(error)
    return ""


@each_anchor
def test_settings_and_layout_pass_the_checks(anchor):
    message = refusal(anchor)
    if any(part in message for part in ABSENT):
        pytest.skip(message.splitlines()[-1].strip())
    assert message == ""


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m['anchor']}: {m['what']}")
def test_checks_refuse_what_breaks_rules_and_nothing_else(mutation):
    """Memory and the KV cache are the plan's to judge."""
    message = refusal(ANCHORS[mutation["anchor"]], mutation["flags"], mutation.get("world", 0))
    rules = mutation["reason"] == "rules" and mutation.get("seen") != "plan"
    if rules and f"{mutation['flag']} " in message:
        return
    if any(part in message for part in ABSENT):
        pytest.skip(message.splitlines()[-1].strip())
    assert message == "" and not rules


# ── docs/scale.md ────────────────────────────────────────────────────────────

SCALE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


@each_anchor
def test_the_page_shows_the_layout_and_its_sources(anchor):
    rows = [line for line in SCALE.splitlines() if line.startswith(f"| `{anchor['name']}` |")]
    assert len(rows) == 2, "a row of the layout and a row of its plan"
    layout, engine = anchor["layout"], anchor["engine"]
    trainer, sampler = rows[0].split(" | ")[2:4]
    axes = [f"TP{layout['tp']}", f"PP{layout['pp']}", f"CP{layout['cp']}" * (layout["cp"] > 1), f"EP{layout['ep']}"]
    text = " ".join(filter(None, axes))
    for key, where in (("first_stage_layers", "first"), ("last_stage_layers", "last")):
        count = layout[key]
        if count and where == "last" and layout["first_stage_layers"]:
            text += f", {count} last"
        elif count:
            text += f", {count} {'layer' if count == 1 else 'layers'} {where}"
    assert trainer == text + ", AdamW on the host" * (anchor["optimizer"] == "host")
    want = [f"{engine['ranks']} GPUs"] + [f"EP{engine['ep']}"] * (engine["ep"] > 1)
    assert sampler == ", ".join(want + [f"{engine['dp']} copies of attention"] * (engine["dp"] > 1))
    assert f"{anchor['prompts']} x {anchor['samples']}, " in rows[0]
    assert {source["url"] for source in anchor["sources"]} == set(re.findall(r"\((https://[^)]+)\)", rows[0]))
    assert rows[1].split(" | ")[1] == anchor["gpu"]


def test_commands_of_the_walk_name_files_and_models_that_ship():
    commands = re.findall(r"\| `(--config [^`]+)` \|", SCALE)
    assert len(commands) == 12
    worlds = []
    for command in commands:
        flags = given(command.split())
        assert (ROOT / flags["--config"]).is_file() and flags["--gpu"] in GPUS
        assert "--model.path" not in flags or shipped(flags["--model.path"])
        worlds.append(int(flags["--world"]))
    assert worlds == sorted(worlds) and worlds[0] == 1 and worlds[-1] == 1024
