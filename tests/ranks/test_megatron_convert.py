"""HF models as Megatron policies: the same logits on every layout, and every checkpoint tensor back bit for bit."""

from dataclasses import astuple
from itertools import product
from pathlib import Path

import pytest
import torch

from spmdrl.policy.megatron.layout import Layout, check_model, check_ranks, stages
from spmdrl.weights.reshard import Reshard, catalogue
from tests.ranks.harness import run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

BASE = dict(
    vocab_size=131,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.1,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=20,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=8,
    n_shared_experts=2,
    n_group=4,
    topk_group=1,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
)
GLM = dict(
    head_dim=16,
    attention_bias=True,
    use_qk_norm=True,
    n_routed_experts=8,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
)
GEMMA2 = dict(
    head_dim=16,
    sliding_window=7,
    query_pre_attn_scalar=24,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=5.0,
    tie_word_embeddings=True,
)
FAMILIES = {
    "llama": ("Llama", dict(rope_parameters=LLAMA3)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2_5_vl": ("", {}),
    "qwen3": ("Qwen3", dict(head_dim=16, rope_parameters=YARN)),
    "qwen3_moe": ("Qwen3Moe", dict(head_dim=16, num_experts=4, **EXPERTS, mlp_only_layers=[2])),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT | EXPERTS | dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0)),
    ),
    # As in Moonlight, no groups limit the choice, and queries are not compressed.
    "moonlight": (
        "DeepseekV3",
        LATENT | EXPERTS | dict(n_group=1, topk_group=1, num_experts_per_tok=6, q_lora_rank=None),
    ),
    # As in GLM-4.5: half of a head's channels are turned.
    "glm4_moe": ("Glm4Moe", GLM | EXPERTS),
    "gemma2": ("Gemma2", GEMMA2),
}
MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v3", "moonlight", "glm4_moe")
FEW = {
    "moonlight": (Layout(), Layout(tp=2), Layout(ep=2), Layout(tp=2, ep=2)),
    "glm4_moe": (Layout(), Layout(tp=2), Layout(ep=2), Layout(pp=2), Layout(cp=2), Layout(tp=2, pp=2)),
}
"""Families that share most of their code with another, and the layouts that they are tested on."""
ON_2 = {
    "tp1": Layout(),
    "tp2": Layout(tp=2, sequence_parallel=False),
    "tp2+sp": Layout(tp=2),
    "pp2": Layout(pp=2),
    "pp2 vpp2": Layout(pp=2, virtual_stages=2),
    "pp2 3+1": Layout(pp=2, last_stage_layers=1),
    "pp2 1+3": Layout(pp=2, first_stage_layers=1),
    "ep2": Layout(ep=2),
    "tp2 etp2": Layout(tp=2, etp=2),
    "etp2": Layout(etp=2),
    "cp2": Layout(cp=2),
}
ON_4 = {
    "tp2 pp2": Layout(tp=2, pp=2),
    "tp2 ep2": Layout(tp=2, ep=2),
    "tp2 etp2 ep2": Layout(tp=2, ep=2, etp=2),
    "tp2 cp2": Layout(tp=2, cp=2),
    "tp4": Layout(tp=4),
}
# One sequence of a single token; an odd number in all.
LENGTHS = [[9, 1, 23, 12], [30, 5, 6]]


def fits(family: str, layout: Layout) -> bool:
    """Returns True for a layout that can divide the family; the tests ask for no other."""
    if family in FEW and layout not in FEW[family]:
        return False
    mixture = family in MIXTURES
    if mixture and layout.tp > 1 and not layout.sequence_parallel:
        return False
    return layout.tp <= (4 if family == "deepseek_v3" else 2) and (mixture or layout.ep * layout.etp == 1)


CASES = [(f, n, s) for n, on in ((2, ON_2), (4, ON_4)) for s, layout in on.items() for f in FAMILIES if fits(f, layout)]


def vision(folder, vocab: int) -> str:
    """A random Qwen2.5-VL."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = BASE | dict(vocab_size=vocab, rope_parameters=dict(rope_theta=1e4, mrope_section=[1, 2, 3]))
    tower = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=48)
    ids = {f"{x}_token_id": vocab - 1 - i for i, x in enumerate(("image", "video", "vision_start", "vision_end"))}
    torch.manual_seed(1)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.2 * torch.randn_like(p))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Makes a folder with a random model of each family, nothing in it 0 or 1."""
    import transformers

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    vision(folder / "qwen2_5_vl", 131)
    for name, (prefix, changes) in FAMILIES.items():
        if not prefix:
            continue
        config = getattr(transformers, f"{prefix}Config")(**BASE | changes)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 1:
                    p.add_(0.2 * torch.randn_like(p))
            for key, b in model.named_buffers():
                if "e_score" in key:
                    b.copy_(0.2 * torch.randn_like(b))
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def found(models):
    """Returns (family, layout) -> findings of each rank."""
    out = {}
    for n, layouts in ((2, ON_2), (4, ON_4)):
        for rank in run_ranks(compare_all, n, str(models), {s: astuple(x) for s, x in layouts.items()}, limit=200):
            for key, value in rank.items():
                out.setdefault(key, []).append(value)
    return out


def compare_all(world, folder, layouts, families=tuple(FAMILIES)):
    """Compares every family on every layout: largest difference of logits, differing tensors, ranges held."""
    from spmdrl.policy.megatron.model import initialize

    out = {}
    references = {family: reference(Path(folder) / family) for family in families}
    for name, sizes in layouts.items():
        layout = Layout(*sizes)
        initialize(layout)
        for family in families:
            if fits(family, layout):
                out[family, name] = compare(world, Path(folder) / family, layout, *references[family])
    return out


def packs():
    rng = torch.Generator().manual_seed(3)
    return [(torch.randint(3, 131, (sum(n),), generator=rng), torch.tensor(n)) for n in LENGTHS]


def weights_TV(i):
    """Factors that make a loss of the logits of a pack; it is linear, so that parts of a vocabulary add up."""
    rng = torch.Generator().manual_seed(5 + i)
    return torch.randn(sum(LENGTHS[i]), 131, generator=rng)


def reference(folder):
    """Returns config, tensors, logits [T, V] of every pack, a sequence at a time, and the gradient of each tensor."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from spmdrl.weights.experts import Layout as Packing
    from spmdrl.weights.experts import full_box

    kind = AutoModelForImageTextToText if folder.name == "qwen2_5_vl" else AutoModelForCausalLM
    hf = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits = [torch.cat([hf(t[None]).logits[0] for t in tokens.split(lengths.tolist())]) for tokens, lengths in packs()]
    sum((x * weights_TV(i)).sum() for i, x in enumerate(logits)).backward()
    packing = Packing(hf)
    gradients = {
        slot.name: p.grad[slot.index]
        for name, p in hf.named_parameters()
        if p.grad is not None
        for slot in packing.slots(name, tuple(p.shape), full_box(p.shape))
    }
    return hf.config, load_file(folder / "model.safetensors"), [x.detach() for x in logits], gradients


def run(models, layout, read):
    """Makes one pass over this rank's share of the packs, backward too.

    `read(model, states [S, D], pack, its number)` is a loss, on the last stage.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from spmdrl.data.batch import Batch
    from spmdrl.policy.megatron.attention import make_packs, pack_on_device

    place = parallel_state.get_context_parallel_rank()
    data, copies = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    batches = [Batch(n, {"tokens": x, "mask": torch.ones(len(x), dtype=torch.bool)}) for x, n in packs()]
    made = [pack_on_device(pack, torch.device("cpu")) for pack in make_packs(batches, layout, place, before=True)]
    made = list(enumerate(made))[data::copies]

    def step(data, model):
        i, pack = next(data)
        states = model(pack.tokens, pack.positions, None, packed_seq_params=pack.params)
        return states, lambda output: (read(model, output[0], pack, i), torch.ones((), dtype=torch.int32), {})

    iterators = [iter(made) for _ in models]
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(models) > 1 else iterators[0],
        model=models if len(models) > 1 else models[0],
        num_microbatches=len(made),
        seq_length=made[0][1].tokens.shape[1] * layout.cp,
        micro_batch_size=1,
        forward_only=False,
    )


def compare(world, folder, layout, config, tensors, logits, gradients):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    from spmdrl.policy.megatron import convert
    from spmdrl.policy.megatron.model import build, head_weight

    built = build(config, folder, layout, torch.float32, torch.device("cpu"))
    models = [DistributedDataParallel(m.config, DistributedDataParallelConfig(), m) for m in built]
    cap, seen = getattr(config, "final_logit_softcapping", None), []

    def read(model, states, pack, i):
        model = convert.unwrapped(model)
        weight = head_weight(model)
        first = model.pg_collection.tp.rank() * -(-model.arch.vocab // layout.tp)
        # Backward sums the gradients of the parts of the vocabulary.
        mine = copy_to_tensor_model_parallel_region(states) @ weight.T
        mine = cap * torch.tanh(mine / cap) if cap else mine
        real = pack.rows >= 0
        rows, columns = pack.rows[real], slice(first, first + len(weight))
        seen.append(((mine[real] - logits[i][rows][:, columns]).abs().max().item(), len(rows) * len(weight)))
        return (mine[real] * weights_TV(i)[rows][:, columns]).sum()

    run(models, layout, read)
    finalize_model_grads(models)
    held = convert.slots(models)
    wrong = [h.name for h in held if not torch.equal(h.view, inside(tensors, h))]
    copies = [h.name for h in held if h.view.untyped_storage().data_ptr() != h.param.untyped_storage().data_ptr()]
    slopes = [
        (g.name, ((g.view - want).norm() / want.norm()).item())
        for g in convert.slots(models, lambda p: getattr(p, "main_grad", p))
        if g.name in gradients and (want := inside(gradients, g)).any()
    ]
    return dict(
        difference=max((d for d, _ in seen), default=0.0),
        seen=sum(n for _, n in seen),
        wrong=wrong,
        copies=copies,
        ranges=[(h.name, h.shape, h.box) for h in held],
        scale=max(x.abs().max().item() for x in logits),
        slopes=slopes,
    )


def inside(tensors, held):
    return tensors[held.name][tuple(slice(*r) for r in held.box)]


@pytest.mark.parametrize(("family", "ranks", "layout"), CASES)
def test_parity_of_logits(family, ranks, layout, found):
    results = found[family, layout]
    print(f"{family} {layout} max |dlogits| {max(r['difference'] for r in results):.1e} of {results[0]['scale']:.1f}")
    assert max(r["difference"] for r in results) <= 1e-5
    assert min(r["scale"] for r in results) > 1
    # Every logit was looked at, by one rank.
    assert sum(r["seen"] for r in results) == 131 * sum(map(sum, LENGTHS))


@pytest.mark.parametrize(("family", "ranks", "layout"), CASES)
def test_layout_gradients_after_megatrons_sums(family, ranks, layout, found):
    slopes = [x for r in found[family, layout] for x in r["slopes"]]
    worst = max(slopes, key=lambda x: x[1])
    print(f"{family} {layout} worst gradient {worst[0]} {worst[1]:.1e}")
    assert worst[1] <= 1e-4, sorted(slopes, key=lambda x: -x[1])[:12]


@pytest.mark.parametrize(("family", "ranks", "layout"), CASES)
def test_layout_holds_every_tensor_bit_for_bit(family, ranks, layout, found, models):
    from safetensors.torch import load_file

    results = found[family, layout]
    assert not [name for r in results for name in r["wrong"] + r["copies"]]
    left = {
        name: torch.ones(t.shape, dtype=torch.bool)
        for name, t in load_file(models / family / "model.safetensors").items()
        if not name.startswith("visual.")
    }
    for result in results:
        for name, shape, box in result["ranges"]:
            assert tuple(left[name].shape) == shape
            left[name][tuple(slice(*r) for r in box)] = False
    assert not [name for name, mask in left.items() if mask.any()]


def push_and_score(world, folder):
    """Returns whole tensors on rank 0 through Reshard, on tp 2 x pp 2, and values of a critic without a saved head."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModel

    from spmdrl.policy.megatron import convert
    from spmdrl.policy.megatron.model import build, head_weight, initialize

    cpu, wrong = torch.device("cpu"), []
    for family, layout in (("qwen2", Layout(tp=2, pp=2)), ("deepseek_v3", Layout(tp=2, pp=2, ep=2))):
        initialize(layout)
        path = Path(folder) / family
        pieces = convert.pieces(build(AutoConfig.from_pretrained(path), path, layout, torch.float32, cpu))
        entries = catalogue(pieces, world.host_group)
        needs = [(i, entry.box) for i, entry in enumerate(entries)] if world.is_first else []
        got = {}
        for bucket in Reshard(entries, pieces, needs, world.host_group, cpu, torch.float32, 1 << 16).run(pieces):
            got |= {name: tensor.clone() for name, tensor in bucket.items()}
        want = load_file(path / "model.safetensors") if world.is_first else {}
        wrong += sorted(got.keys() ^ want.keys()) + [name for name in want if not torch.equal(got[name], want[name])]
    path = Path(folder) / "qwen3"
    config = AutoConfig.from_pretrained(path)
    layout = Layout(tp=2, pp=2)
    models = build(config, path, layout, torch.float32, cpu, "value")
    hf, seen = AutoModel.from_pretrained(path, dtype=torch.float32), []
    head = [h for h in convert.slots(models) if h.name == "score.weight"]
    zero = all(not h.view.any() for h in head)
    for h in head:
        h.view.copy_(torch.linspace(-1, 1, 48)[None])

    def read(model, states, pack, i):
        tokens, lengths = packs()[i]
        want = torch.cat([hf(t[None]).last_hidden_state[0] for t in tokens.split(lengths.tolist())])
        real = pack.rows >= 0
        value = states[real] @ head_weight(model).T
        seen.append((value[:, 0] - want[pack.rows[real]] @ torch.linspace(-1, 1, 48)).abs().max().item())
        return value.sum()

    run(models, layout, read)
    return dict(wrong=wrong, zero=zero, heads=len(head), seen=seen)


def test_parity_of_a_push_and_of_a_critic(models):
    ranks = run_ranks(push_and_score, 4, str(models))
    assert not [name for rank in ranks for name in rank["wrong"]]
    assert [rank["heads"] for rank in ranks] == [0, 0, 1, 1] and all(rank["zero"] for rank in ranks)
    assert max(x for rank in ranks for x in rank["seen"]) <= 1e-5
    assert [len(rank["seen"]) for rank in ranks] == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("family", "layout", "says"),
    [
        ("llama", Layout(tp=4), "--parallel.tp 4: the model has 2 key-value heads; --parallel.tp may be 1, 2"),
        ("llama", Layout(pp=3), "pp 3: the model has 4 layers; --parallel.pp may be 1, 2, 4, or .*last-stage-layers 2"),
        ("llama", Layout(pp=3, last_stage_layers=1), "rest of 4 layers .*; --parallel.last-stage-layers may be 2"),
        ("llama", Layout(pp=2, last_stage_layers=4), "--parallel.last-stage-layers 4: .* may be 2, 1, 3"),
        (
            "llama",
            Layout(pp=2, virtual_stages=2, last_stage_layers=3),
            "pipeline ranks hold 1 and 3 of the model's layers",
        ),
        ("llama", Layout(pp=2, virtual_stages=3), "--parallel.virtual-stages may be 1, 2"),
        ("llama", Layout(ep=2), "has no experts"),
        ("qwen3_moe", Layout(ep=3), "--parallel.ep may be 1, 2, 4"),
        ("mixtral", Layout(etp=3), "--parallel.etp 3: the model has 80 columns of an expert"),
        ("deepseek_v3", Layout(tp=2, sequence_parallel=False), "needs sequence parallelism"),
    ],
)
def test_layout_that_does_not_divide_is_refused(family, layout, says, models):
    from transformers import AutoConfig

    from spmdrl.policy.megatron.families import describe

    with pytest.raises(ValueError, match=says):
        check_model(layout, describe(AutoConfig.from_pretrained(models / family)).settings)


def test_layout_of_stages_is_megatrons_own():
    """Every stage, virtual ones too, gets the layers that Megatron computes from the settings handed to it."""
    from transformers import LlamaConfig

    from spmdrl.policy.megatron.families import describe
    from spmdrl.policy.megatron.model import require, transformer_config

    require()
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    seen = 0
    for layers, pp, parts, first, last in product((4, 6, 10), (2, 3, 4), (1, 2), (0, 1, 2, 4), (0, 1, 2, 4)):
        layout = Layout(pp=pp, virtual_stages=parts, first_stage_layers=first, last_stage_layers=last)
        arch = describe(LlamaConfig(**BASE | dict(num_hidden_layers=layers)))
        try:
            check_model(layout, arch.settings)
        except ValueError:
            continue
        seen += 1
        config = transformer_config(arch, layout, torch.float32, torch.device("cpu"))
        counts, end = stages(layout, layers), 0
        # Chunks in the order of the layers: all first parts of the stages, then all second ones.
        for part, rank in product(range(parts), range(pp)):
            virtual = part if parts > 1 else None
            assert get_transformer_layer_offset(config, virtual, rank) == end
            assert get_num_layers_to_build(config, virtual, rank) == counts[rank] // parts
            end += counts[rank] // parts
        assert end == layers
    assert seen > 40


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(tp=2, cp=2, pp=2), "= 8 does not divide 4 ranks"),
        (Layout(ep=3), "--parallel.ep may be 1, 2, 4"),
        (Layout(virtual_stages=2), "needs --parallel.pp of at least 2"),
        (Layout(last_stage_layers=2), "--parallel.last-stage-layers 2 needs --parallel.pp of at least 2"),
        (Layout(first_stage_layers=2), "--parallel.first-stage-layers 2 needs --parallel.pp of at least 2"),
    ],
)
def test_layout_that_does_not_fit_the_ranks_is_refused(layout, says):
    with pytest.raises(ValueError, match=says):
        check_ranks(layout, 4)


def test_models_without_converter_are_refused(models):
    from transformers import AutoConfig, PhiConfig

    from spmdrl.policy.megatron.families import describe

    with pytest.raises(ValueError, match=r"no converter for phi; it has converters for llama, qwen2.*docs/megatron.md"):
        describe(PhiConfig())
    half = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))
    for changes in (dict(attention_bias=True), dict(rope_parameters=LLAMA3 | dict(rope_type="dynamic")), half):
        config = AutoConfig.from_pretrained(models / "llama")
        config.__dict__.update(changes)
        with pytest.raises(ValueError, match="is not supported"):
            describe(config)
