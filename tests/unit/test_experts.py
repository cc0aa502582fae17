"""Models with experts: their parameters as checkpoint tensors, and the choice of experts recorded and made again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from spmdrl.hub.routing import FREE, Routers, experts_of
from spmdrl.policy.attention import packed as attention
from spmdrl.policy.fsdp.layers import recompute
from spmdrl.policy.heads import PackedLM
from spmdrl.policy.learner import Learner
from spmdrl.spmd.world import World
from spmdrl.weights.boxes import Piece
from spmdrl.weights.experts import Layout, full_box

SMALL = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.2,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPED = dict(n_routed_experts=8, n_shared_experts=1, n_group=4, topk_group=2, first_k_dense_replace=1)
MLA = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4)
SPARSE = dict(num_experts=8, decoder_sparse_step=2)
FAMILIES: dict[str, tuple[str, dict]] = {
    "qwen3_moe": ("Qwen3MoeConfig", SPARSE | {"head_dim": 8, "mlp_only_layers": [], "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2MoeConfig", SPARSE | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [0]}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8}),
    "deepseek_v3": ("DeepseekV3Config", GROUPED | MLA),
    "glm4_moe": ("Glm4MoeConfig", GROUPED | {"head_dim": 8, "n_group": 1, "topk_group": 1}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 8, "num_local_experts": 8}),
    "dense": ("Qwen3Config", {"head_dim": 8}),
}
WITH_EXPERTS = [name for name in FAMILIES if name != "dense"]
LENGTHS = [40, 67, 4]


def make(family: str, dtype=torch.float64, attn: str = "eager", seed: int = 0):
    name, changes = FAMILIES[family]
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**SMALL | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn, experts_implementation="eager").to(dtype)
    with torch.no_grad():
        for name, x in model.state_dict().items():
            # Routers that differ between tokens, and a correction bias that is not zero.
            x.add_(torch.randn_like(x) * (0.5 if "gate" in name or "router" in name else 0.1))
    torch.set_rng_state(state)
    return model.eval()


def tokens(n: int = sum(LENGTHS)) -> torch.Tensor:
    return torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(n))


# ── checkpoints ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_are_what_save_pretrained_writes_and_from_pretrained_reads(family, tmp_path):
    model = make(family, torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    want = load_file(tmp_path / "theirs" / "model.safetensors")
    layout, parameters = Layout(model), dict(model.named_parameters())
    places = layout.places([(name, tuple(p.shape)) for name, p in parameters.items()])
    got = {name: parameters[parameter].detach()[index] for name, (parameter, index) in places.items()}
    buffers = {name for name, _ in model.named_buffers()} & set(model.state_dict())
    assert set(got) | buffers == set(want)
    assert all(torch.equal(got[name], want[name]) for name in got)
    assert all(x.untyped_storage().data_ptr() == parameters[places[n][0]].data_ptr() for n, x in got.items()), "views"
    (tmp_path / "ours").mkdir()
    model.config.save_pretrained(tmp_path / "ours")
    tensors = got | {name: model.state_dict()[name] for name in buffers}
    save_file({n: x.clone() for n, x in tensors.items()}, tmp_path / "ours" / "model.safetensors", {"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_layout_of_shards_puts_the_same_tensors_together(family, dim, tmp_path):
    """Every shard names the part of a checkpoint tensor that it holds; shards of any dimension fill them, and back."""
    model = make(family, torch.float32)
    model.save_pretrained(tmp_path)
    want = load_file(tmp_path / "model.safetensors")
    layout, seen = Layout(model), {}
    for name, p in model.named_parameters():
        along = min(dim, p.dim() - 1)
        for shard in torch.arange(p.shape[along]).tensor_split(5):
            lo = int(shard[0]) if len(shard) else 0
            box = tuple((lo, lo + len(shard)) if d == along else pair for d, pair in enumerate(full_box(p.shape)))
            local = p.detach().narrow(along, lo, len(shard))
            filled = torch.full_like(local, torch.nan)
            for slot in layout.slots(name, tuple(p.shape), box):
                cut = tuple(slice(*pair) for pair in slot.box)
                assert slot.shape == want[slot.name].shape
                seen.setdefault(slot.name, torch.full(slot.shape, torch.nan))[cut] = local[slot.index]
                filled[slot.index] = want[slot.name][cut]
            assert torch.equal(filled, local), name
    assert all(torch.equal(x, want[name]) for name, x in seen.items())
    assert set(want) - set(seen) <= {name for name, _ in model.named_buffers()}


# ── routing replay ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_routers_of_a_family_are_recorded(family, tmp_path):
    model = make(family)
    blocks = [i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    plain = model(tokens()[None]).logits
    seen = {}
    for i in blocks:
        model.model.layers[i].mlp.experts.register_forward_pre_hook(lambda _, args, i=i: seen.update({i: args[1]}))
    routers = Routers(model, recording=True)
    assert torch.equal(model(tokens()[None]).logits, plain)
    assert routers.experts.layers == tuple(blocks) and routers.experts.width == 2 * len(blocks)
    taken = routers.take()
    assert taken.shape == (len(tokens()), len(blocks), 2) and taken.dtype == torch.int16
    assert torch.equal(taken.long(), torch.stack([seen[i] for i in blocks], 1)), "what the experts were called with"
    assert taken.unique().numel() > 4
    model.config.save_pretrained(tmp_path)
    assert experts_of(tmp_path) == routers.experts


def gates(family: str, model, logits_SE: torch.Tensor, prescribed_SK: torch.Tensor) -> torch.Tensor:
    """Weights of the chosen experts, written out."""
    config = model.config
    if family in ("deepseek_v3", "glm4_moe"):
        chosen = logits_SE.float().sigmoid().gather(1, prescribed_SK)
        return chosen / (chosen.sum(1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    if family == "gpt_oss":
        return logits_SE.gather(1, prescribed_SK).softmax(1)
    chosen = logits_SE.float().softmax(1).gather(1, prescribed_SK)
    return chosen / chosen.sum(1, keepdim=True) if family == "mixtral" or config.norm_topk_prob else chosen


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_replayed_weights_come_from_the_routers_own_logits(family):
    model = make(family, torch.float32)
    routers = Routers(model, recording=True)
    layer = model.model.layers[routers.experts.layers[0]]
    router = getattr(layer.mlp, "gate", None) or layer.mlp.router
    states = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    logits, _, free = router(states)
    prescribed = torch.tensor([[7, 0], [0, 1], [FREE, FREE], [5, 2], [3, 6], [4, 7]])
    router.prescribed = prescribed
    _, weights, index = router(states)
    assert torch.equal(index[prescribed >= 0], prescribed[prescribed >= 0]) and torch.equal(index[2], free[2])
    assert not torch.equal(index, free)
    assert torch.allclose(weights, gates(family, model, logits, index).to(weights.dtype), atol=1e-6)
    weights.square().sum().backward()
    assert router.weight.grad.abs().sum() > 0, "only the choice is fixed"


def packed_case(family: str):
    model = make(family, attn=attention.register())
    routers = Routers(model, recording=True)
    g = torch.Generator().manual_seed(3)
    mask = torch.rand(sum(LENGTHS), generator=g) < 0.8
    mask[torch.tensor([0, *LENGTHS]).cumsum(0)[:-1]] = False
    return model, routers, PackedLM(model), (tokens(), torch.tensor(LENGTHS), mask)


def logp_of(ours, pack, experts_TLK=None):
    return ours(ours.plan(*pack, experts_TLK=experts_TLK), 0.7)[0]


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_replay_of_the_same_weights_changes_nothing_and_of_others_keeps_the_choice(family):
    model, routers, ours, args = packed_case(family)
    with torch.no_grad():
        plain, recorded = logp_of(ours, args), routers.take()
        replayed = logp_of(ours, args, recorded)
        assert (plain - replayed).abs().max() < 1e-12
        assert torch.equal(routers.take(), recorded)
        g = torch.Generator().manual_seed(5)
        for name, p in model.named_parameters():
            size = 0.05 if name.endswith(("mlp.gate.weight", "mlp.router.weight")) else 1e-4
            p.add_(torch.randn(p.shape, generator=g, dtype=p.dtype) * size)
        free, moved = logp_of(ours, args), routers.take()
        kept = logp_of(ours, args, recorded)
    flipped = (moved.sort(2)[0] != recorded.sort(2)[0]).any(2).sum()
    assert torch.equal(routers.take(), recorded) and flipped > 0
    assert (kept - plain).abs().mean() < 0.9 * (free - plain).abs().mean(), "the point of it"
    half = recorded.clone()
    half[::2] = FREE
    logp_of(ours, args, half)
    assert torch.equal(routers.take()[1::2], recorded[1::2])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_replay_under_activation_checkpointing_has_the_same_gradient(family):
    """Two micro-batches have their backward at the end: each layer runs again with its own forward's choice."""
    model, routers, ours, args = packed_case(family)
    g = torch.Generator().manual_seed(6)
    shape = (2, sum(LENGTHS), len(routers.experts.layers), 8)
    prescribed = torch.rand(shape, generator=g).argsort(-1)[..., :2].to(torch.int16)

    def gradient():
        model.zero_grad()
        sum((logp_of(ours, args, x) * (i + 1)).sum() for i, x in enumerate(prescribed)).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    want = gradient()
    recompute(model)
    got = gradient()
    assert all(torch.allclose(want[n], got[n], rtol=1e-12, atol=1e-14) for n in want)
    prescribed = prescribed.flip(0)
    assert any(not torch.allclose(x, got[n], rtol=1e-3) for n, x in gradient().items()), "it does depend on the choice"


def test_replay_refuses_models_it_cannot_tell():
    with pytest.raises(
        ValueError, match="no router was found in Qwen3ForCausalLM; the flag is for models with experts"
    ):
        Routers(make("dense"))
    config = transformers.DeepseekV2Config(**SMALL | GROUPED | MLA, topk_method="group_limited_greedy")
    with torch.device("meta"), pytest.raises(ValueError, match="gives no weight to experts outside of the groups"):
        Routers(AutoModelForCausalLM.from_config(config))


# ── the HF engine ────────────────────────────────────────────────────────────


def test_hf_engine_tells_the_experts_of_a_forward_over_the_whole_sequence(tmp_path):
    from spmdrl.engines.engine import Request
    from spmdrl.engines.hf.engine import HFEngine
    from tests.ranks.cases import config, push_folder

    make("qwen3_moe").save_pretrained(tmp_path)
    cfg = config(model={"path": str(tmp_path), "dtype": "float64"}, rollout={"routing_replay": True})
    engine = HFEngine(cfg, World(0, 1, 0, torch.device("cpu"), *[None] * 9), {2, *range(40, 50)})
    push_folder(engine, tmp_path)
    prompts = [tokens(5).tolist(), tokens(6)[:5].tolist(), tokens(9).tolist(), tokens(5).tolist()]
    for i, prompt in enumerate(prompts):
        engine.submit(Request((i, 0), prompt, 11 * i + 1, 0, 12))
    done = {c.key[0]: c for _ in range(200) for c in engine.poll()}
    engine.submit(Request((4, 0), prompts[0], 7, 0, 40))
    assert not [c for _ in range(3) for c in engine.poll()]
    done |= {c.key[0]: c for c in engine.abort([(4, 0)])}
    assert len({len(done[i].tokens) for i in (0, 1, 3)}) > 1, "rows of one group ended at different steps"
    assert done[4].finish == "abort" and len(done[4].tokens) == 3
    plain = make("qwen3_moe")
    routers = Routers(plain, recording=True)
    for i, prompt in enumerate([*prompts, prompts[0]]):
        plain(torch.tensor([prompt + done[i].tokens[:-1]]), use_cache=False)
        assert torch.equal(done[i].experts, routers.take().flatten(1)), i


def test_carried_samples_keep_the_choice_under_which_each_token_was_sampled():
    from spmdrl.data.episode import Episode, prompt_segment
    from spmdrl.data.pack import all_experts
    from spmdrl.data.prompts import Prompt
    from spmdrl.engines.engine import Completion
    from spmdrl.rewards.base import Reward
    from spmdrl.rl import rollout
    from spmdrl.rl.grade import Grading
    from spmdrl.rl.rollout_plan import PromptGroup, RolloutPlan

    prompt = Prompt(0, [5, 6, 7], "", "", {}, "")
    group = PromptGroup(0, prompt, 0, [Episode(0, n, 0, [prompt_segment([5, 6, 7])]) for n in range(2)])
    plan = RolloutPlan("r", [prompt], 2, (0, 0), 0, 9, 1.0)

    def experts(rows: int, value: int) -> torch.Tensor:
        return torch.full((rows, 4), value, dtype=torch.int16)

    def extend(sample: int, n: int, finish, version: int, experts) -> None:
        completion = Completion((0, sample), [9] * n, [0.0] * n, finish, version, experts)
        plan.version = version
        rollout.extend(group.episodes[sample], completion, plan)

    extend(0, 2, "abort", 0, experts(4, 1))
    extend(1, 0, "abort", 0, None)
    extend(0, 3, "stop", 1, experts(7, 2))  # ran all of its 5 + 3 tokens but the last
    extend(1, 1, "stop", 1, experts(3, 3))
    nothing_to_grade: Any = SimpleNamespace()
    grading = Grading(nothing_to_grade, None, leads=True)
    grading.rewards = {(0, sample): Reward(0.0, {}) for sample in range(2)}
    recorded = [all_experts(e, 4)[:, 0].tolist() for e in grading.graded(group, plan)]
    assert recorded[0] == [1, 1, 1, 1, 2, 2, 2, FREE]
    assert recorded[1] == [1, 1, 1, FREE], "the prompt as its group's first sample ran it"


def test_engines_that_cannot_tell_their_experts_are_refused():
    from spmdrl.config.checks import check
    from spmdrl.config.fields import ConfigError
    from spmdrl.engines.vllm.engine import VLLMEngine
    from tests.ranks.cases import config

    with pytest.raises(ConfigError, match="--rollout.routing-replay True: is not supported with SGLang"):
        check(config(rollout={"engine": "sglang", "routing_replay": True}), 1)
    world = World(0, 1, 0, torch.device("cpu"), *[None] * 9)
    with pytest.raises(ValueError, match="does not report which experts it chose.*--rollout.engine hf"):
        VLLMEngine(config(rollout={"engine": "vllm", "routing_replay": True}), world, {2})


def test_averages_of_weights_leave_equal_routing_biases_unchanged():
    """0.7 b + 0.3 b is not b in float32 for many b, and a bias that is off in its last bit may choose other experts."""

    class Held(Learner):
        def __init__(self, **tensors: torch.Tensor):
            self.tensors = tensors

        def pieces(self, part="model"):
            return [Piece(n, x.shape, full_box(x.shape), x, exact=n == "bias") for n, x in self.tensors.items()]

    bias, weight, other = torch.rand(3, 1000, generator=torch.Generator().manual_seed(0)).unbind()
    assert not torch.equal((1 - 0.3) * bias + 0.3 * bias, bias)
    moved = torch.cat([bias[:-1], bias[-1:] + 1])
    average = Held(bias=bias.clone(), weight=weight.clone())
    average.take_over(Held(bias=moved, weight=other), 0.3)
    assert torch.equal(average.tensors["bias"][:-1], bias[:-1])
    torch.testing.assert_close(average.tensors["bias"][-1], bias[-1] + 0.3)
    assert torch.equal(average.tensors["weight"], (1 - 0.3) * weight + 0.3 * other)
    average.take_over(Held(bias=moved, weight=other))
    assert torch.equal(average.tensors["bias"], moved) and torch.equal(average.tensors["weight"], other)
    with pytest.raises(ValueError, match="--reference.refresh-every needs a reference of the policy's architecture"):
        average.take_over(Held(bias=moved, weight=torch.zeros(999)))
