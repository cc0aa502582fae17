"""Reward and cost models, references that are refreshed, and what steers between steps."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmdrl.hub.resolve import resolve
from spmdrl.hub.tokenizer import load_tokenizer
from spmdrl.policy.models import Models, build_models
from spmdrl.rl.compose import compose
from spmdrl.rl.score import score
from spmdrl.rl.update import adapt_coefficients, update
from spmdrl.spmd.exchange import all_gather_rows
from tests.ranks.cases import config, full_weights, group_of, packed, relative, small_model, synthetic_batch
from tests.ranks.demo import open_demo, train_demo
from tests.ranks.harness import RankError, run_ranks
from tests.ranks.test_classifiers import letters_right
from tests.ranks.test_placement import classifier
from tests.unit.reward_folders import classifier as labelled


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes a policy, and a classifier with one label as reward models are published; in float64."""
    from transformers import AutoModelForSequenceClassification

    root = tmp_path_factory.mktemp("models")
    policy = small_model(root / "policy", 0)
    classifier = AutoModelForSequenceClassification.from_pretrained(
        small_model(root / "base", 1), num_labels=1, dtype=torch.float64
    )
    torch.nn.init.normal_(classifier.score.weight, generator=torch.Generator().manual_seed(2))
    classifier.save_pretrained(root / "classifier")
    return policy, str(root / "classifier")


def episodes():
    return [dataclasses.replace(t, parts={"cost": 0.25 * t.sample}) for t in synthetic_batch(4, 3)]


def scores(world, folders):
    cfg = config(
        model={"path": folders[0], "dtype": "float64"},
        reward={"model": folders[1], "model_coef": 0.5},
        safety={"cost_model": folders[1], "cost": "cost"},
    )
    algo = compose(cfg)
    models = build_models(cfg, world, algo.needs)
    batch = packed(cfg, world, episodes())
    score(batch, models, algo, cfg, world.data_peers)
    columns = [batch.seq[k].double() for k in ("position", "sample", "reward", "cost")]
    rows = torch.cat(all_gather_rows(torch.stack(columns, 1), group_of(world)))
    return sorted(map(tuple, rows.tolist()))


def test_parity_model_scores_are_those_of_hugging_face(folders):
    from transformers import AutoModelForSequenceClassification

    plain = AutoModelForSequenceClassification.from_pretrained(folders[1], dtype=torch.float64).eval()
    plain.config.pad_token_id = None
    want = []
    for t in episodes():
        with torch.no_grad():
            said = plain(input_ids=t.tokens[None]).logits[0, 0].item()
        want.append((t.position, t.sample, t.reward + 0.5 * said, said + 0.25 * t.sample))
    for n in (1, 2):
        for rows in run_ranks(scores, n, folders):
            torch.testing.assert_close(torch.tensor(rows), torch.tensor(sorted(want)), rtol=1e-6, atol=1e-6)


def built(world, sections: dict):
    cfg = config(model={"path": "tiny"}, **sections)
    build_models(cfg, world, compose(cfg).needs)


@pytest.mark.parametrize("flag", ["--reward.model", "--safety.cost-model"])
@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("three", "three: its head score.weight computes 3 numbers, but "),
        ("tiny", "tiny: its weights have no head score.weight; use a classifier"),
        ("absent", "'/absent' is not a folder"),
    ],
)
def test_a_path_that_is_no_classifier_with_one_label_is_named_with_its_flag(flag, model, told, tmp_path):
    path = {"tiny": "tiny", "absent": "/absent"}.get(model) or labelled(
        tmp_path / "three", load_tokenizer(resolve("tiny")), 3
    )
    section, field = ("reward", "model") if flag == "--reward.model" else ("safety", "cost_model")
    with pytest.raises(RankError, match=f"{flag} .*{told}") as error:
        run_ranks(built, 1, {section: {field: path}})
    if model == "three":
        assert ("--reward.model rm.yaml" in str(error.value)) == (flag == "--reward.model")


def broken(folder, **changes):
    """A copy of a classifier with another config, or with a weight that is no number."""
    copied = Path(shutil.copytree(folder, folder.with_name("broken")))
    told = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(told | changes))
    if not changes:
        held = load_file(copied / "model.safetensors")
        held["score.weight"][0, 3] = math.nan
        save_file(held, copied / "model.safetensors", {"format": "pt"})
    return str(copied)


@pytest.mark.parametrize("flag", ["--reward.model", "--safety.cost-model"])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"max_position_embeddings": 12},
            r"prompt \d+, sample \d has \d+ tokens for a model that reads 12 .*lower --ro",
        ),
        ({}, "qwen2 gives numbers that are not finite: its weights hold such numbers"),
    ],
)
def test_a_classifier_that_cannot_score_a_response_is_named(flag, changes, told, tmp_path):
    classifier(str(tmp_path / "classifier"))
    path = broken(tmp_path / "classifier", **changes)
    sections = {"reward": {"model": path}} if flag == "--reward.model" else {"safety": {"cost_model": path}}
    with pytest.raises(RankError, match=f"{flag} {path}:? {told}"):
        run_ranks(train_demo, 1, str(tmp_path / "run"), sections | {"eval": {"every": 0}})


def test_samples_hold_the_reward_with_the_models_score_and_every_part(tmp_path):
    model = str(tmp_path / "classifier")
    classifier(model)
    reward = {"function": letters_right(tmp_path), "model": model, "model_coef": 0.5}
    sections = {"run": {"steps": 1}, "eval": {"every": 0}, "reward": reward}
    run_ranks(train_demo, 1, str(tmp_path / "run"), sections)
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert rows and len({row["model"] for row in rows}) > 1
    for row in rows:
        right = row["reward"] - 0.5 * row["model"]
        assert min(abs(right), abs(right - 1)) < 1e-6 and row["part/letters"] == len(row["completion"])


def judged(world, folder: str, reward: dict):
    """Returns numbers of the evaluation before the first step, and Hugging Face's scores of this rank's samples."""
    from transformers import AutoModelForSequenceClassification

    run = open_demo(world, folder, {"eval": {"every": 2, "prompts": 8, "samples": 2}, "reward": reward})
    with run.memory.rollout_phase():
        run.evaluate(0)
    assert (run.evaluation.to_judge is None) == (not reward)
    said = []
    if run.evaluation.to_judge is not None:
        plain = AutoModelForSequenceClassification.from_pretrained(reward["model"]).eval()
        plain.config.pad_token_id = None
        with torch.no_grad():
            said = [plain(input_ids=t.tokens[None]).logits[0, 0].item() for t in run.evaluation.to_judge]
    with run.memory.training_phase():
        run.judge()
    run.close()
    return run.evaluation.numbers, said


@pytest.mark.parametrize("n", [1, 2])
def test_layout_an_evaluation_has_the_reward_models_score_in_it(n, tmp_path):
    """`eval/score` comes from function and model as in training; `eval/accuracy` comes from the function alone."""
    model = str(tmp_path / "classifier")
    classifier(model)
    (plain, _), *_ = run_ranks(judged, n, str(tmp_path / "plain"), {})
    got = run_ranks(judged, n, str(tmp_path / "run"), {"model": model, "model_coef": 0.5})
    said = [score for _, scores in got for score in scores]
    assert len(said) == 16 and len(set(said)) > 4
    for numbers, _ in got:
        assert numbers["eval/model"] == pytest.approx(sum(said) / 16, abs=1e-5)
        assert numbers["eval/score"] == pytest.approx(plain["eval/score"] + 0.5 * sum(said) / 16, abs=1e-5)
        assert numbers["eval/accuracy"] == plain["eval/accuracy"] and abs(sum(said) / 16) > 1e-2


def refreshed(world, folders):
    """Returns distance of policy and reference after each of three steps."""
    cfg = config(
        model={"path": folders[0], "dtype": "float64"},
        algo={"preset": "grpo", "kl_coef": 0.1},
        reference={"refresh_every": 2},
    )
    algo = compose(cfg)
    models: Models = build_models(cfg, world, algo.needs)
    assert models.reference is not None
    out = []
    for step in range(3):
        batch = packed(cfg, world, episodes())
        score(batch, models, algo, cfg, world.data_peers)
        batch = algo.advantages(batch, world.data_peers)
        update(batch, models, algo, cfg, step, world.data_peers)
        out.append(relative(full_weights(models.policy), full_weights(models.reference)))
    return out


def test_a_reference_is_refreshed_every_second_step(folders):
    for n in (1, 2):
        first, second, third = run_ranks(refreshed, n, folders)[0]
        assert first > 1e-3 and second == 0.0 and third > 1e-3


def test_what_steers_moves_by_the_papers_formulas():
    cfg = config(
        algo={"kl_coef": 0.2, "kl_target": 0.1, "kl_horizon": 1000.0},
        safety={"cost": "cost", "limit": 0.5, "lr": 0.1, "multiplier": 2.0},
    )
    algo = compose(cfg)
    adapt_coefficients(algo, cfg, {"kl/mean": 0.11, "safety/cost": 1.5}, 100)
    assert algo.state["kl_coef"] == pytest.approx(0.2 * (1 + 0.1 * 100 / 1000))  # 10% above the target
    assert algo.state["multiplier"] == pytest.approx(2.0 * math.exp(0.1 * 2.0))  # a cost of 1 above the limit
    adapt_coefficients(algo, cfg, {"kl/mean": 9.0, "safety/cost": 0.5}, 100)
    assert algo.state["kl_coef"] == pytest.approx(0.2 * 1.01 * 1.02)  # the error is bounded to 20%
    constant = config(algo={"kl_coef": 0.2})
    fixed = compose(constant)
    adapt_coefficients(fixed, constant, {"kl/mean": 9.0}, 100)
    assert fixed.state["kl_coef"] == 0.2
