"""The self-check finds the form in which a model is right; one sequence a forward is the same step as packs of them."""

import math
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers

from spmdrl.data.batch import Batch
from spmdrl.policy.attention import packed
from spmdrl.policy.fsdp.policy import FsdpPolicy
from spmdrl.policy.heads import Form
from spmdrl.policy.mixers import layers, rotary
from spmdrl.policy.objectives.likelihood import SftObjective
from spmdrl.policy.self_check import choose_form
from tests.engines.families import make
from tests.ranks.cases import (
    VOCAB,
    build_policy,
    config,
    full_weights,
    relative,
    small_model,
    synthetic_batch,
    update_once,
)
from tests.ranks.harness import run_ranks

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DELTA = {
    "num_key_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 16,
}
LIMIT = '"original_max_position_embeddings": 6'
SINKS = {
    # Sinks that differ between heads; the other weights are drawn again.
    "initializer_range": 1.0,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
FAMILIES = {
    "llama": ("tree", {}),
    "lfm2": ("tree", {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}),
    "qwen3_5_text": ("tree", DELTA),
    "gpt_oss": ("tree", SINKS),
    # Neither calls the attention that is registered: their keys have no borders.
    "bloom": ("apart", {}),
    "xglm": ("apart", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}),
    # Its class of attention is looked up when it is built; the next one hands its attention no keywords.
    "falcon": ("apart", {}),
    "stablelm": ("apart", {"num_key_value_heads": 4}),
}
"""Family -> the form in which it runs, and settings of a small one."""


def family(folder, name: str) -> str:
    """Makes a small model with weights large enough for mistakes to show."""
    settings = transformers.AutoConfig.for_model(name, **SMALL | FAMILIES[name][1])
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(settings)
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.2)
    model.save_pretrained(folder / name)
    return str(folder / name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return {name: family(folder, name) for name in FAMILIES} | {"policy": small_model(folder / "policy", 1)}


def checked(world, path: str, dtype: str = "float32", **policy) -> tuple[FsdpPolicy, str]:
    """Builds a model and settles its form; returns it with the line."""
    said = []
    cfg = config(model={"path": path, "dtype": dtype}, policy={"share_prompts": True} | policy)
    built = build_policy(cfg, world)
    choose_form(built, "policy", f"--model.path {path}", said.append)
    return built, said[0]


def forms(world, paths: dict[str, str], hybrids: bool = True):
    """Settles every family, and holds its log p, gradient and the loss of SFT against plain transformers.

    hybrids: False takes the support of layers without attention away.
    """
    if not hybrids:
        layers.install = lambda hf: None
    out = {}
    for name, path in paths.items():
        state = torch.get_rng_state()
        built, line = checked(world, path)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(p.grad is None for p in built.model.parameters())
        plain = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        lengths = [7, 3, 12]
        tokens = torch.randint(3, VOCAB, (22,), generator=torch.Generator().manual_seed(2))
        mask = torch.tensor([i not in (0, 7, 10) for i in range(22)])
        want = []
        for ids in tokens.split(lengths):
            logp = plain(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
            want.append(logp.gather(1, ids[1:, None])[:, 0])
        got = built.model(built.model.plan(tokens, torch.tensor(lengths), mask), 1.0, forwards=3)[0]
        weight = torch.linspace(-1, 1, 22)[mask]
        (got[mask] * weight).sum().backward()
        (torch.cat(want) * weight).sum().backward()
        theirs = dict(plain.named_parameters())
        mine = {n.removeprefix("hf."): p.grad.full_tensor() for n, p in built.model.named_parameters()}
        scale = max(float(p.grad.abs().max()) for p in theirs.values())
        off = max(float((g - theirs[n].grad).abs().max()) for n, g in mine.items()) / scale
        built.zero_grad()
        batch = Batch(torch.tensor(lengths), {"tokens": tokens, "mask": mask}, {"update": torch.zeros(3).long()})
        told = built.update(batch, SftObjective("nll", world.data_peers)).dump()
        nll = abs(next(total for key, _, total, _ in told if key == "loss") + float(torch.cat(want).mean()))
        out[name] = (built.form, line, float((got[mask] - torch.cat(want)).abs().max()), off, nll)
    return out


def test_each_family_runs_in_a_form_that_is_right(folders):
    paths = {name: folders[name] for name in FAMILIES}
    for name, (form, line, logp, gradient, loss) in run_ranks(forms, 1, paths)[0].items():
        assert form == FAMILIES[name][0], (name, line)
        assert logp < 1e-5 and gradient < 1e-4 and loss < 1e-5, (name, logp, gradient, loss)
        assert f", {name}, float32): packed" in line
        assert ("one sequence a forward" in line) == (form == "apart"), line


def test_a_hybrid_without_support_runs_one_sequence_a_forward(folders):
    ((form, line, logp, gradient, loss),) = run_ranks(forms, 1, {"lfm2": folders["lfm2"]}, False)[0].values()
    assert form == "apart" and "sequences reach each other" in line and logp < 1e-5 and gradient < 1e-4 and loss < 1e-5


SUPPORTED = {
    "lfm2": "layers",
    "qwen3_5_text": "layers",
    "falcon_h1": "layers",
    "mamba2": "layers",
    "jamba": "layers",
    "minimax": "layers",
    "recurrent_gemma": "layers",
    "phi3 longrope": "rotary",
    "gpt_oss": "sinks",
}
"""A family of each kind that has support of its own -> the support."""


def without_support(world, paths: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Settles families with all support taken away; returns the form and the line of each."""
    layers.install = lambda hf: None
    rotary.install = lambda hf: []
    attend = packed._attend
    packed._attend = lambda *args: attend(*args[:-1], None)
    out = {}
    for name, path in paths.items():
        built, line = checked(world, path)
        out[name] = built.form, line
    return out


def test_each_kind_runs_one_sequence_a_forward_where_its_support_is_switched_off(tmp_path):
    paths = {name: str(make(name, tmp_path / name.replace(" ", "_"))) for name in [*SUPPORTED, "llama"]}
    # The shortest of the three sequences has other frequencies than the others.
    file = tmp_path / "phi3_longrope" / "config.json"
    file.write_text(file.read_text().replace('"original_max_position_embeddings": 64', LIMIT))
    found = run_ranks(without_support, 1, paths)[0]
    assert found.pop("llama")[0] == "tree"
    for name, (form, line) in found.items():
        assert form == "apart" and "runs one sequence a forward, slower" in line, (name, line)


def step(world, path: str, form: Form, budget: int):
    """Takes an update in one form, with weights that are gathered by layer."""
    cfg = config(
        model={"path": path, "dtype": "float64"},
        policy={"max_tokens_per_microbatch": budget, "activation_checkpointing": "full", "gather": "layers"},
    )
    policy = build_policy(cfg, world)
    policy.run_as(form)
    update_once(cfg, world, policy, None, synthetic_batch())
    return full_weights(policy)


def test_layout_one_sequence_a_forward_is_the_same_step(folders):
    want = run_ranks(step, 1, folders["policy"], "packed", 4096)[0]
    for n, budget, copies in ((1, 64, 1), (2, 128, 1), (2, 64, 2)):
        for got in run_ranks(step, n, folders["policy"], "apart", budget, dp_replicate=copies):
            assert relative(got, want) < 1e-10, (n, budget)


def test_layout_states_from_trunk_to_branch_are_the_same_step_on_two_ranks(folders):
    want = run_ranks(step, 1, folders["qwen3_5_text"], "apart", 64)[0]
    for got in run_ranks(step, 2, folders["qwen3_5_text"], "tree", 128):
        # transformers computes delta rules in float32.
        assert relative(got, want) < 1e-4


def on_two(world, paths: dict[str, str]):
    """Settles families on ranks that shard each layer or divide tokens; returns form and line, or the refusal."""
    out = {}
    for name, path in paths.items():
        try:
            built, line = checked(world, path, activation_checkpointing="full", gather="layers")
            out[name] = built.form, line
        except ValueError as error:
            out[name] = "refused", str(error)
    return out


def test_ranks_agree_on_the_form_and_refuse_what_cannot_be_divided(folders):
    paths = {name: folders[name] for name in ("llama", "bloom", "stablelm")}
    first, second = run_ranks(on_two, 2, paths)
    assert first == second and [form for form, _ in first.values()] == ["tree", "apart", "apart"]
    # A rank has the sinks of its own heads.
    first, second = run_ranks(on_two, 2, paths | {"gpt_oss": folders["gpt_oss"]}, sp=2)
    assert first == second
    for name in ("llama", "gpt_oss"):
        assert first[name][0] == "tree" and "sp 2" in first[name][1], first[name]
    for name in ("bloom", "stablelm"):
        form, message = first[name]
        assert form == "refused" and "--parallel.sp 2" in message and "set --parallel.sp 1" in message


def broken(world, path: str):
    """Spoils a model in several ways; returns what the check says of each."""
    said = {}

    def head(built):
        lm_head = built.model.hf.lm_head
        lm_head.forward = lambda x, plain=lm_head.forward: 2 * plain(x)

    def later(built):
        base = built.model.hf.base_model

        def forward(*args, plain=base.forward, **kwargs):
            out = plain(*args, **kwargs)
            out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.mean(1, keepdim=True)
            return out

        base.forward = forward

    def raises(built):
        def forward(*args, **kwargs):
            raise RuntimeError("no such kernel")

        built.model.hf.base_model.forward = forward

    for spoil in (head, later, raises):
        built = build_policy(config(model={"path": path}), world)
        spoil(built)
        with pytest.raises(ValueError) as error:
            choose_form(built, "reference", "--reference.path mine", lambda line: None)
        said[spoil.__name__] = str(error.value)
    off = build_policy(config(model={"path": path, "self_check": False}), world)
    choose_form(off, "policy", "--model.path mine", lambda line: said.update(off=line))
    return said


def test_what_is_right_in_no_form_is_refused_by_name(folders):
    said = run_ranks(broken, 1, folders["llama"])[0]
    for name, why in {"head": "the head's numbers", "later": "later tokens", "raises": "no such kernel"}.items():
        assert said[name].startswith("--reference.path mine: llama computes wrong numbers here: ") and why in said[name]
    assert said["off"] == "no self-check of the policy: --model.no-self-check"


def failing_alone(world, path: str):
    """Has the device fail in the check; returns what the check raised."""
    built = build_policy(config(model={"path": path}), world)

    def forward(*args, **kwargs):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    built.model.hf.base_model.forward = forward
    try:
        choose_form(built, "policy", "--model.path mine", lambda line: None)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_an_error_of_the_device_ends_the_check_as_it_is(folders):
    """It is no finding about the family: other ranks, which do not meet it, would wait for this one in a collective."""
    name, message = run_ranks(failing_alone, 1, folders["llama"])[0]
    assert name == "AcceleratorError" and "illegal memory access" in message


def stand_in_of_liger(wrong: str):
    """Returns a stand-in of Liger for Qwen2, which patches what Liger does. wrong: the part that computes nonsense."""
    from transformers.models.qwen2 import modeling_qwen2

    norm, mlp, rotate = modeling_qwen2.Qwen2RMSNorm, modeling_qwen2.Qwen2MLP, modeling_qwen2.apply_rotary_pos_emb

    class LigerNorm(norm):
        def forward(self, x):
            return norm.forward(self, x) * (1.5 if wrong == "norm" else 1)

    def swiglu(self, x):
        return mlp.forward(self, x) * (math.nan if wrong == "mlp" else 1)

    def rope(q, k, cos, sin, unsqueeze_dim=1):
        return rotate(q, k, cos, -sin if wrong == "rope" else sin, unsqueeze_dim)

    def apply(model, **losses):
        modeling_qwen2.apply_rotary_pos_emb, modeling_qwen2.Qwen2RMSNorm = rope, LigerNorm
        for module in model.modules():
            if isinstance(module, norm):
                module.__dict__["forward"] = LigerNorm.forward.__get__(module)
            if isinstance(module, mlp):
                module.__dict__["forward"] = swiglu.__get__(module)

    return SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"qwen2": None}, _apply_liger_kernel_to_instance=apply)


def with_liger(world, path: str, wrong: str) -> list[str]:
    """Settles two models with a stand-in of Liger's layers; returns a line or the message of a refusal for each."""
    from transformers.models.qwen2 import modeling_qwen2

    from spmdrl.policy import liger
    from spmdrl.policy.fsdp import policy

    rope = patch.object(modeling_qwen2, "apply_rotary_pos_emb", modeling_qwen2.apply_rotary_pos_emb)
    use, said = policy.use_liger, []
    transformed = SimpleNamespace(monkey_patch=stand_in_of_liger(wrong))
    modules: dict[str, Any] = {"liger_kernel": SimpleNamespace(), "liger_kernel.transformers": transformed}
    gpu = torch.device("cuda")
    on = patch.object(policy, "use_liger", lambda hf, *given: use(hf, "on", gpu, given[-1]))
    with patch.dict(sys.modules, modules), on, rope, patch.dict(liger._ORIGINALS):
        for dtype in ("float32", "bfloat16"):
            try:
                said.append(checked(world, path, dtype)[1])
            except ValueError as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("wrong", ["", "norm", "mlp", "rope"])
def test_wrong_layers_of_liger_are_refused(folders, wrong):
    for line in run_ranks(with_liger, 1, folders["policy"], wrong)[0]:
        assert ("packed, tree: states differ" in line) == (not wrong), line
        assert ("Liger's layers (--policy.liger off leaves them out) change" in line) == bool(wrong), line
