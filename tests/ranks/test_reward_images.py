"""Reward models and critics that read images: trained on one rank and on two, saved, and used in RL."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from spmdrl.config.reward_model import RewardModelConfig
from spmdrl.hub.build import build_model
from spmdrl.hub.expand import positions
from spmdrl.hub.images import forward_inputs
from spmdrl.hub.vision import read_vision
from spmdrl.sft import train as train_supervised
from spmdrl.supervised.reward_model import build_reward_model
from spmdrl.train import train
from tests.ranks import given as jobs
from tests.ranks.cases import full_weights
from tests.ranks.demo import Interrupted, first_step, metrics, open_demo
from tests.ranks.harness import RankError, run_ranks
from tests.ranks.test_rl_images import made, sections
from tests.unit import vision_models as tiny


@pytest.fixture(scope="module", params=["qwen2_5_vl", "smolvlm"])
def given(request, tmp_path_factory):
    """Returns the folder of `test_rl_images.made`, with pairs and labelled steps for the same prompts."""
    folder = made(request.param, tmp_path_factory.mktemp(request.param))
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    pairs, steps = [], []
    for number, row in enumerate(rows):
        shown = {name: row[name] for name in ("prompt", "images") if name in row}
        pairs.append(shown | {"chosen": "good" * (1 + number % 2), "rejected": "bad" + "x" * (number % 3)})
        steps.append(shown | {"completions": ["a", "b"], "labels": [True, bool(number % 2)]})
    for name, found in (("pairs", pairs), ("steps", steps)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder


def rewarded(world, folder: str, source: str, rows: str = "pairs", model: str = "model") -> tuple[dict, bool]:
    """Trains a reward model for two steps; returns its weights, and whether this rank's first batch has images."""
    base = Path(source)
    changes = dict(
        run={"steps": 2},
        model={"path": str(base / model), "dtype": "float64"},
        optimizer={"lr": 1e-2, "eps": 1e-2},
        policy={"max_tokens_per_microbatch": 1024},
        eval={"every": 2},
        checkpoint={"at_end": True},
        reward_model={"rows": rows},
    )
    settings = jobs.small(folder, str(base / f"{rows}.jsonl"), rows=6, template="")
    run = jobs.opened(world, jobs.with_sections(RewardModelConfig(), settings, changes), build_reward_model)
    seen, take = [], run.rows

    def watched(step):
        seen.append(take(step))
        return seen[-1]

    run.rows = watched
    return jobs.trained(run, train_supervised), any(seen[0].images)


@pytest.fixture(scope="module")
def reward_model(given, tmp_path_factory):
    """Trains a reward model on pairs, on one rank; returns the job's folder."""
    folder = tmp_path_factory.mktemp("reward") / "one"
    run_ranks(rewarded, 1, str(folder), str(given))
    return folder


def model_of(folder) -> str:
    return str(folder / "checkpoints" / "latest" / "model")


def test_layout_a_reward_model_of_images_is_the_same_on_one_rank_and_on_two(given, reward_model, tmp_path):
    for rows, one in (("pairs", reward_model), ("steps", tmp_path / "one")):
        if rows == "steps":
            run_ranks(rewarded, 1, str(one), str(given), rows)
        two = run_ranks(rewarded, 2, str(tmp_path / f"two {rows}"), str(given), rows)
        assert any(images for _, images in two)
        saved = build_model(Path(model_of(one)), "float64", head="score", labels=1 if rows == "pairs" else 2)
        kind = "ForSequenceClassification" if rows == "pairs" else "ForTokenClassification"
        assert saved.config.architectures == [type(saved).__name__] and type(saved).__name__.endswith(kind)
        assert saved.score.weight.any()
        weights = dict(saved.named_parameters())
        assert weights.keys() == two[0][0].keys()
        for name, value in weights.items():
            torch.testing.assert_close(two[0][0][name], value.detach(), rtol=1e-6, atol=1e-9, msg=name)
        for got, want in zip(metrics(tmp_path / f"two {rows}"), metrics(one), strict=True):
            for key in ("loss", "grad_norm", "accuracy/mean"):
                assert got[key] == pytest.approx(want[key], rel=1e-6, abs=1e-9), key


def ppo(world, folder: str, given_sections: dict, stop_after: int = 0) -> tuple:
    """Trains by PPO; returns this rank's episodes of the first step and the critic's weights."""
    run = open_demo(world, folder, given_sections, stop_after)
    seen = first_step(run)
    with suppress(Interrupted):
        train(run)
    run.close()
    critic = full_weights(run.models.critic)
    return [(e.tokens.tolist(), list(e.images)) for e in seen], critic if world.is_first else None


@torch.no_grad()
def scores_alone(folder: str, episodes: list) -> list[float]:
    """Scores of episodes, each alone in plain transformers."""
    hf, out = build_model(Path(folder), "float64", head="score"), []
    vision = read_vision(hf.config)
    for tokens, images in episodes:
        ids = torch.tensor(tokens)
        place = positions(ids, images, vision)
        place = place[:, None] if vision.mrope else place[None]
        states = hf.model(input_ids=ids[None], position_ids=place, use_cache=False, **forward_inputs(images, vision))
        out.append(float(hf.score(states.last_hidden_state[0, -1])))
    return out


def test_layout_ppo_with_a_critic_and_a_reward_model_of_images(given, reward_model, tmp_path):
    path = model_of(reward_model)
    more = {
        "algo": {"preset": "ppo", "updates_per_step": 2},
        "reward": {"model": path, "model_coef": 0.5},
        "eval": {"every": 2, "prompts": 4, "samples": 1},
    }
    settings = sections(given, **more)
    settings["data"] |= {"eval": settings["data"]["train"]}
    ((episodes, critic),) = run_ranks(ppo, 1, str(tmp_path / "one"), settings)
    assert any(images for _, images in episodes) and critic["score.weight"].any()
    # The second run is killed after its first step, and goes on from its checkpoint.
    settings["checkpoint"] = {"every": 1}
    run_ranks(ppo, 2, str(tmp_path / "two"), settings, 1)
    two = run_ranks(ppo, 2, str(tmp_path / "two"), settings)
    for name, value in critic.items():
        torch.testing.assert_close(two[0][1][name], value, rtol=1e-6, atol=1e-9, msg=name)
    alike = ("loss", "grad_norm", "reward/mean", "reward/model", "critic/loss", "eval/model")
    for row, want in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        assert {"reward/model", "critic/loss"} <= want.keys()
        for key in alike:
            if key in want:
                assert row[key] == pytest.approx(want[key], rel=1e-6, abs=1e-9), key
    first = metrics(tmp_path / "one")[0]
    scores = scores_alone(path, episodes)
    assert first["reward/model"] == pytest.approx(sum(scores) / len(scores), rel=1e-6)
    assert "eval/model" in first and torch.tensor(scores).std() > 1e-6


def test_models_that_read_text_only_are_refused_for_prompts_with_images(given, reward_model, tmp_path):
    if given.name.startswith("smolvlm"):
        pytest.skip("checked with one family")
    scorer = Path(shutil.copytree(model_of(reward_model), tmp_path / "coarse"))
    told = json.loads((scorer / "preprocessor_config.json").read_text())
    told["size"]["longest_edge"] //= 2
    (scorer / "preprocessor_config.json").write_text(json.dumps(told))
    for changes, words in (
        ({"reward": {"model": "tiny"}}, r"--reward\.model tiny reads text only, .*the first is row"),
        ({"safety": {"cost_model": "tiny"}}, r"--safety\.cost-model tiny reads text only"),
        ({"critic": {"path": "tiny"}}, r"--critic\.path tiny reads text only"),
        ({"reward": {"model": str(scorer)}}, r"--reward\.model .*coarse: it reads images in another way"),
    ):
        with pytest.raises(RankError, match=words):
            run_ranks(ppo, 1, str(tmp_path / "run"), sections(given, algo={"preset": "ppo"}, **changes))
    with pytest.raises(RankError, match="names Qwen2_5_VLForSequenceClassification, a reward model"):
        run_ranks(ppo, 1, str(tmp_path / "run"), sections(given, model={"path": model_of(reward_model)}))


def test_a_folder_without_a_head_is_refused_as_a_reward_model(given, tmp_path):
    """Published reward models of images keep another head beside the language model."""
    path = str(tiny.saved(given.name.rstrip("0123456789"), tmp_path / "model"))
    with pytest.raises(RankError, match=r"its weights have no head score\.weight"):
        run_ranks(ppo, 1, str(tmp_path / "run"), sections(given, reward={"model": path}))
