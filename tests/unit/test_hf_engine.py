"""The HF engine against plain transformers: the Engine contract, and laws 3 and 5 as far as one process shows them."""

import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from spmdrl.engines.engine import Request, StaleEngineError
from spmdrl.engines.hf.decode import Decoder, Group
from spmdrl.engines.hf.engine import HFEngine
from spmdrl.engines.hf.sample import nucleus, sample
from spmdrl.engines.hf.start import quantize
from spmdrl.hub.build import build_model
from spmdrl.hub.folder import TINY
from spmdrl.hub.resolve import resolve
from spmdrl.spmd.seeds import seed_for
from spmdrl.spmd.world import World
from tests.ranks.cases import config, push_folder, small_model
from tests.unit.test_empty_models import folder_of, quantized

CPU = torch.device("cpu")
VOCAB = 8


def world_of_one() -> World:
    """Makes a world of one: an engine of one rank asks it for the device only."""
    return World(0, 1, 0, CPU, *[None] * 9)


def make(path: str, stop=(2,), dtype: str = "float32", capacity: int = 64) -> HFEngine:
    engine = HFEngine(
        config(model={"path": path, "dtype": dtype}, rollout={"max_sequences": capacity}), world_of_one(), set(stop)
    )
    push_folder(engine, resolve(path))
    return engine


def run(engine: HFEngine, requests: list[Request]) -> dict:
    for r in requests:
        engine.submit(r)
    done = {}
    for _ in range(10_000):
        got = engine.poll()
        done |= {c.key: c for c in got}
        if len(done) == len(requests):
            return done
    raise AssertionError("the engine does not end")


def ask(i: int, prompt: list[int], n: int = 8, temperature: float = 1.0, top_p: float = 1.0) -> Request:
    return Request((i, 0), prompt, seed_for(5, i), 0, n, temperature, top_p)


@pytest.fixture(scope="module")
def tiny():
    return make("tiny")


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Makes a random model of eight tokens."""
    return small_model(tmp_path_factory.mktemp("eight"), vocab_size=VOCAB)


PROMPTS = [[1, 5, 9, 7, 6, 8, 4], [1, 11, 12, 13, 14, 10, 4], [1, 20], [1, 9, 9], [1, 30, 31], [1, 7, 5, 6, 8, 9, 4]]


def test_parity_greedy_is_transformers_generate(tiny):
    model = build_model(TINY, "float32")
    done = run(tiny, [ask(i, p, 12, temperature=0.0) for i, p in enumerate(PROMPTS)])
    for i, prompt in enumerate(PROMPTS):
        want = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0
        )[0, len(prompt) :].tolist()
        assert done[i, 0].tokens == want
        assert done[i, 0].finish == ("stop" if want[-1] == 2 else "length")
        log_p = model(input_ids=torch.tensor([prompt + want])).logits[0].log_softmax(-1)
        own = log_p[len(prompt) - 1 : -1].gather(1, torch.tensor(want)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(done[i, 0].logp), own, atol=1e-5)
        assert done[i, 0].version == 0


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.7, 1.0), (1.0, 0.7)])
def test_parity_logp_is_that_of_the_distribution_sampled_from(tiny, temperature, top_p):
    model = build_model(TINY, "float32")
    done = run(tiny, [ask(i, p, 10, temperature, top_p) for i, p in enumerate(PROMPTS * 4)])
    for i, prompt in enumerate(PROMPTS * 4):
        tokens = done[i, 0].tokens
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / temperature
        log_p = nucleus(logits.log_softmax(-1), torch.tensor([top_p])) if top_p < 1 else logits.log_softmax(-1)
        own = log_p.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(done[i, 0].logp), own, atol=1e-5)


def test_parity_logp_of_a_model_whose_scores_are_capped(tmp_path):
    """Gemma 2 is compared with the packed forward that trains it."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    from spmdrl.policy.attention import packed as attention
    from spmdrl.policy.heads import PackedLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    more = dict(num_key_value_heads=2, head_dim=8, sliding_window=6, attn_logit_softcapping=2.0, bos_token_id=1)
    ids = dict(eos_token_id=2, pad_token_id=None, initializer_range=0.4, max_position_embeddings=64)
    Gemma2ForCausalLM(Gemma2Config(**sizes, **more, **ids, final_logit_softcapping=5.0)).save_pretrained(tmp_path)
    done = run(make(str(tmp_path)), [ask(i, p, n=12) for i, p in enumerate(PROMPTS)])
    model = PackedLM(build_model(tmp_path, torch.float32, False, attention.register()), "auto")
    for i, prompt in enumerate(PROMPTS):
        reply = done[i, 0].tokens
        tokens = torch.tensor(prompt + reply)
        mask = torch.arange(len(tokens)) >= len(prompt)
        logp, _ = model(model.plan(tokens, torch.tensor([len(tokens)]), mask), 1.0)
        torch.testing.assert_close(torch.tensor(done[i, 0].logp), logp[mask].detach(), atol=1e-5, rtol=0)


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    expected = p.double() * counts.sum()
    keep = expected > 0
    assert counts[~keep].sum() == 0
    return ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum().item()


def bound(degrees: int) -> float:
    """Returns a bound above the 99.99% quantile of chi-square (Wilson-Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.8 * math.sqrt(2 / (9 * degrees))) ** 3


def test_sampling_frequencies_are_the_models(eight):
    """First tokens and pairs of 6,000 samples are counted, at two temperatures in the same groups."""
    engine = make(eight, stop=(), capacity=512)
    model = build_model(engine_folder(eight), "float32")
    prompt, n = [1, 3, 4], 6000
    temperatures = (1.0, 0.7)
    done = run(engine, [Request((i, 0), prompt, seed_for(9, i), 0, 2, temperatures[i % 2]) for i in range(n)])
    for k, t in enumerate(temperatures):
        pairs = torch.tensor([done[i, 0].tokens for i in range(k, n, 2)])
        first = (model(input_ids=torch.tensor([prompt])).logits[0, -1] / t).softmax(-1)
        after = torch.tensor([prompt + [a] for a in range(VOCAB)])
        second = (model(input_ids=after).logits[:, -1] / t).softmax(-1)
        counts = torch.bincount(pairs[:, 0], minlength=VOCAB)
        assert chi_square(counts, first) < bound(VOCAB - 1)
        joint = (first[:, None] * second).flatten()
        assert chi_square(torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2), joint) < bound(63)


def engine_folder(path):
    from pathlib import Path

    return Path(path)


def group(n: int, temperature: float, top_p: float = 1.0) -> Group:
    return Group([Request((i, 0), [1], seed_for(3, i), 0, 4, temperature, top_p) for i in range(n)], CPU)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.8, 0.95, 1.0])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p):
    p = torch.tensor([0.02, 0.4, 0.3, 0.15, 0.1, 0.03], dtype=torch.float64)
    n = 8000
    tokens, logp = sample(p.log()[None].expand(n, -1), group(n, 1.0, top_p), torch.zeros(n, dtype=torch.int64))
    kept, mass = [], 0.0
    for token in p.argsort(descending=True).tolist():  # the definition, one token at a time
        kept.append(token)
        mass += p[token].item()
        if mass >= top_p:
            break
    want = torch.zeros_like(p)
    want[kept] = p[kept] / p[kept].sum()
    assert chi_square(torch.bincount(tokens, minlength=6), want) < (bound(len(kept) - 1) if len(kept) > 1 else 1e-9)
    assert torch.allclose(logp, want.log()[tokens], atol=1e-6)


@pytest.mark.slow
def test_a_large_vocabulary_keeps_its_tail():
    """Half of the mass is spread over all but one of 150,000 tokens: a float32 sum would be off by much."""
    v, n = 150_000, 300
    logits = torch.zeros(1, v)
    logits[0, 7] = math.log(v - 1)
    everyone, picked = group(n, 1.0), []
    for rows in torch.arange(n).split(50):  # a row takes a megabyte
        part = Group([everyone.requests[i] for i in rows], CPU)
        picked.append(sample(logits.expand(len(rows), -1), part, torch.zeros(len(rows), dtype=torch.int64)))
    tokens, logp = (torch.cat(x) for x in zip(*picked, strict=True))
    head = (tokens == 7).double().mean().item()
    assert abs(head - 0.5) < 4 * 0.5 / math.sqrt(n)
    tail = tokens[tokens != 7].double() / v
    assert abs(tail.mean().item() - 0.5) < 4 / math.sqrt(12 * len(tail))
    assert torch.allclose(logp[tokens == 7], torch.tensor(math.log(0.5)), atol=1e-4)


def test_layout_a_sample_does_not_depend_on_its_neighbours(tiny):
    """By law 3 a sample is the same alone, among others, in another order and in small groups, greedy or sampled."""
    requests = [ask(i, p, 3 + i % 6, (1.0, 0.0, 1.3)[i % 3], (1.0, 0.8)[i % 2]) for i, p in enumerate(PROMPTS * 3)]
    together = run(tiny, requests)
    for others in (
        run(tiny, requests[::-1]),
        run(make("tiny", capacity=2), requests),
        {k: c for r in requests for k, c in run(tiny, [r]).items()},
    ):
        for key, c in together.items():
            assert others[key].tokens == c.tokens and others[key].finish == c.finish
            assert torch.allclose(torch.tensor(others[key].logp), torch.tensor(c.logp), atol=1e-5)
    for r in requests:
        c = together[r.key]
        assert len(c.tokens) == len(c.logp) <= r.max_new_tokens
        assert (c.finish == "stop") == (c.tokens[-1] == 2) and 2 not in c.tokens[:-1]
        assert c.finish == "stop" or len(c.tokens) == r.max_new_tokens
    again = [Request(r.key, r.prompt, r.seed + 1, 0, r.max_new_tokens, r.temperature, r.top_p) for r in requests]
    assert run(tiny, again) != together  # another seed, another sample


MAMBA = dict(mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1)
STATEFUL = {
    "Lfm2": (dict(layer_types=["conv", "full_attention"], conv_dim=64), "reorder_cache"),
    "FalconH1": (MAMBA | dict(mamba_d_ssm=128), "reorder_cache"),
    "MiniMax": (
        dict(layer_types=["linear_attention", "full_attention"], num_local_experts=2, num_experts_per_tok=1),
        None,
    ),
    "Bamba": (MAMBA | dict(attn_layer_indices=[1]), None),
    "RecurrentGemma": (dict(lru_width=64, attention_window_size=8, block_types=["recurrent", "attention"]), None),
    "GptOss": (dict(layer_types=["sliding_attention", "full_attention"], sliding_window=4), "batch_select_indices"),
}
"""Families with states that pass from token to token, and one without torch's fused attention; how their caches keep
rows, None: transformers decodes them wrongly, so the engine computes each token from its whole sequence."""


def stateful(folder, family: str):
    """Makes a random model of a family: all weights are drawn, also those that begin at 0 or 1."""
    import transformers

    sizes = dict(vocab_size=61, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=1, head_dim=32) | STATEFUL[family][0]
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("family", STATEFUL)
def test_parity_of_states_whose_rows_end_apart(family, tmp_path, caplog):
    model = stateful(tmp_path, family)
    with caplog.at_level("WARNING", "spmdrl"):
        engine = make(str(tmp_path), stop=())
    assert engine.decoder.way == STATEFUL[family][1]
    said = [r.message for r in caplog.records if "cannot decode with the cache of transformers (" in r.message]
    assert len(said) == (engine.decoder.way is None), caplog.text
    requests = [ask(i, PROMPTS[i % 3], 2 + 3 * (i % 4)) for i in range(9)]
    done = run(engine, requests)
    assert engine.bytes_by_owner()["KV cache"] == 0
    engine.submit(ask(20, PROMPTS[0]))
    engine.poll()
    assert (engine.bytes_by_owner()["KV cache"] > 0) == (engine.decoder.way is not None)
    assert engine.abort([(20, 0)])[0].tokens
    for request in requests:
        tokens, logp = done[request.key].tokens, done[request.key].logp
        with torch.no_grad():
            whole = model(input_ids=torch.tensor([request.prompt + tokens]), use_cache=False).logits[0].log_softmax(-1)
        own = whole[len(request.prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logp), own, atol=2e-5, rtol=0)


def test_a_model_that_is_not_causal_is_refused_by_name(tmp_path):
    """MiniMax keeps the mask of its linear attention in the checkpoint: ones in it let every token see later ones."""
    stateful(tmp_path, "MiniMax")
    tensors = load_file(tmp_path / "model.safetensors")
    masks = {name: torch.ones_like(x) for name, x in tensors.items() if "diagonal_decay" in name}
    save_file(tensors | masks, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="MiniMaxForCausalLM of transformers gives a token other probabilities when"):
        make(str(tmp_path))


def rounded():
    """Makes a random mixture of experts in bfloat16, whose large weights round apart in batches of other shapes."""
    import transformers

    sizes = dict(vocab_size=61, hidden_size=64, intermediate_size=48, moe_intermediate_size=32, num_hidden_layers=8)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2)
    torch.manual_seed(1)
    made = transformers.Qwen3MoeConfig(**sizes, **heads, initializer_range=0.4)
    return AutoModelForCausalLM.from_config(made).eval().to(torch.bfloat16)


def without_numbers(model) -> None:
    with torch.no_grad():
        model.lm_head.weight[:] = math.nan


def without_last_logits(model) -> None:
    forward = model.forward
    model.forward = lambda input_ids, use_cache: forward(input_ids=input_ids, use_cache=use_cache)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        pytest.param(lambda model: None, None, id="rounding of 0.3"),
        pytest.param(without_numbers, None, id="weights that are no numbers"),
        pytest.param(without_last_logits, "fails when it decodes a sequence (TypeError", id="own forward"),
    ],
)
def test_a_causal_model_is_not_refused_as_one_that_is_not(change, error, caplog):
    """Rounding is as large without the cache, which is then used; what gives no number is left to the first step."""
    model = rounded()
    change(model)
    decoder = Decoder(model, None)
    if error:
        with pytest.raises(ValueError, match=re.escape(error)):
            decoder.check(61, CPU, torch.bfloat16)
        return
    decoder.check(61, CPU, torch.bfloat16)
    assert decoder.checked and decoder.way == "batch_select_indices" and not caplog.records


def test_an_error_of_the_device_in_the_check_of_decoding_is_no_property_of_the_family():
    model, forwards = rounded(), []
    forward = model.forward

    def fails(**inputs):
        forwards.append(inputs)
        if inputs["use_cache"]:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return forward(**inputs)

    model.forward = fails
    with pytest.raises(torch.AcceleratorError, match="unspecified launch failure"):
        Decoder(model, None).check(61, CPU, torch.bfloat16)
    assert forwards[-1]["use_cache"]


def test_abort_gives_back_what_there_is(tiny):
    requests = [ask(i, PROMPTS[0], 9, 1.5) for i in range(4)] + [ask(4, PROMPTS[2], 9, 1.5)]
    whole = run(make("tiny", stop=()), requests)
    engine = make("tiny", stop=())
    for r in requests:
        engine.submit(r)
    for _ in range(3):
        assert engine.poll() == []
    cut = {c.key: c for c in engine.abort([(1, 0), (4, 0), (77, 0)])}  # one runs, one waits, one is not there
    assert set(cut) == {(1, 0), (4, 0)}
    assert cut[1, 0].finish == cut[4, 0].finish == "abort"
    assert cut[1, 0].tokens == whole[1, 0].tokens[:3] and len(cut[1, 0].logp) == 3
    assert cut[4, 0].tokens == cut[4, 0].logp == []
    done = {}
    while len(done) < 3:
        done |= {c.key: c for c in engine.poll()}
    for key in [(0, 0), (2, 0), (3, 0)]:  # the others do not notice
        assert done[key].tokens == whole[key].tokens and done[key].finish == "length"
    assert engine.poll() == [] and engine.abort([(0, 0)]) == []
    assert run(engine, requests)[1, 0].tokens == whole[1, 0].tokens  # It also takes the same request again.


def test_abort_of_all_leaves_an_idle_engine(tiny):
    engine = make("tiny", stop=())
    for i in range(3):
        engine.submit(ask(i, PROMPTS[0]))
    engine.poll()
    assert engine.bytes_by_owner()["KV cache"] > 0
    assert len(engine.abort([(i, 0) for i in range(3)])) == 3
    assert engine.poll() == [] and engine.bytes_by_owner()["KV cache"] == 0


def test_stale_sleep_gives_back_memory_and_version():
    engine = make("tiny")
    full = engine.bytes_by_owner()["engine weights"]
    assert full == sum(p.numel() * 4 for p in build_model(TINY, "float32").parameters())
    engine.submit(ask(0, PROMPTS[0]))
    engine.poll()
    engine.sleep(1)
    assert engine.bytes_by_owner() == {"engine weights": full, "KV cache": 0} and engine.version == 0
    engine.sleep(2)
    assert engine.bytes_by_owner() == {"engine weights": 0, "KV cache": 0} and engine.version is None
    engine.wake("weights")
    engine.wake("kv_cache")
    with pytest.raises(StaleEngineError, match="holds no weights, the trainer is at version 0: push the weights"):
        engine.submit(ask(0, PROMPTS[0]))


# ── the start without weights ────────────────────────────────────────────────

FLAT = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def unreadable(source, folder):
    """Copies a model's folder; its file of weights holds something else."""
    shutil.copytree(source, folder)
    save_file({"other": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("family", ["qwen2_tied", "yarn", "gemma2", "gemma3", "deepseek_v3", "qwen3_moe"])
def test_parity_engine_that_cannot_read_a_folder_samples_its_model_after_a_push(family, tmp_path):
    """Tied weights, rotary tables, capped scores, packed experts, persistent routing biases.

    In float64: weights are large here, so that float32 is up to 1e-4 off, more or less as the processor sums. torch
    groups the products of experts in float32 alone.
    """
    dtype = torch.float32 if family in ("deepseek_v3", "qwen3_moe") else torch.float64
    name = str(dtype).removeprefix("torch.")
    source = folder_of(family, tmp_path / "source", dtype, **FLAT)
    path = unreadable(source, tmp_path / "unreadable")
    with pytest.raises(ValueError, match="missing or misshapen"):
        build_model(path, name)
    engine = HFEngine(config(model={"path": str(path), "dtype": name}), world_of_one(), {2})
    with pytest.raises(StaleEngineError, match="holds no weights"):
        engine.submit(ask(0, [1, 5]))
    push_folder(engine, source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="eager")
    for held, want in (("named_parameters", "named_parameters"), ("named_buffers", "named_buffers")):
        got = dict(getattr(engine.model, held)())
        assert got.keys() == dict(getattr(model, want)()).keys()
        assert all(torch.equal(got[n], x) and got[n].dtype == x.dtype for n, x in getattr(model, want)()), family
    done = run(engine, [ask(i, p, 8, temperature=t) for i, (p, t) in enumerate(zip(PROMPTS, [0, 1] * 3, strict=True))])
    for i, prompt in enumerate(PROMPTS):
        tokens = done[i, 0].tokens
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
        own = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(done[i, 0].logp).double(), own, atol=2e-5 if name == "float32" else 1e-6), (
            family
        )
        if i % 2 == 0:
            assert tokens == logits.argmax(-1).tolist()


def test_engine_of_an_fp8_folder_holds_what_is_pushed(tmp_path):
    plain = quantized(folder_of("qwen3", tmp_path / "source", torch.float32), tmp_path / "fp8")
    engine = HFEngine(config(model={"path": str(unreadable(tmp_path / "fp8", tmp_path / "gone"))}), world_of_one(), {2})
    assert "quantization_config" not in engine.model.config.to_dict()
    save_file(plain, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    push_folder(engine, tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    assert all(torch.equal(engine.tensors[n], p) and p.dtype == torch.float32 for n, p in model.named_parameters())


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rounded_engine_starts_without_weights_and_rounds_those_that_are_pushed(kind, tmp_path, eight):
    path = unreadable(eight, tmp_path / "gone")
    engine = HFEngine(config(model={"path": str(path)}, rollout={"quantization": kind}), world_of_one(), {2})
    push_folder(engine, eight)
    want = AutoModelForCausalLM.from_pretrained(eight, dtype=torch.float32)
    rounded = quantize(want, kind)
    assert rounded.keys() == engine.quantized.keys() and len(rounded) == 14
    got = dict(engine.model.named_parameters())
    assert all(torch.equal(got[n].float(), p.float()) for n, p in want.named_parameters())


@pytest.mark.parametrize("missing", ["model.layers.1.mlp.experts.5.up_proj.weight", "e_score_correction_bias"])
def test_stale_engine_refuses_weights_that_no_push_brought_by_name(missing, tmp_path):
    source = folder_of("deepseek_v3", tmp_path / "source", torch.float32)
    engine = HFEngine(config(model={"path": str(source)}), world_of_one(), {2})
    found = load_file(source / "model.safetensors")
    left = {name: x for name, x in found.items() if missing not in name}
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"no tensor for {len(found) - len(left)} of the engine's.*{missing}"):
            engine.load([left], 0)
        with pytest.raises(StaleEngineError, match="holds no weights"):
            engine.submit(ask(0, [1, 5]))
        engine.load([found], 0)
        engine.submit(ask(0, [1, 5]))
        # What is there may stay while others are pushed, until the memory is given up.
        engine.load([left], 0)
        engine.sleep(2)


def test_stale_engine_with_adapters_refuses_until_it_has_both_parts(tmp_path, eight):
    cfg = config(
        model={"path": str(unreadable(eight, tmp_path / "gone"))},
        lora={"rank": 2, "alpha": 6.0, "push": "adapter", "targets": ("q_proj", "down_proj")},
    )
    engine = HFEngine(cfg, world_of_one(), {2})
    base = load_file(f"{eight}/model.safetensors")
    draw = torch.Generator().manual_seed(0)
    adapters = {n: torch.randn(x.shape, generator=draw) for n, x in engine.tensors.items() if ".lora_" in n}
    assert len(adapters) == 8
    for part, lacks in ((base, "lora_A"), (adapters, "model.embed_tokens.weight")):
        with pytest.raises(ValueError, match=f"no tensor for .*{lacks}"):
            engine.load([part], 0)
        engine.sleep(2)
    engine.load([base, adapters], 0)
    done = run(engine, [ask(0, [1, 5, 3], 6, temperature=0.0)])[0, 0]
    model = AutoModelForCausalLM.from_pretrained(eight, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_A.weight" in adapters:
                # Pushes send B multiplied by alpha / r.
                p += adapters[f"{layer}.lora_B.weight"] @ adapters[f"{layer}.lora_A.weight"]
        log_p = model(input_ids=torch.tensor([[1, 5, 3, *done.tokens]])).logits[0, 2:-1].log_softmax(-1)
    assert done.tokens == log_p.argmax(-1).tolist()
    assert torch.allclose(torch.tensor(done.logp), log_p.amax(-1), atol=1e-4)
