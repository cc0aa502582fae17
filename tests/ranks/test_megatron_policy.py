"""Megatron policies make the same update as FSDP on every layout; a saved model goes on elsewhere."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmdrl.config.checks import check
from spmdrl.config.fields import ConfigError
from spmdrl.hub.folder import TINY
from spmdrl.rl.compose import compose
from tests.ranks.cases import VOCAB, config, small_model, synthetic_batch
from tests.ranks.harness import run_ranks
from tests.ranks.megatron_cases import by_backend, parked, without_tokens
from tests.ranks.test_megatron_convert import BASE, EXPERTS, LATENT, vision

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

# Adam divides by what may be rounding, unless epsilon is above it.
OPTIMIZER = {"lr": 1e-3, "eps": 1e-4, "clip_grad_norm": 0.5, "weight_decay": 1.0}
TWICE = {"updates_per_step": 2}
PRESETS = {
    "grpo": {"algo": {"preset": "grpo", "kl_coef": 0.05, "entropy_coef": 0.01} | TWICE},
    "ppo": {"algo": {"preset": "ppo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"} | TWICE},
    "gspo": {"algo": {"preset": "gspo", "clip_low": 0.05, "clip_high": 0.1} | TWICE},
    "kl_cov": {"algo": {"preset": "kl_cov", "cov_ratio": 0.2, "cov_kl_coef": 0.7} | TWICE},
}
DENSE = {
    1: {"tp1": {}},
    2: {
        "dp2": {},
        "tp2": {"tp": 2, "sequence_parallel": False},
        "tp2+sp": {"tp": 2},
        "pp2": {"pp": 2},
        "cp2": {"cp": 2},
    },
    4: {"tp2 pp2": {"tp": 2, "pp": 2}},
}
MIXTURE = {2: {"ep2": {"ep": 2}, "etp2": {"etp": 2}}, 4: {"tp2 ep2": {"tp": 2, "ep": 2}}}
DEEP = {2: {"pp2 vpp2": {"pp": 2, "virtual_stages": 2}}}
CASES = [("dense", preset, n, s) for preset in PRESETS for n, on in DENSE.items() for s in on]
CASES += [("mixture", preset, n, s) for preset in PRESETS for n, on in MIXTURE.items() for s in on]
CASES += [("deep", preset, n, s) for preset in PRESETS for n, on in DEEP.items() for s in on]
AXES = {
    (kind, s): axes
    for kind, layouts in (("dense", DENSE), ("mixture", MIXTURE), ("deep", DEEP))
    for on in layouts.values()
    for s, axes in on.items()
}
# Name -> ranks, kind of model, preset, axes where it was saved; it goes on on one rank.
MOVES = {
    "tp2": (2, "dense", "grpo", {"tp": 2}),
    "pp2": (2, "dense", "grpo", {"pp": 2}),
    "ep2": (2, "mixture", "grpo", {"ep": 2}),
    "dp2": (2, "dense", "grpo", {}),
    "pp2 vpp2": (2, "deep", "grpo", {"pp": 2, "virtual_stages": 2}),
    "tp2 with a critic": (2, "dense", "ppo", {"tp": 2}),
    "tp2 pp2": (4, "dense", "grpo", {"tp": 2, "pp": 2}),
}
# Name -> kind of model, preset, axes of the two ranks that go on with what one rank saved.
GROWS = {"one rank to tp2": ("dense", "grpo", {"tp": 2})}
METRICS = ("loss", "entropy/mean", "grad_norm")
CHECKPOINT, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
VARIANTS = {
    # Ranks, kind of model, axes, changes to the policy's settings.
    ("full", "tp2"): (2, "dense", {"tp": 2}, CHECKPOINT),
    ("selective", "tp2"): (2, "dense", {"tp": 2}, SELECTIVE),
    ("full", "ep2"): (2, "mixture", {"ep": 2}, CHECKPOINT),
    ("selective", "ep2"): (2, "mixture", {"ep": 2}, SELECTIVE),
    ("host", "tp2"): (2, "dense", {"tp": 2}, {"host_optimizer": True}),
    ("host", "dp2"): (2, "dense", {}, {"host_optimizer": True}),
    ("layers 1+3", "pp2"): (2, "deep", {"pp": 2, "first_stage_layers": 1}, {}),
}
"""Settings that do not change the answer."""
PLAIN = {
    "tp2": ("dense", "grpo", 2, "tp2+sp"),
    "ep2": ("mixture", "grpo", 2, "ep2"),
    "dp2": ("dense", "grpo", 2, "dp2"),
    # Four layers, two on each rank.
    "pp2": ("deep", "grpo", 2, "pp2 vpp2"),
}
TOLD = {
    (2, "ep2"): {"ep": 2},
    (2, "cp2"): {"cp": 2},
    (2, "tp2+sp"): {"tp": 2},
    (2, "pp2 recompute"): {"pp": 2},
    (4, "tp2 ep2"): {"tp": 2, "ep": 2},
}
BALANCED = {
    (1, "deepseek"): {},
    (2, "ep2"): {"ep": 2},
    (2, "cp2"): {"cp": 2},
    (2, "pp2 recompute"): {"pp": 2},
    (4, "tp2 ep2"): {"tp": 2, "ep": 2},
    (4, "tp2 pp2 deepseek"): {"tp": 2, "pp": 2},
}
BALANCE, RATE = 1.0, 0.125


def sections(preset: str) -> dict:
    # Several micro-batches on every layout.
    return {**PRESETS[preset], "optimizer": OPTIMIZER, "policy": {"max_tokens_per_microbatch": 64}}


def mixture(folder, seed: int) -> str:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=47,
        hidden_size=32,
        intermediate_size=40,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        # transformers leaves the padding token's at 0, where a norm's gradient is a thousandfold, and clipping to it
        # leaves nothing of all others.
        torch.manual_seed(seed)
        model.get_input_embeddings().weight[0] = 0.15 * torch.randn(32)
    model.save_pretrained(folder)
    return str(folder)


def deepseek(folder) -> str:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(5)
    changes = LATENT | EXPERTS | {"vocab_size": VOCAB, "num_nextn_predict_layers": 1}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**BASE | changes))
    with torch.no_grad():
        for name, b in model.named_buffers():
            if "e_score" in name:
                b.copy_(0.2 * torch.randn_like(b))
    model.save_pretrained(folder)
    return str(folder)


def with_heads(source: str, folder: Path) -> str:
    """Makes the same checkpoint with a layer behind the last, in a file and a type of its own."""
    shutil.copytree(source, folder)
    # Many models have it; transformers reads but does not write it.
    (folder / "generation_config.json").write_text('{"temperature": 0.6,  "top_p": 0.9, "eos_token_id": 2}')
    heads = {
        f"model.layers.4.{n}.weight": torch.randn(s).bfloat16()
        for n, s in (("eh_proj", (48, 96)), ("enorm", (48,)), ("shared_head.head", (VOCAB, 48)))
    }
    save_file(heads, folder / "heads.safetensors", {"format": "pt"})
    files = {n: "model.safetensors" for n in load_file(folder / "model.safetensors")} | dict.fromkeys(
        heads, "heads.safetensors"
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns kind of model -> part -> folder; the critic beside a mixture is dense."""
    root = tmp_path_factory.mktemp("models")
    critic = small_model(root / "critic", 2, True)
    out = {}
    # Seeds with which no loss nearly cancels: what float32 keeps of one that does differs by more than 1e-5.
    for kind, layers, seed in (("dense", 2, 0), ("deep", 4, 10)):
        parts = {
            n: small_model(root / f"{kind}_{n}", seed + i, num_hidden_layers=layers)
            for i, n in enumerate(("policy", "reference"))
        }
        own = small_model(root / f"{kind}_critic", 2, True, num_hidden_layers=layers)
        out[kind] = parts | {"critic": own}
    out["mixture"] = {n: mixture(root / f"mixture_{n}", 7 + i) for i, n in enumerate(("policy", "reference"))}
    out["mixture"]["critic"] = critic
    out["deepseek"] = {"policy": deepseek(root / "deepseek")}
    out["heads"] = {"policy": with_heads(out["deepseek"]["policy"], root / "heads")}
    out["vision"] = {"policy": vision(root / "vision", 47)}
    for kind in ("deepseek", "heads", "vision"):
        out[kind]["reference"] = out[kind]["policy"]
    for folder in root.iterdir():
        # Saving asks for one.
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / name, folder)
    return out


def variant(changes: dict) -> dict:
    base = sections("grpo")
    return base | {"policy": base["policy"] | changes}


def balanced(name: str) -> dict:
    """Settings under which an update comes from the loss for evenly used experts alone."""
    changes = {"moe_aux_loss": BALANCE, "moe_bias_rate": RATE if "deepseek" in name else 0.0}
    policy = {"max_tokens_per_microbatch": 64, **changes, **(CHECKPOINT if "recompute" in name else {})}
    return {"policy": policy, "optimizer": {"lr": 1e-3, "eps": 1e-3}}


def halved(dtype: str) -> dict:
    return sections("grpo") | {"model": {"dtype": dtype}, "optimizer": OPTIMIZER | {"clip_grad_norm": 0.0}}


def kept(folders) -> list:
    """Cases that save with heads for further tokens, and without."""
    return [(how, {}, {"policy": {"mtp": how}}, folders["heads"]) for how in ("keep", "skip")]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def one_fsdp(folders, root):
    """Results of `by_backend` for FSDP on one rank."""
    pairs = sorted({case[:2] for case in CASES})
    return run_ranks(
        by_backend,
        1,
        "fsdp",
        root,
        [((k, p), {}, sections(p), folders[k]) for k, p in pairs],
        [("told", {}, sections("grpo"), folders["mixture"])],
        [],
        [(d, {}, halved(d), folders["dense"]) for d in ("float32", "bfloat16")],
        kept(folders),
        limit=300,
    )[0]


@pytest.fixture(scope="module")
def by_fsdp(one_fsdp):
    """Returns (kind, preset) -> (metrics, weights)."""
    return one_fsdp[0]


@pytest.fixture(scope="module")
def everything(folders, root):
    """Returns number of ranks -> dicts as of `by_backend`, each: case -> results of all ranks; made on request."""

    @cache
    def of(n: int) -> tuple:
        # What one rank saves, two go on with.
        assert n != 2 or of(1)
        steps = [(c, AXES[c[0], c[3]], sections(c[1]), folders[c[0]]) for c in CASES if c[2] == n]
        steps += [(k, axes, variant(more), folders[m]) for k, (ranks, m, axes, more) in VARIANTS.items() if ranks == n]
        told = [
            (k, axes, variant(CHECKPOINT if "recompute" in k[1] else {}), folders["mixture"])
            for k, axes in TOLD.items()
            if k[0] == n
        ]
        even = [
            (k, axes, balanced(k[1]), folders["deepseek" if "deepseek" in k[1] else "mixture"])
            for k, axes in BALANCED.items()
            if k[0] == n
        ]
        half = [("bfloat16", {"tp": 2}, halved("bfloat16"), folders["dense"])] if n == 2 else []
        moves = [(k, axes, sections(p), folders[m]) for k, (ranks, m, p, axes) in MOVES.items() if n == ranks]
        keep = [*kept(folders), ("vision", {}, {}, folders["vision"])] if n == 1 else []
        grows = [(k, axes if n == 2 else {}, sections(p), folders[m]) for k, (m, p, axes) in GROWS.items() if n < 4]
        out = {}, {}, {}, {}, {}
        for rank in run_ranks(by_backend, n, "megatron", root, steps, told, even, half, keep, moves, grows, limit=300):
            for into, found in zip(out, rank, strict=True):
                for key, value in found.items():
                    into.setdefault(key, []).append(value)
        return out

    return of


@pytest.fixture(scope="module")
def resumed(folders, root, everything):
    """Returns move -> result of one rank that goes on with the save of others."""
    assert everything(2) and everything(4)
    moves = [(k, {}, sections(p), folders[m]) for k, (_, m, p, _) in MOVES.items()]
    return run_ranks(by_backend, 1, "megatron", root, (), (), (), (), (), moves)[0][4]


def worst(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max((a[n] - b[n]).abs().max().item() for n in a)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_parity_with_fsdp(case, by_fsdp, everything):
    want, weights = by_fsdp[case[:2]]
    results = everything(case[2])[0][case]
    names = [m for m in want if m.removeprefix("critic/") in METRICS or m in ("kl/mean", "clip_fraction")]
    for metrics, _ in results:
        for name in names:
            assert abs(metrics[name] - want[name]) <= 1e-5 * max(abs(want[name]), 1e-2), (
                name,
                metrics[name],
                want[name],
            )
    moved = worst(results[0][1], weights)
    print(case, f"weights {moved:.1e}", {m: f"{results[0][0][m] / (want[m] or 1) - 1:.1e}" for m in names})
    assert moved <= 1e-5
    assert want["grad_norm"] > 0.05


@pytest.mark.parametrize("case", VARIANTS, ids=" ".join)
def test_layout_settings_that_change_nothing(case, everything):
    by_megatron = everything(2)[0]
    (want, weights), (got, changed) = by_megatron[PLAIN[case[1]]][0], by_megatron[case][0]
    print(case, f"{worst(weights, changed):.1e}", {m: f"{got[m] - want[m]:.1e}" for m in METRICS})
    assert all(abs(want[m] - got[m]) <= 1e-6 * max(1.0, abs(want[m])) for m in METRICS)
    assert worst(weights, changed) <= 1e-6


@pytest.mark.parametrize("how", ["full", "selective"])
def test_layers_run_again_as_often_as_recompute_says(how, everything):
    """Wherever there is a gradient, `full` runs attention and MLPs again, and `selective` runs attention alone."""
    by_megatron = everything(2)[0]
    plain, again = by_megatron[PLAIN["tp2"]], by_megatron[how, "tp2"]
    for (without, _), (with_it, _) in zip(plain, again, strict=True):
        more = {kind: with_it[kind] - without[kind] for kind in ("forwards/attention", "forwards/mlp")}
        trained = without["forwards/trained"]
        print(how, more, trained)
        assert without["forwards/attention"] == without["forwards/mlp"] > trained > 0
        assert more == {"forwards/attention": trained, "forwards/mlp": trained if how == "full" else 0}


@pytest.mark.parametrize("case", TOLD, ids=lambda case: " ".join(map(str, case)))
def test_parity_of_replayed_experts(case, everything, one_fsdp, by_fsdp):
    logp, want, weights = one_fsdp[1]["told"]
    ranks = everything(case[0])[1][case]
    found = {name: x for rank in ranks for name, x in rank[0].items()}
    assert found.keys() == logp.keys()
    difference = max((found[n] - logp[n]).abs().max().item() for n in logp)
    print(case, f"logp {difference:.1e}, weights {worst(weights, ranks[0][2]):.1e}")
    assert difference <= 1e-5 and worst(weights, ranks[0][2]) <= 1e-5
    for metrics in (rank[1] for rank in ranks):
        assert all(abs(metrics[m] - want[m]) <= 1e-5 * max(abs(want[m]), 1e-2) for m in METRICS)
    # The choice matters: without it the same update ends far outside these bounds.
    own, free = by_fsdp["mixture", "grpo"]
    assert abs(own["loss"] - want["loss"]) > 1e-3 and worst(free, weights) > 1e-3


def even_update(folder: str, rate: float) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Mean loss for evenly used experts, its gradient's norm, weights after AdamW's step: the papers' formulas."""
    from transformers import AutoModelForCausalLM

    from spmdrl.hub.routing import Routers, _is_router
    from spmdrl.weights.experts import Layout, full_box

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    # A padding token is read like any other.
    hf.get_input_embeddings().padding_idx = None
    seen = {}
    gates = [m for m in hf.modules() if _is_router(m)]
    for gate in gates:
        gate.register_forward_hook(lambda m, args, out: seen.__setitem__(m, args[0].flatten(0, -2) @ m.weight.T))
    routers, k = Routers(hf, recording=True), hf.config.num_experts_per_tok
    sequences = [t.tokens for t in synthetic_batch()]
    loss, experts = torch.zeros(()), gates[0].weight.shape[0]
    loads = torch.zeros(len(gates), experts)
    for tokens in sequences:
        hf(tokens[None])
        loads += torch.nn.functional.one_hot(routers.take().long(), experts).sum((0, 2))
        for gate in gates:
            logits = seen[gate]
            scores = logits.softmax(-1)
            if rate:
                scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
            f = torch.nn.functional.one_hot(scores.topk(k).indices, experts).float().sum(1).mean(0) * experts / k
            loss = loss + len(tokens) * (f * scores.mean(0)).sum()
    total = sum(map(len, sequences))
    (BALANCE * loss / total).backward()
    for p in hf.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    norm = torch.cat([p.grad.flatten() for p in hf.parameters()]).norm().item()
    torch.optim.AdamW(hf.parameters(), 1e-3, (0.9, 0.99), eps=1e-3, weight_decay=0.0).step()
    layout, out = Layout(hf), {}
    if rate:
        for gate, load in zip(gates, loads, strict=True):
            gate.e_score_correction_bias += rate * torch.sign(load.mean() - load)
    kept = hf.state_dict()
    for name, x in [*hf.named_parameters(), *((n, b) for n, b in hf.named_buffers() if n in kept)]:
        for slot in layout.slots(name, tuple(x.shape), full_box(x.shape)):
            out[f"policy/{slot.name}"] = x.detach()[slot.index]
    return loss.item() / total / len(gates), norm, out


@pytest.mark.parametrize("case", BALANCED, ids=lambda case: " ".join(map(str, case)))
def test_layout_loss_and_bias_for_evenly_used_experts(case, everything, folders):
    kind = "deepseek" if "deepseek" in case[1] else "mixture"
    loss, norm, want = even_update(folders[kind]["policy"], RATE if kind == "deepseek" else 0.0)
    ranks = everything(case[0])[2][case]
    weights = ranks[0][1]
    before = load_file(f"{folders[kind]['policy']}/model.safetensors")
    moved = max((want[f"policy/{n}"] - x).abs().max().item() for n, x in before.items())
    print(case, f"loss {ranks[0][0]['moe/aux_loss']:.6f} {loss:.6f}, weights {worst(weights, want):.1e} of {moved:.1e}")
    for metrics, _ in ranks:
        assert abs(metrics["moe/aux_loss"] - loss) <= 1e-5 * loss
        assert abs(metrics["grad_norm"] - norm) <= 1e-5 * norm
    assert worst(weights, want) <= 1e-5
    biases = [n for n in want if n.endswith("e_score_correction_bias")]
    assert len(biases) == (3 if kind == "deepseek" else 0)
    for name in biases:
        steps = (weights[name] - before[name.removeprefix("policy/")]) / RATE
        assert set(steps.round(decimals=4).tolist()) <= {-1.0, 0.0, 1.0} and steps.abs().sum() > 0
    gates = [n for n in want if n.endswith("gate.weight")]
    assert all((want[n] - before[n.removeprefix("policy/")]).abs().max() > 1e-5 for n in gates)


@pytest.mark.parametrize("move", MOVES)
def test_resume_on_another_layout(move, everything, resumed):
    metrics, weights, saved = everything(MOVES[move][0])[4][move][0]
    again, got, loaded = resumed[move]
    assert worst(saved, loaded) == 0
    for name in METRICS:
        assert abs(metrics[name] - again[name]) <= 1e-6 * max(1.0, abs(metrics[name])), name
    # Without its moments AdamW would go elsewhere by 1e-3, its learning rate.
    print(move, f"{worst(weights, got):.1e}")
    assert worst(weights, got) <= 1e-6 and worst(saved, weights) > 1e-4
    assert any(name.startswith("critic/") for name in saved) == ("critic" in move)


@pytest.mark.parametrize("move", GROWS)
def test_resume_on_more_ranks(move, everything):
    metrics, weights, saved = everything(1)[4][move][0]
    again, got, loaded = everything(2)[4][move][0]
    print(move, f"{worst(weights, got):.1e}")
    assert worst(saved, loaded) == 0
    for name in METRICS:
        assert abs(metrics[name] - again[name]) <= 1e-6 * max(1.0, abs(metrics[name])), name
    assert worst(weights, got) <= 1e-6 and worst(saved, weights) > 1e-4


def test_saving_leaves_no_process_behind(everything):
    assert [everything(n)[4]["children"] for n in (2, 4)] == [[[]] * 2, [[]] * 4]


def test_parity_of_bfloat16(everything, one_fsdp):
    exact, half = one_fsdp[3]["float32"], one_fsdp[3]["bfloat16"]
    ours = everything(2)[3]["bfloat16"][0]

    for i, what in enumerate(("logp", "gradient")):
        assert exact[i].keys() == half[i].keys() == ours[i].keys()
        flat = [torch.cat([x[i][n].flatten().float() for n in sorted(exact[i])]) for x in (exact, half, ours)]
        theirs, mine = ((x - flat[0]).norm() / flat[0].norm() for x in flat[1:])
        print(f"{what}: FSDP {theirs:.1e}, Megatron {mine:.1e}")
        assert 1e-4 < mine <= 2 * theirs < 0.5


def saved_tensors(folder) -> dict[str, torch.Tensor]:
    """All tensors of a folder; the index must list each where it is."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        assert tensors.keys() == {n for n, f in index.items() if f == file.name}
        found |= tensors
    assert found.keys() == index.keys()
    return found


@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
@pytest.mark.parametrize("how", ["keep", "skip"])
def test_heads_for_further_tokens_are_kept_or_left_out(how, kind, everything, one_fsdp, root, folders):
    from transformers import AutoModelForCausalLM

    assert kind == "fsdp" or everything(1)
    folder = Path(root) / f"{kind} {how}" / "model"
    got, start = saved_tensors(folder), saved_tensors(Path(folders["heads"]["policy"]))
    heads = {n for n in start if n.startswith("model.layers.4.")}
    assert len(heads) == 3 and got.keys() == (start.keys() if how == "keep" else start.keys() - heads)
    assert all(torch.equal(got[n], start[n]) and got[n].dtype == start[n].dtype for n in got)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(model.lm_head.weight, start["lm_head.weight"])
    name = "generation_config.json"
    assert (folder / name).read_bytes() == (Path(folders["heads"]["policy"]) / name).read_bytes()
    assert (folder / "tokenizer.json").is_file()


def test_heads_that_are_not_there_are_refused(folders):
    from transformers import AutoConfig

    from spmdrl.weights.safetensors import prediction_heads

    folder = Path(folders["dense"]["policy"])
    with pytest.raises(ValueError, match="--policy.mtp keep: .* has no multi-token prediction heads: use skip"):
        prediction_heads(folder, AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize(
    ("backend", "settings", "says"),
    [
        (
            "fsdp",
            SELECTIVE,
            "--policy.activation-checkpointing selective: needs --policy.backend megatron; take full or none",
        ),
        ("fsdp", {"moe_aux_loss": 0.1}, "--policy.moe-aux-loss 0.1: needs --policy.backend megatron"),
        ("fsdp", {"moe_bias_rate": 0.1}, "--policy.moe-bias-rate 0.1: needs --policy.backend megatron"),
        ("megatron", {"moe_aux_loss": -1.0}, "--policy.moe-aux-loss -1.0: must be 0 or more"),
    ],
)
def test_settings_that_fit_nothing_are_refused(backend, settings, says):
    cfg = config(policy={"backend": backend, **settings})
    with pytest.raises(ConfigError) as error:
        check(cfg, 1)
    assert says in str(error.value)
    fitting = SELECTIVE | {"moe_aux_loss": 0.1, "moe_bias_rate": 0.1}
    check(config(policy={"backend": "megatron", **fitting}, rollout={"routing_replay": True}), 1)


@pytest.mark.parametrize("name", ["moe_aux_loss", "moe_bias_rate"])
def test_balance_is_over_sequences_without_advantage_too(name):
    cfg = config(policy={"backend": "megatron", name: 0.1}, algo={"skip_zero_advantage": True})
    with pytest.raises(ConfigError) as error:
        check(cfg, 1)
    (line,) = (line for line in str(error.value).splitlines() if "skip-zero-advantage" in line)
    assert f"--policy.{name.replace('_', '-')} 0.1 depends on the tokens of every sequence" in line
    assert not compose(cfg).skip_zero_advantage


def test_balance_of_a_model_without_experts_is_refused(folders):
    from transformers import AutoConfig

    from spmdrl.policy.megatron.policy import balancing

    for kind, field, says in (
        ("dense", "moe_aux_loss", "--policy.moe-aux-loss 0.5: qwen2 has no experts"),
        ("mixture", "moe_bias_rate", "--policy.moe-bias-rate 0.5: routers of qwen3_moe have no bias"),
    ):
        settings, model = config(policy={field: 0.5}).policy, AutoConfig.from_pretrained(folders[kind]["policy"])
        assert balancing(settings, model, False) == (0.0, 0.0)
        with pytest.raises(ValueError, match=says):
            balancing(settings, model, True)


def test_a_vision_tower_is_saved_as_it_is(everything, root, folders):
    from transformers import AutoModelForImageTextToText

    assert everything(1)
    folder = Path(root) / "megatron vision" / "model"
    start = load_file(Path(folders["vision"]["policy"]) / "model.safetensors")
    got = saved_tensors(folder)
    assert got.keys() == start.keys() and all(torch.equal(got[n], start[n]) for n in got)
    assert sum(n.startswith("visual.") for n in got) > 4
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(model.model.visual.merger.ln_q.weight, start["visual.merger.ln_q.weight"])


def test_parity_of_excluded_tokens_over_a_divided_vocabulary(folders):
    got = run_ranks(without_tokens, 2, folders["dense"], {"tp": 2}, "megatron")[0]
    want = run_ranks(without_tokens, 1, folders["dense"], {}, "fsdp")[0]
    assert torch.equal(got[2], want[2]) and torch.equal(got[0].isinf(), want[0].isinf()) and want[0].isinf().any()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)


def test_offload_changes_nothing(folders):
    for plain, away in run_ranks(parked, 2, {"tp": 2}, sections("ppo"), folders["dense"]):
        assert plain[0] == away[0] and (not plain[1] or worst(plain[1], away[1]) == 0)
        before, gone, after, on_disk = away[2]
        assert before == after and min(before.values()) > 0 and not any(gone.values())
        assert on_disk == before["parameters"] + before["optimizer"], "gradients are let go"
