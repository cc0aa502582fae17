"""Steps without signal, filters that never fill, samples that are not numbers: situations an algorithm may meet."""

import json

import pytest

from tests.e2e.test_bad_input import QUICK, START, refused
from tests.e2e.warm import run, succeed

pytestmark = pytest.mark.timeout(240)


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def reward_file(folder, body: str):
    file = folder / "reward.py"
    file.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n")
    return file


def test_bad_filter_that_never_fills_ends_with_its_acceptance_rate(tmp_path):
    reward = reward_file(tmp_path, "return 0.0")
    flags = ["--algo.preset", "dapo", "--filter.max_rounds", "3", "--reward.function", reward]
    ended = run([*QUICK, *flags, "--run.dir", tmp_path / "run"], START, ranks=2)
    refused(ended, "mixed kept 0 of 12 prompts", "acceptance rate 0.0%", "3 rounds", "--filter.max-rounds", "phase ")


def test_a_step_of_equal_rewards_is_skipped_and_counted(tmp_path):
    reward = reward_file(tmp_path, "return 1.0")
    for preset in ("grpo", "sppo", "gspo"):
        folder = tmp_path / preset
        succeed([*QUICK, "--algo.preset", preset, "--reward.function", reward, "--run.dir", folder], START)
        rows = metrics(folder)
        assert [row["updates_skipped"] for row in rows] == [1.0, 1.0], rows
        assert [row["version"] for row in rows] == [0, 0]  # the weights are those of the start
        assert all(row["grad_norm"] == 0 for row in rows)


NAN = "return float('nan') if solution_str.startswith(ground_truth[0]) else float(solution_str == ground_truth)"


def test_bad_samples_are_left_out_and_counted_where_asked(tmp_path):
    reward = reward_file(tmp_path, NAN)
    flags = ["--reward.function", reward, "--run.dir", tmp_path / "run"]
    refused(run([*QUICK, *flags], START), "nan", "not finite", "prompt ", "sample ")
    succeed([*QUICK, *flags, "--filter.bad_sample", "skip", "--run.steps", "1"], START, ranks=2)
    (row,) = metrics(tmp_path / "run")
    # It is not null, which the tracker writes for what is no number.
    assert 1 <= row["filter/bad_samples"] <= 16 and 0.0 <= row["reward/mean"] <= 1.0


FILTER = """
import torch

def half(score_B, group_B):
    return torch.arange(len(score_B)) % 2 == 0
"""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--algo.loss", "{}/own.py:nothing"], ["--algo.loss", "own.py defines no nothing"]),
        (["--filter.keep", "{}/own.py:half"], ["own.py:half kept only a part of groups"]),
        (["--safety.cost", "price"], ["--safety.cost price", "the reward does not give this part", "its parts: none"]),
        (["--algo.preset", "gdpo", "--algo.part-weights", "form=1"], ["form"]),
        (["--algo.preset", "prime", "--process-reward.path", "no/such/place"], ["no/such/place"]),
        (["--reward.model", "tiny"], ["score.weight"]),
        (["--reward.model", "{}/rm.yaml"], ["rm.yaml", "no head score.weight", "ForSequenceClassification"]),
    ],
    ids=["function", "half groups", "cost", "part", "process model", "reward model", "its file"],
)
def test_bad_algorithm_settings_are_one_message(flags, words, tmp_path):
    (tmp_path / "own.py").write_text(FILTER)
    (tmp_path / "rm.yaml").write_text("path: tiny\n")
    flags = [flag.format(tmp_path) for flag in flags]
    refused(run([*QUICK, *flags, "--run.dir", tmp_path / "run"], START), *words)
