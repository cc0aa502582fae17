"""RL on prompts with images: the same on any number of ranks and placement, exact after a kill, pixels on every way.

The prompts show no image, one or two, of unlike sizes; the environment looks at nothing but tokens.
"""

import json
from contextlib import suppress

import pytest
import torch
from PIL import Image

from spmdrl.rl.environment import Environment, Observation
from spmdrl.train import train
from tests.ranks.cases import full_weights
from tests.ranks.demo import Interrupted, first_step, metrics, open_demo, untimed
from tests.ranks.harness import run_ranks
from tests.ranks.test_placement import split, split_demo
from tests.unit import vision_models as tiny

COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220)}
SECTIONS = {
    "rollout": {"max_new_tokens": 6, "samples_per_prompt": 4, "prompts_per_step": 4, "max_prompt_tokens": 400},
    "algo": {"kl_coef": 0.05, "updates_per_step": 2},
    "reward": {"function": "{folder}/reward.py"},
    "eval": {"every": 0},
    "run": {"steps": 2},
}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return (len(solution_str) + len(ground_truth)) % 3 / 2
"""


@pytest.fixture(scope="module", params=["qwen2_5_vl", "smolvlm"])
def given(request, tmp_path_factory):
    """Returns a folder with a tiny model of a family, rows with and without images, and a reward."""
    return made(request.param, tmp_path_factory.mktemp(request.param))


def made(family: str, folder):
    """Fills a folder with a tiny model of a family, rows with and without images, and a reward; returns the folder."""
    tiny.saved(family, folder / "model")
    rows = []
    for number in range(12):
        names = [f"{number}_{i}.png" for i in range(number % 3)]
        for i, name in enumerate(names):
            colour = list(COLOURS.values())[(number + i) % 2]
            Image.new("RGB", (20 + number % 4 * 12, 24 + i * 16), colour).save(folder / name)
        row = {"prompt": "<image>" * len(names) + f"which {number}?", "answer": "ab"[: 1 + number % 2]}
        rows.append(row | ({"images": names} if names else {}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return folder


def sections(folder, **more) -> dict:
    """Settings of a run on the rows in a folder; more: sections to merge."""
    out = {name: dict(values) for name, values in SECTIONS.items()}
    out["model"] = {"path": str(folder / "model"), "dtype": "float64"}
    out["data"] = {"train": str(folder / "rows.jsonl"), "limit": 0}
    out["reward"] = {"function": str(folder / "reward.py")}
    return {name: out.get(name, {}) | more.get(name, {}) for name in out.keys() | more.keys()}


def trained(world, folder: str, given_sections: dict, stop_after: int = 0) -> tuple:
    """Trains; returns the first step's episodes on this rank as plain values, and the weights on rank 0."""
    run = open_demo(world, folder, given_sections, stop_after)
    seen = first_step(run)
    with suppress(Interrupted):
        train(run)
    run.close()
    weights = full_weights(run.models.policy)
    rows = [(e.position, e.sample, e.tokens.tolist(), [[at for at, _ in s.images] for s in e.segments]) for e in seen]
    return rows, weights if world.is_first else None


def test_layout_images_give_the_same_run_on_one_rank_on_two_and_under_split_placement(given, tmp_path):
    ((one, weights),) = run_ranks(trained, 1, str(tmp_path / "one"), sections(given))
    two = run_ranks(trained, 2, str(tmp_path / "two"), sections(given))
    assert sorted(one) == sorted(row for seen, _ in two for row in seen) and len(one) == 16
    assert {len(places) for *_, segments in one for places in segments} == {0, 1, 2}, "no image, one, and two"
    for name, value in weights.items():
        torch.testing.assert_close(two[0][1][name], value, rtol=1e-6, atol=1e-9, msg=name)
    run_ranks(split_demo, 2, str(tmp_path / "split"), split(1), sections(given))
    found = {name: metrics(tmp_path / name) for name in ("one", "two", "split")}
    for name, rows in found.items():
        for row, want in zip(rows, found["one"], strict=True):
            assert row["logp_diff/max"] < 1e-6, (name, row["logp_diff/max"])
            for key in ("loss", "grad_norm", "reward/mean"):
                assert row[key] == pytest.approx(want[key], rel=1e-6, abs=1e-9), (name, key)


class Again(Environment):
    """Asks twice more, in tokens."""

    def reply(self, prompt, episode):
        return None if episode.turns == 3 else Observation([20 + episode.turns, 21])


PARTIAL = {
    "rollout": {"oversample": 2.0, "partial_steps": 1, "max_sequences": 64, "max_new_tokens": 24},
    "checkpoint": {"every": 1, "keep": 9},
    "run": {"steps": 3},
}


def carried(world, folder: str, given_sections: dict, stop_after: int = 0) -> dict | None:
    """Trains with partial rollouts of three turns; returns the weights on rank 0."""
    run = open_demo(world, folder, given_sections, stop_after)
    environment = run.sampler.environment = Again(run.images)
    if run.checkpoints.start_step:
        begun = [e for g in run.sampler.carried for e in g.open if e.images]
        assert world.rank or begun, "stopped in the middle of an episode with an image"
    with suppress(Interrupted):
        train(run)
    run.close()
    assert environment is run.sampler.environment
    weights = full_weights(run.models.policy)
    return weights if world.is_first else None


def test_resume_in_the_middle_of_an_episode_with_images_is_bit_equal(given, tmp_path):
    settings = sections(given, **PARTIAL)
    whole = run_ranks(carried, 2, str(tmp_path / "whole"), settings)[0]
    run_ranks(carried, 2, str(tmp_path / "broken"), settings, 1)
    broken = run_ranks(carried, 2, str(tmp_path / "broken"), settings)[0]
    assert whole.keys() == broken.keys() and all(torch.equal(whole[n], broken[n]) for n in whole)
    assert untimed(metrics(tmp_path / "whole")) == untimed(metrics(tmp_path / "broken"))


SLIDES = '''
from PIL import Image


class Slides:
    """Begins with the row's prompt and shows another picture after each turn."""

    def __init__(self, saves: bool = False):
        self.saves, self.turn = saves, 0

    def reset(self, row, seed):
        self.truth = row["answer"]

    def step(self, message):
        self.turn += 1
        picture = Image.new("RGB", (20 + 8 * self.turn, 24), (40 * self.turn, 90, 20 * len(self.truth)))
        return [{"role": "user", "content": [picture, "and?"]}], len(message["content"]) % 3 / 2, self.turn == 3

    def state(self):
        return {"turn": self.turn} if self.saves else None

    def restore(self, state):
        self.turn = state["turn"]
'''


def shown_in_turns(world, folder: str, given_sections: dict, stop_after: int = 0) -> dict | None:
    """Trains with partial rollouts in an environment of worker processes; returns the weights on rank 0."""
    run = open_demo(world, folder, given_sections, stop_after)
    if run.checkpoints.start_step:
        begun = [e for g in run.sampler.carried for e in g.open if len(e.images) > 1]
        assert world.rank or begun, "stopped in the middle of an episode with several images"
    with suppress(Interrupted):
        train(run)
    run.close()
    weights = full_weights(run.models.policy)
    return weights if world.is_first else None


def test_resume_in_the_middle_of_conversations_with_images_is_bit_equal(given, tmp_path):
    (tmp_path / "slides.py").write_text(SLIDES)
    end = {"turn_tokens": 5, "environment": f"{tmp_path}/slides.py:Slides"}
    (tmp_path / "env.yaml").write_text(json.dumps(end))
    settings = sections(given, **PARTIAL, reward={"function": "environment"}) | {"env": str(tmp_path / "env.yaml")}
    settings["rollout"] |= {"max_new_tokens": 200, "prompts_per_step": 2}
    settings["run"] |= {"deterministic": True}
    whole = run_ranks(shown_in_turns, 1, str(tmp_path / "whole"), settings)[0]
    run_ranks(shown_in_turns, 1, str(tmp_path / "broken"), settings, 1)
    broken = run_ranks(shown_in_turns, 1, str(tmp_path / "broken"), settings)[0]
    rows = metrics(tmp_path / "whole")
    assert untimed(rows) == untimed(metrics(tmp_path / "broken"))
    assert whole.keys() == broken.keys() and all(torch.equal(whole[n], broken[n]) for n in whole)
    assert [row["env/failures"] for row in rows] == [0, 0, 0] and rows[-1]["env/turns"] == 3
    assert max(row["logp_diff/max"] for row in rows) < 1e-6
