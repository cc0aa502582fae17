"""Reward models that were trained here, in real vLLM: its raw scores beside transformers' and those of a run's reward.

The shipped model serves: vLLM's attention for CPUs takes its heads of 32 numbers.
"""

import json

import pytest
import torch

from spmdrl.policy.models import build_models
from spmdrl.rl.compose import compose
from tests.builds import no_vllm
from tests.e2e.runner import run
from tests.ranks import test_reward_training as pairs
from tests.ranks import test_step_training as steps
from tests.ranks.cases import config
from tests.ranks.harness import run_ranks
from tests.unit.reward_folders import written

pytestmark = [
    pytest.mark.skipif(bool(no_vllm()), reason=no_vllm()),
    pytest.mark.timeout(300),
]
FLOAT32 = {"model": {"path": "tiny", "dtype": "float32"}, "eval": {"every": 0}, "checkpoint": {"at_end": True}}
"""Settings that all jobs here share."""
WORDS = ["one two", "then three", "so four", "no, five"]
KINDS = {
    "one": (pairs.opened, pairs.trained, {"reward_model": {"outputs": (), "centre": 0.0}}, {}),
    "named": (pairs.opened, pairs.trained, {}, {"weights": {"helpful": 1.0, "short": 1.0}}),
    "steps": (steps.opened, steps.trained, {"reward_model": {"rows": "steps", "separator": ">"}}, {"steps": ">"}),
}
"""Kind -> how its job is opened and trained, its settings, and those of the file that a run names."""


def rows(kind: str) -> list[dict]:
    if kind != "steps":
        return pairs.pairs()
    return [
        {"prompt": f"say {i}=", "completions": WORDS[: 1 + i % 4], "labels": [1, 0.5, None, 0][3 - i % 4 :]}
        for i in range(24)
    ]


def as_reward(world, kind: str, folder: str, source, model: str) -> tuple:
    """Trains a reward model and reads it as a run does.

    Returns the tokens of the sequences of a step, which of them are read, and the numbers there.
    """
    opened, trained, sections, _ = KINDS[kind]
    trained(world, folder, source, FLOAT32 | {"run": {"steps": 3}} | sections)
    cfg = config(model={"path": "tiny", "dtype": "float32"}, reward={"model": model})
    judge = build_models(cfg, world, compose(cfg).needs).reward_model
    job = opened(world, f"{folder} read", source, FLOAT32 | sections)
    batch = job.rows(0)
    job.close()
    assert judge is not None
    values = judge.values(batch).reshape(batch.n_tokens, -1)
    parts = (x.split(batch.lengths.tolist()) for x in (batch.token["tokens"], batch.token["mask"], values))
    return tuple(list(part) for part in parts)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict:
    """Kind -> folder, tokens, mask and numbers of a run's reward for each sequence, and what vLLM says."""
    root, found = tmp_path_factory.mktemp("pooling"), {}
    for kind, (*_, told) in KINDS.items():
        folder, data = root / kind, steps.lines(root / f"{kind}.jsonl", rows(kind))
        source = {"lm": "tiny", "data": data} if kind == "steps" else data
        saved = str(folder / "checkpoints" / "latest" / "model")
        file = written(root / f"{kind}.yaml", path=saved, **told) if told else saved
        (mine,) = run_ranks(as_reward, 1, kind, str(folder), source, file)
        found[kind] = (saved, *mine)
    jobs = {
        kind: {
            "folder": saved,
            "task": "token_classify" if kind == "steps" else "classify",
            "tokens": [each.tolist() for each in tokens],
        }
        for kind, (saved, tokens, *_) in found.items()
    }
    (root / "jobs.json").write_text(json.dumps(jobs))
    ended = run([root / "jobs.json", root / "facts.json"], 200, module="tests.engines.pooling_probe")
    assert ended.rc == 0, ended.show()
    facts = json.loads((root / "facts.json").read_text())
    return {kind: (*found[kind], facts[kind]) for kind in KINDS}


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_parity_of_a_trained_reward_model_in_vllm_transformers_and_a_run(kind, measured):
    import transformers

    folder, tokens, masks, values, told = measured[kind]
    auto = transformers.AutoModelForTokenClassification
    model = (auto if kind == "steps" else transformers.AutoModelForSequenceClassification).from_pretrained(
        folder, dtype=torch.float32
    )
    labels = {"one": ["reward"], "named": list(pairs.NAMES), "steps": ["wrong", "right"]}[kind]
    assert list(model.config.id2label.values()) == labels
    seen = []
    for ids, mask, mine, vllm in zip(tokens, masks, values, told, strict=True):
        want, there = model.eval()(ids[None]).logits[0], torch.tensor(vllm)
        if kind == "steps":
            want, there = want[mask], there[mask]
        else:
            assert mask.nonzero().tolist() == [[len(ids) - 1]], "vLLM reads the last token"
            want, there = want[None], there[None]
        torch.testing.assert_close(there.float(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine[mask], want, rtol=1e-5, atol=1e-5)
        seen.append(want)
    assert torch.cat(seen).shape[0] >= 12 and bool((torch.cat(seen).std(0) > 1e-3).all())
