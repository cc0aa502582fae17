"""The recipe code_r1: its tasks can be solved, and its run learns from programs that ran in the sandbox."""

import json
import subprocess
import sys

import pytest

from tests.e2e.runner import ROOT, argv, metrics
from tests.e2e.test_configs import needs_smollm2
from tests.e2e.warm import succeed

RECIPE = ROOT / "recipes" / "code_r1"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Makes the files of tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    subprocess.run([sys.executable, RECIPE / "tasks.py", folder], check=True, capture_output=True)
    return folder


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_tasks_are_solved_by_their_solutions_and_by_nothing_less(tasks):
    train, held_out = rows_of(tasks / "train.jsonl"), rows_of(tasks / "held_out.jsonl")
    assert (len(train), len(held_out)) == (480, 96)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    for row in train + held_out:
        names: dict = {}
        exec(row["prompt"] + row["canonical_solution"] + "\n" + row["test"], names)
        names["check"](names["solve"])
        with pytest.raises((AssertionError, TypeError)):
            names["check"](lambda *args: None)


@needs_smollm2
@pytest.mark.timeout(300)
def test_a_step_of_the_recipe(tasks, tmp_path):
    files = ["--data.train", tasks / "train.jsonl", "--data.eval", tasks / "held_out.jsonl"]
    small = argv(
        "--rollout.engine hf --run.steps 1 --rollout.prompts_per_step 4 --rollout.samples_per_prompt 8 "
        "--eval.prompts 4 --checkpoint.no-at-end --tracking.trackers jsonl"
    )
    config = ["--config", RECIPE / "smollm2.yaml"]
    succeed([*config, *files, *small, "--run.dir", tmp_path / "run"], 280, ranks=2)
    (row,) = metrics(tmp_path / "run")
    # Some of 32 programs pass: about one in five does before training.
    assert row["reward/ungraded"] == 0 and 0 < row["reward/mean"] < 1, row
    assert 0 <= row["eval/accuracy"] < 1 and row["grad_norm"] > 0, row
