"""An engine whose log p is not the trainer's is refused after the first push; one that only rounds otherwise is not."""

from types import SimpleNamespace

import pytest
import torch

from spmdrl.config.schema import Config
from spmdrl.engines.engine import Completion
from spmdrl.engines.needs import cannot_load
from spmdrl.session import engine_check
from spmdrl.session.engine_check import BEGUN, ROWS, EngineCheck, check_frequencies
from tests.ranks.cases import config

VOCAB = 31


def logp_of(tokens: list[int]) -> list[float]:
    """Returns a log p of each token, which depends on all tokens before it."""
    return [-0.1 - (sum(tokens[: i + 1]) % 17) / 10 for i in range(len(tokens))]


class Engine:
    """Draws a token for every request at each poll; wrong by `off` wherever `wrong` says so of the requests beside."""

    version = 0

    def __init__(self, off: float = 0.0, wrong=lambda beside: True):
        self.off, self.wrong = off, wrong
        self.running, self.seen, self.forgotten = {}, [], 0

    def submit(self, request):
        self.running[request.key] = (request, [], [])

    def poll(self):
        self.seen.append(len(self.running))
        torch.rand(1)  # as vLLM's sampler does
        done, beside = [], len(self.running)
        for key, (request, tokens, logp) in list(self.running.items()):
            tokens.append((7 * len(tokens) + request.seed) % VOCAB)
            own = logp_of(request.prompt + tokens)[-1]
            logp.append(own + self.off * self.wrong(beside))
            if len(tokens) == request.max_new_tokens:
                del self.running[key]
                done.append(Completion(key, tokens, logp, "length", 0))
        return done

    def reset_prefix_cache(self):
        assert not self.running
        self.forgotten += 1


class Policy:
    """Scores as `logp_of`."""

    hf_config = SimpleNamespace(model_type="toy", vocab_size=VOCAB, eos_token_id=2)
    hf_config.get_text_config = lambda: Policy.hf_config

    def logprobs(self, batch, temperature):
        assert temperature == 1
        self.batch = batch
        rows = batch.token["tokens"].split(batch.lengths.tolist())
        return torch.tensor([x for row in rows for x in logp_of(row.tolist())]), None


def check(engine, monkeypatch, dtype="float32", width=0, longest=64) -> EngineCheck:
    monkeypatch.setattr(engine_check, "longest_sequence", lambda cfg: longest)
    world = SimpleNamespace(
        is_first=True, host_group=None, device=torch.device("cpu"), roles=SimpleNamespace(split=False)
    )
    return EngineCheck(config(model={"dtype": dtype}), world, Policy(), engine, width)  # type: ignore[arg-type]


def outcome(found: EngineCheck) -> str:
    found.sample(0)
    try:
        found.compare()
    except ValueError as error:
        return str(error)
    finally:
        assert not found.due
    return ""


@pytest.mark.parametrize(
    ("dtype", "off", "refused"),
    [
        ("float32", 0.0, False),
        ("float32", 5e-4, False),
        ("float32", 2e-3, True),
        ("float64", 2e-3, True),
        ("bfloat16", 0.2, False),
        ("float16", 0.2, False),
        ("bfloat16", 0.5, True),
        ("bfloat16", float("nan"), True),
        ("float32", float("nan"), True),
    ],
)
def test_an_engine_is_refused_above_rounding(monkeypatch, dtype, off, refused):
    message = outcome(check(Engine(off), monkeypatch, dtype))
    assert bool(message) is refused
    if refused:
        assert f"--rollout.engine hf computes toy wrongly in {dtype}: log p of 27 sampled tokens differs" in message
        assert f"{off:.2g} at most" in message and "--model.no-self-check" in message


@pytest.mark.parametrize("wrong", [lambda beside: beside > BEGUN, lambda beside: beside == 1], ids=["many", "alone"])
def test_an_engine_that_is_wrong_only_in_some_batches_is_refused(monkeypatch, wrong):
    """Rows join others that sample already, and end apart, so that batches of every size run."""
    engine = Engine(0.01, wrong)
    message = outcome(check(engine, monkeypatch))
    assert "0.01 at most" in message and engine.forgotten == 1
    assert engine.seen[0] == BEGUN and set(engine.seen) >= {1, BEGUN, len(ROWS)}


def test_other_engines_are_told_to_take_hf(monkeypatch):
    found = check(Engine(1.0), monkeypatch)
    found.cfg.rollout.engine = "vllm"
    message = outcome(found)
    assert message.startswith("--rollout.engine vllm computes toy") and "use --rollout.engine hf, which" in message


def test_rows_fit_into_the_engines_longest_sequence_and_hold_ordinary_tokens(monkeypatch):
    for longest in (2, 3, 12, 22):
        engine = Engine()
        found = check(engine, monkeypatch, width=6, longest=longest)
        assert not outcome(found)
        batch = found.policy.batch
        assert int(batch.lengths.max()) <= longest and len(batch) == len(ROWS)
        sampled = batch.token["mask"]
        assert not sampled[batch.cu_seqlens[:-1].long()].any() and 2 not in batch.token["tokens"][~sampled]
        # Routers choose freely under routing replay.
        assert batch.token["experts"].shape == (batch.n_tokens, 6) and (batch.token["experts"] == -1).all()


@pytest.mark.parametrize(
    ("sections", "split", "setting"),
    [
        ({}, False, ""),
        ({"model": {"self_check": False}}, False, "--model.no-self-check"),
        ({"parallel": {"placement": "split"}}, True, "--parallel.placement split"),
        ({"rollout": {"quantization": "int8"}}, False, "--rollout.quantization int8"),
        ({"lora": {"rank": 4, "push": "adapter"}}, False, ""),
    ],
)
def test_the_settings_that_leave_it_out_are_told(sections, split, setting, caplog):
    cfg: Config = config(**sections)
    world = SimpleNamespace(roles=SimpleNamespace(split=split))
    with caplog.at_level("INFO", "spmdrl"):
        found = EngineCheck(cfg, world, None, None, 0)  # type: ignore[arg-type]
    assert found.due is not bool(setting)
    told = f"no check of the engine's log p against the trainer's: {setting}"
    assert [record.getMessage() for record in caplog.records] == ([told] if setting else [])


def test_a_loader_that_fails_is_a_refusal_by_name():
    error = RuntimeError("start (0) + length (128)\n exceeds dimension size (64).")
    message = str(cannot_load("vllm", torch.nn.Linear(1, 1), error))
    assert message.startswith("--rollout.engine vllm: its Linear cannot load") and "\n" not in message
    assert "RuntimeError: start (0) + length (128) exceeds" in message and "such as hf" in message


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "longrope", "original_max_position_embeddings": 40}, 40),
        ({"full_attention": {"rope_type": "default"}, "sliding": {"rope_type": "dynamic"}}, 4096),
        ({"rope_type": "yarn", "original_max_position_embeddings": 40}, None),
        (None, None),
    ],
)
def test_responses_within_which_rotary_frequencies_change_are_refused(rope, limit, monkeypatch):
    text = SimpleNamespace(rope_parameters=rope, max_position_embeddings=4096)
    model = SimpleNamespace(model_type="phi3", get_text_config=lambda: text)
    cfg = config(rollout={"max_prompt_tokens": 30, "max_new_tokens": 20})
    for longest in (40, 41, 4096, 4097):
        monkeypatch.setattr(engine_check, "longest_sequence", lambda cfg, longest=longest: longest)
        if limit is None or longest <= limit:
            check_frequencies(cfg, model)
            continue
        with pytest.raises(ValueError, match=f"--rollout.max-new-tokens 20: .* phi3 .* more than {limit:,} tokens"):
            check_frequencies(cfg, model)


def test_the_check_leaves_the_generators_of_the_process_as_they_were(monkeypatch):
    state = torch.get_rng_state()
    assert not outcome(check(Engine(), monkeypatch))
    assert torch.equal(torch.get_rng_state(), state)
