"""The HF engine samples prompts with images: log p is that of plain transformers on the whole sequence."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from spmdrl.engines.engine import Completion, Request, ScoreRequest
from spmdrl.engines.hf.engine import HFEngine
from spmdrl.engines.hf.start import plan_of, quantize
from spmdrl.hub.expand import expand
from spmdrl.hub.images import Payload, forward_inputs
from spmdrl.spmd.seeds import seed_for
from tests.ranks.cases import config, push_folder
from tests.unit.test_hf_engine import run, world_of_one
from tests.unit.vision_models import FAMILIES, TILED, image_text, tiny, tokenizer
from tests.unit.vision_models import config as model_config
from tests.unit.vision_packs import facts, save

NEVER = {family: facts(family)[0].never for family in FAMILIES}
SHOWN: list[tuple[int, ...]] = [(0,), (), (1, 0), (2,), (0, 0), (0,), (0, 1), ()]
"""The images of each row of a group: unlike sizes, other orders, the same image in several rows and twice in a row."""


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    """Returns the engine of a family in float64, which the tests share; settings of the rollout make another."""
    folders = {}

    @cache
    def shared(family: str) -> HFEngine:
        return made(family)

    def made(family: str, dtype: str = "float64", **rollout) -> HFEngine:
        if family not in folders:
            folders[family] = save(family, tmp_path_factory.mktemp(family))
        cfg = config(model={"path": folders[family], "dtype": dtype}, rollout=rollout)
        engine = HFEngine(cfg, world_of_one(), {2})
        push_folder(engine, folders[family])
        return engine

    return lambda family, **settings: made(family, **settings) if settings else shared(family)


def exact(family: str) -> float:
    """Bound of differences. The recurrent layers of Qwen3.5 compute in float32, with a cache in another order."""
    return 1e-5 if family == "qwen3_5" else 1e-12


def prompt(family: str, images: list[Payload], length: int = 0) -> list[int]:
    """Returns the expanded ids of a prompt with a text before, between and behind its images.

    length: tokens of the prompt, reached by letters at its beginning; 0 for as few as possible.
    """
    vision, _ = facts(family)
    ids = tokenizer()("see" + "".join(image_text(family) + " and" for _ in images), add_special_tokens=False).input_ids
    letter = tokenizer()("x", add_special_tokens=False).input_ids
    found = expand(ids, images, vision).ids.tolist()
    return letter * (length - len(found)) + found


def requests_of(family: str, shown=SHOWN, length: int = 0, first: int = 0, images=None, n: int = 6, **how):
    """Returns a request for each row of images; all prompts have one length, so they are one group of the engine."""
    images = images or facts(family)[1]
    rows = [[images[i] for i in numbers] for numbers in shown]
    length = length or max(len(prompt(family, row)) for row in rows)
    return [
        Request(
            (first + i, 0), prompt(family, row, length), seed_for(5, first + i), 0, n - i % 3, images=tuple(row), **how
        )
        for i, row in enumerate(rows)
    ]


@torch.no_grad()
def alone(hf, family: str, request: Request, tokens: list[int]) -> torch.Tensor:
    """Log p [n, V] of the tokens behind a prompt, in plain transformers, which computes the positions itself."""
    vision, _ = facts(family)
    ids = torch.tensor([request.prompt + tokens])
    given = forward_inputs(request.images, vision)
    if vision.mrope and given:
        given["mm_token_type_ids"] = (ids == vision.image).int()
    logits = hf(input_ids=ids, use_cache=False, **given).logits[0, len(request.prompt) - 1 : -1]
    return logits.index_fill(1, torch.tensor(vision.never), -torch.inf).log_softmax(-1)


def differs(hf, family: str, requests: list[Request], done: dict[tuple, Completion]) -> float:
    """Largest difference of log p from plain transformers."""
    worst = 0.0
    for request in requests:
        tokens, logp = done[request.key].tokens, done[request.key].logp
        want_nV = alone(hf, family, request, tokens)
        want = want_nV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, (torch.tensor(logp, dtype=want.dtype) - want).abs().max().item())
        if request.temperature == 0:
            assert tokens == want_nV.argmax(-1).tolist()
    return worst


def encoded(engine: HFEngine, family: str) -> list[int]:
    """Returns a list to which each run of the vision tower adds the number of features that it computes."""
    seen: list[int] = []
    projector = engine.model.get_submodule(facts(family)[0].projector[0])
    projector.register_forward_hook(lambda module, given, out: seen.append(out.numel() // out.shape[-1]))
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_rows_with_unlike_images_are_transformers(family, engine_of):
    """One group whose rows show 0, 1 and 2 images, one of text, and a greedy one; with a cache and without one."""
    engine, hf, images = engine_of(family), tiny(family, torch.float64), facts(family)[1]
    assert engine.decoder.way == ("reorder_cache" if family == "qwen3_5" else "batch_select_indices")
    several = requests_of(family)
    longer = len(several[0].prompt) + 3
    requests = several + requests_of(family, [(0,), (1, 2)], longer, 20, temperature=0.0)
    requests += requests_of(family, [(), ()], 0, 30)
    seen = encoded(engine, family)
    done = run(engine, requests)
    assert differs(hf, family, requests, done) <= exact(family)
    # The first group shows three distinct images, the second does too, and the third runs no tower.
    assert seen == [sum(image.tokens for image in images)] * 2
    assert engine.model.base_model.__dict__.get("rope_deltas") is None
    way, engine.decoder.way = engine.decoder.way, None
    try:
        whole = run(engine, requests)
    finally:
        engine.decoder.way = way
    assert len(seen) == 4
    for key, completion in whole.items():
        assert completion.tokens == done[key].tokens
        torch.testing.assert_close(torch.tensor(completion.logp), torch.tensor(done[key].logp), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_samples_of_one_prompt_share_the_features_of_its_images(family, engine_of):
    engine, images = engine_of(family), facts(family)[1]
    seen = encoded(engine, family)
    requests = requests_of(family, [(1, 0)] * 8)
    assert differs(tiny(family, torch.float64), family, requests, run(engine, requests)) <= exact(family)
    assert seen == [images[0].tokens + images[1].tokens]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_changes_log_p(family, engine_of):
    engine, images = engine_of(family), facts(family)[1]
    changed = replace(images[0], name="changed", pixels=images[0].pixels.roll(7, -1))
    before = run(engine, requests_of(family, temperature=0.0, n=1))
    after = run(engine, requests_of(family, temperature=0.0, n=1, images=[changed, *images[1:]]))
    for i, numbers in enumerate(SHOWN):
        one, other = before[i, 0], after[i, 0]
        assert (one.logp[0] != pytest.approx(other.logp[0], abs=1e-6)) == (0 in numbers), i
    two = run(engine, requests_of(family, [(0, 1), (1, 0)], temperature=0.0, n=1))
    assert two[0, 0].logp[0] != pytest.approx(two[1, 0].logp[0], abs=1e-6)


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
@pytest.mark.parametrize("value", [1e30, torch.inf])
def test_placeholders_are_never_sampled_whatever_the_head_says(family, value, engine_of):
    engine, never = engine_of(family), torch.tensor(NEVER[family])
    hows = [{"temperature": 0.0}, {"temperature": 3.0}, {"top_p": 0.3}, {}]
    requests = [
        r for k, how in enumerate(hows) for r in requests_of(family, [(0,), (), (1, 0)], first=10 * k, n=8, **how)
    ]
    score = [requests_of(family, [()])[0].prompt]

    def likeliest():
        return engine.likeliest([ScoreRequest(ids, 4) for ids in score], 5, 1.0, 0)[0]

    want, want_likeliest = run(engine, requests), likeliest()
    hook = engine.model.lm_head.register_forward_hook(lambda module, given, out: out.index_fill(-1, never, value))
    try:
        got, got_likeliest = run(engine, requests), likeliest()
    finally:
        hook.remove()
    assert got == want
    assert all(not set(completion.tokens) & set(never.tolist()) for completion in got.values())
    assert all(torch.equal(a, b) for a, b in zip(got_likeliest, want_likeliest, strict=True))
    with torch.no_grad():
        logits = tiny(family, torch.float64)(input_ids=torch.tensor(score)).logits[0, -5:-1]
    top = logits.index_fill(1, never, -torch.inf).log_softmax(-1).topk(5, 1)
    assert torch.equal(got_likeliest[0], top.indices)
    torch.testing.assert_close(got_likeliest[1], top.values, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5", "smolvlm"])
@pytest.mark.parametrize("cached", [True, False])
def test_rows_are_aborted_and_continue(family, cached, engine_of):
    engine, hf = engine_of(family), tiny(family, torch.float64)
    requests = requests_of(family, n=9)
    whole = run(engine, requests)
    way, engine.decoder.way = engine.decoder.way, engine.decoder.way if cached else None
    try:
        for request in requests:
            engine.submit(request)
        # Requests that wait, and a group that begins and loses its first rows, then all others but two.
        assert engine.abort([(7, 0)])[0].tokens == []
        for _ in range(2):
            assert engine.poll() == []
        cut = {c.key: c for c in engine.abort([(0, 0), (1, 0)])}
        engine.poll()
        cut |= {c.key: c for c in engine.abort([(3, 0), (5, 0), (6, 0)])}
        assert all(c.tokens == whole[key].tokens[: len(c.tokens)] for key, c in cut.items())
        done = {}
        while len(done) < 2:
            done |= {c.key: c for c in engine.poll()}
        assert not engine.groups and all(done[key].tokens == whole[key].tokens for key in [(2, 0), (4, 0)])
        again = [replace(r, prompt=r.prompt + cut[r.key].tokens) for r in requests if r.key in cut]
        assert differs(hf, family, again, run(engine, again)) <= exact(family)
        # A sleep gives up what is in flight, features too.
        engine.submit(requests[0])
        engine.poll()
        assert engine.bytes_by_owner()["KV cache"] > 0
        engine.sleep(1)
        assert engine.bytes_by_owner()["KV cache"] == 0
        engine.wake("weights")
        assert run(engine, requests[:1])[0, 0].tokens == whole[0, 0].tokens
    finally:
        engine.decoder.way = way


def test_a_deterministic_engine_gives_each_row_exactly_what_it_gets_alone(engine_of):
    engine = engine_of("qwen3_vl", dtype="float32", deterministic=True)
    requests = requests_of("qwen3_vl")
    together = run(engine, requests)
    assert all(run(engine, [request])[request.key] == together[request.key] for request in requests)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "idefics3"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_vision_tower_is_not_rounded(family, kind, engine_of):
    engine, hf = engine_of(family, dtype="float32", quantization=kind), tiny(family)
    assert all(name.startswith(facts(family)[0].language) for name in engine.quantized)
    assert quantize(hf, kind).keys() == engine.quantized.keys() and len(engine.quantized) == 14
    requests = requests_of(family)
    assert differs(hf, family, requests, run(engine, requests)) <= 1e-4


# ── refusals ─────────────────────────────────────────────────────────────────


def test_requests_that_the_model_cannot_read_are_refused(engine_of):
    family = "qwen3_vl"
    engine, (vision, images) = engine_of(family), facts(family)
    good = requests_of(family, [(0, 1)])[0]
    wanted = images[0].tokens + images[1].tokens
    cases = [
        (
            replace(good, images=good.images[:1]),
            f"{wanted} placeholders .* its 1 images have {images[0].tokens} features",
        ),
        (replace(good, images=()), f"has {wanted} placeholders of image features .* its 0 images have 0 features"),
        (replace(good, prompt=[vision.image, 8]), f"has 1 placeholders .* 2 images have {wanted} features: expand the"),
    ]
    for request, message in cases:
        with pytest.raises(ValueError, match=message):
            engine.submit(request)
    text = HFEngine(config(model={"path": "tiny"}), world_of_one(), {2})
    text.version = 0
    with pytest.raises(
        ValueError, match="has 2 images, but the model of --model.path does not read images: take a mod"
    ):
        text.submit(replace(good, prompt=[1, 5]))
    with pytest.raises(ValueError, match="a sequence to score has .* placeholders"):
        engine.likeliest([ScoreRequest(good.prompt, 2)], 5, 1.0, 0)
    assert not engine.waiting and not text.waiting


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_ranks_cannot_divide_are_refused_by_name(family, engine_of):
    if family in ("qwen2_vl", "qwen2_5_vl", *TILED):
        assert plan_of(model_config(family), 2)
        return
    with pytest.raises(ValueError, match="--rollout.tp 2: the hf engine cannot divide qwen3.* plan"):
        plan_of(model_config(family), 2)


def test_routing_replay_is_refused_by_name(engine_of):
    with pytest.raises(ValueError, match="--rollout.routing-replay: no router was found in Qwen3VLForCond"):
        engine_of("qwen3_vl", routing_replay=True)
