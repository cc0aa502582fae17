"""The HF engine over two ranks: the same samples as on one, each rank with its part of the weights."""

import weakref
from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spmdrl.config.schema import Config
from spmdrl.engines.build import check_engine, check_tp
from spmdrl.engines.engine import Request, model_config
from spmdrl.engines.hf.engine import HFEngine
from spmdrl.hub.vision import part_of
from spmdrl.plan.engine import PaperEngine
from spmdrl.session.transfer import Transfer
from tests.ranks.cases import build_policy, config, small_model
from tests.ranks.harness import run_ranks


def drain(engine, requests) -> dict:
    done = {}
    for request in requests:
        engine.submit(request)
    while len(done) < len(requests):
        done |= {c.key: (c.tokens, c.logp) for c in engine.poll()}
    return done


class Allocated(TorchDispatchMode):
    """Adds up all memory that is allocated inside of it, also what is freed again."""

    def __init__(self):
        super().__init__()
        self.storages: dict[weakref.ref, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type == "cpu" and not func.is_view:
            storage = out.untyped_storage()
            self.storages[weakref.ref(storage)] = storage.nbytes()
        return out


def sampled(world, folder, tp, quantization="none", deterministic=False):
    """Returns (samples, bytes of weights, push report) after a push of other weights than the folder's."""
    cfg = config(
        model={"path": folder, "dtype": "float64"},
        rollout={"tp": tp, "quantization": quantization, "deterministic": deterministic},
    )
    policy = build_policy(cfg, world)
    with Allocated() as made:
        engine = HFEngine(cfg, world, {2})
    with torch.no_grad():
        for name, p in policy.named_weights():
            p.mul_(1.1) if "norm" not in name else None
    report = Transfer(world, policy, engine, torch.float64, 1 << 14).push(0)
    requests = [
        Request((i, s), [3 + i, 5, 7 + s][: 2 + i % 2], 91 + 7 * i + s, 0, 6, t)
        for i in range(4)
        for s, t in enumerate((0.0, 1.0, 1.5))
    ]
    own = sum(p.numel() * p.element_size() for p in engine.model.parameters())
    # Beside the parameters there are a table of rotary frequencies and the end tokens.
    assert own <= sum(made.storages.values()) <= own + 256
    return drain(engine, requests), own, report


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model"))


def model_with_norms_of_heads(folder, kind: str) -> str:
    """A random model whose queries and keys have norms, which transformers' plan treats as replicated."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(vocab_size=47, hidden_size=32, intermediate_size=40, num_hidden_layers=2, head_dim=8)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.15)
    config = AutoConfig.for_model(kind, **sizes, **heads, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).double()
        for name, p in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(p, 0.5, 0.3)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma3_text"])
def test_layout_hf_engine_over_two_ranks_samples_the_same(kind, folder, tmp_path):
    if kind != "qwen2":
        folder = model_with_norms_of_heads(tmp_path, kind)
        check_tp(config(model={"path": folder}, rollout={"tp": 2}), "hf")
    ((want, whole, _),) = run_ranks(sampled, 1, folder, 1)
    for got, own, report in run_ranks(sampled, 2, folder, 2, rollout_tp=2):
        assert got.keys() == want.keys()
        for key, (tokens, logp) in want.items():
            assert got[key][0] == tokens and got[key][1] == pytest.approx(logp, abs=1e-10), key
        assert own < 0.75 * whole and report.deep
        assert report.bytes == own and report.received < 1.1 * own


def seen(world, folder, family, tp):
    """Returns samples of prompts with images after a push, and the number of weights by part of the model."""
    from tests.unit.test_hf_engine_images import requests_of
    from tests.unit.vision_packs import facts

    cfg = config(model={"path": folder, "dtype": "float64"}, rollout={"tp": tp})
    policy, engine = build_policy(cfg, world), HFEngine(cfg, world, {2})
    Transfer(world, policy, engine, torch.float64, 1 << 14).push(0)
    sizes: dict[str, int] = {}
    for name, p in engine.model.named_parameters():
        part = part_of(name, facts(family)[0])
        sizes[part] = sizes.get(part, 0) + p.numel()
    on_paper = PaperEngine(cfg, world, model_config(cfg), None)
    assert on_paper.weight_bytes == 8 * sum(sizes.values()) and not on_paper.unknown
    return drain(engine, requests_of(family) + requests_of(family, [(2,)], first=20, temperature=0.0)), sizes


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_layout_hf_engine_over_two_ranks_samples_prompts_with_images(family, tmp_path):
    """The language model is divided, and both ranks have the vision tower."""
    from tests.unit.vision_packs import save

    folder = save(family, tmp_path)
    check_tp(config(model={"path": folder}, rollout={"tp": 2}), "hf")
    ((want, whole),) = run_ranks(seen, 1, folder, family, 1)
    for got, sizes in run_ranks(seen, 2, folder, family, 2, rollout_tp=2):
        assert got.keys() == want.keys()
        for key, (tokens, logp) in want.items():
            assert got[key][0] == tokens and got[key][1] == pytest.approx(logp, abs=1e-10), key
        assert sizes["vision"] == whole["vision"] and sizes["projector"] == whole["projector"]
        assert sizes["language"] < 0.85 * whole["language"]


@pytest.mark.parametrize(("kind", "worst"), [("int8", 0.15), ("fp8", 0.6)])
def test_quantized_engine_is_near_the_trainer_and_small(folder, kind, worst):
    ((want, whole, _),) = run_ranks(sampled, 1, folder, 1)
    ((got, own, report),) = run_ranks(sampled, 1, folder, 1, kind)
    first = [abs(got[key][1][0] - logp[0]) for key, (tokens, logp) in want.items() if got[key][0][0] == tokens[0]]
    assert len(first) >= 8 and 0 < max(first) < worst
    assert own < 0.4 * whole and report.deep  # of what is not rounded


def test_layout_deterministic_hf_engine_is_the_same_in_any_company(folder):
    ((alone, *_),) = run_ranks(sampled, 1, folder, 1, "none", True)
    ((together, *_),) = run_ranks(sampled, 1, folder, 1)
    for key, (tokens, logp) in alone.items():
        assert together[key][0] == tokens and together[key][1] == pytest.approx(logp, abs=1e-12)


def test_a_model_that_the_hf_engine_cannot_divide_is_refused_before_anything_is_built(folder, tmp_path):
    """Only the config exists, of a mixture of experts, and of a model that transformers has no plan for."""
    from safetensors.torch import save_file
    from transformers import OPTConfig, Qwen3MoeConfig

    moe = Qwen3MoeConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    opt = OPTConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
    for i, (model, name, why) in enumerate(
        [(moe, "Qwen3MoeForCausalLM", "moe_tp_experts"), (opt, "opt", "no tensor-par")]
    ):
        path = tmp_path / str(i)
        path.mkdir()
        save_file({}, path / "model.safetensors")
        model.architectures = [name]
        model.save_pretrained(path)
        cfg = config(model={"path": str(path)}, rollout={"tp": 2})
        with pytest.raises(ValueError, match=rf"--rollout.tp 2: the hf engine cannot divide {name} \(.*{why}"):
            check_engine(cfg, True)
        for engine, tp in (("hf", 1), ("vllm", 2)):
            fits = config(model={"path": str(path)}, rollout={"engine": engine, "tp": tp})
            check_tp(fits, engine)
            if engine == "hf" or find_spec(engine):
                check_engine(fits, True)


@pytest.mark.parametrize(("engine", "tp", "fits"), [("hf", 3, "1, 2"), ("hf", 4, "1, 2"), ("vllm", 3, "1, 2, 4")])
def test_tp_that_does_not_fit_the_heads_is_refused(folder, engine, tp, fits):
    cfg = Config()
    cfg.model.path, cfg.rollout.tp = folder, tp
    with pytest.raises(ValueError, match=f"has 4 attention heads and 2 key-value heads.*; {engine} takes {fits}$"):
        check_tp(cfg, engine)
