"""Functions of a user's own, `path/to/file.py:function`: the examples of recipes/own, alone and in a run."""

import dataclasses
import importlib.util
import json

import pytest
import torch

from spmdrl.algos.loss_inputs import LossInputs
from spmdrl.algos.losses import ppo
from spmdrl.algos.samples import Samples
from tests.e2e.runner import ROOT, argv, metrics
from tests.e2e.warm import succeed

OWN = ROOT / "recipes" / "own"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, OWN / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_advantage_subtracts_the_median_of_the_group():
    reward_B, group_B = torch.tensor([1.0, 0.0, 5.0, 2.0, 4.0]).double(), torch.tensor([7, 7, 7, 3, 3])
    seq_T = torch.arange(5).repeat_interleave(3)
    mask_T = torch.tensor([False, True, True]).repeat(5)
    rewards_T = torch.zeros(15, dtype=torch.float64)
    rewards_T[2::3] = reward_B
    advantages_T, returns_T = load("advantage").median_baseline(Samples(rewards_T, mask_T, seq_T, group_B))
    want_B = torch.tensor([0.0, -1.0, 4.0, -1.0, 1.0]).double()
    torch.testing.assert_close(advantages_T, torch.where(mask_T, want_B[seq_T], 0.0))
    torch.testing.assert_close(returns_T, advantages_T)


def test_own_loss_pulls_the_ratio_to_the_edge_of_its_range():
    """At a ratio of 1 its gradient is PPO's; at 1 +- clip_high, by the sign of the advantage, it is 0."""
    spo = load("loss").spo
    old_T, advantages_T = torch.tensor([-0.3, -2.0, -1.0, -0.5]).double(), torch.tensor([2.0, -1.0, 0.0, 3.0]).double()
    mask_T = torch.tensor([True, True, True, False])
    x = LossInputs(old_T, old_T, advantages_T, mask_T, torch.zeros(4, dtype=torch.int64))

    def gradient(loss, ratio_T: torch.Tensor) -> torch.Tensor:
        logp_T = (old_T + ratio_T.log()).requires_grad_()
        per_token, stats = loss(dataclasses.replace(x, logp=logp_T))
        assert not per_token[3] and all(not s[3] and not s.requires_grad for s in stats.values())
        return torch.autograd.grad(per_token.sum(), logp_T)[0]

    here_T = torch.ones(4).double()
    torch.testing.assert_close(gradient(spo, here_T), gradient(ppo, here_T))
    edge_T = 1 + 0.2 * advantages_T.sign()
    torch.testing.assert_close(gradient(spo, edge_T), torch.zeros(4).double())


def test_own_filter_and_reward():
    score_B, group_B = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.2, 0.0]), torch.tensor([4, 4, 2, 2, 9, 9])
    assert load("filter").within_reach(score_B, group_B).tolist() == [True, True, False, False, False, False]
    compute_score = load("reward").compute_score
    assert compute_score("", " edcba", "edcba", {}) == {"score": 1.0, "match": 1.0, "place": 1.0}
    assert compute_score("", "ebcda", "edcba", {}) == {"score": 0.0, "match": 0.0, "place": pytest.approx(0.6)}
    assert compute_score("", "", "edcba", {}) == {"score": 0.0, "match": 0.0, "place": 0.0}


def test_own_reward_counts_the_letters_at_their_place():
    score = load("letters").compute_score
    assert score("", " edcba", "edcba", {}) == 1.0
    assert score("", "ebcda", "edcba", {}) == pytest.approx(0.6)
    assert score("", "edcbaxyzxy", "edcba", {}) == 0.5
    assert score("", "", "edcba", {}) == 0.0


@pytest.mark.timeout(240)
def test_own_functions_train_together(tmp_path):
    """All four functions work in one run of two ranks and see its groups whole."""
    flags = argv("--config recipes/own/demo.yaml --rollout.engine hf --run.steps 2 --eval.every 2 --eval.prompts 64")
    succeed([*flags, "--tracking.trackers", "jsonl", "--run.dir", tmp_path / "run"], 120, ranks=2)
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["filter/accepted"] <= 1, "the filter was asked"
        assert row["reward/part/match"] == pytest.approx(row["reward/trained"])
        assert row["reward/part/place"] > row["reward/part/match"]
        # Rewards are 0 and 1 and their median 0, 1/2 or 1, in groups that are mixed.
        assert 0 < row["advantage/nonzero"] <= 1
        assert row["penalty"] > 0, "the last updates of a step are off its policy"
        assert row["grad_norm"] > 0
    assert rows[0]["eval/accuracy"] > 0.25


def test_evaluation_without_a_graded_sample_says_null(tmp_path):
    """JSON has no NaN: a reader other than Python would not take the line."""
    (tmp_path / "silent.py").write_text("def nothing(completions, **columns):\n    return [None]\n")
    flags = argv("--rollout.engine hf --run.device cpu --eval.prompts 4 --eval.samples 2 --reward.max-ungraded 1")
    flags += ["--run.dir", tmp_path / "run", "--reward.function", f"{tmp_path / 'silent.py'}:nothing"]
    line = succeed(flags, module="spmdrl.evaluate").out[-1]
    told = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert told["eval/accuracy"] is told["eval/score"] is told["eval/pass@2"] is None, told
    assert (told["prompts"], told["samples"]) == (4, 8)
