"""Preference learning and reward models as a user starts them: the commands of their pages learn."""

import re
import shlex

import pytest

from tests.e2e.runner import ROOT, metrics
from tests.e2e.warm import succeed

pytestmark = pytest.mark.timeout(240)


def by_page(page: str, folder, *more: str, place: int = 0) -> list[dict]:
    """Runs a command of a page of docs, and more flags, on two ranks; returns the lines that have an evaluation."""
    text = (ROOT / "docs" / f"{page}.md").read_text().replace("\\\n", " ")
    words = shlex.split(re.findall(r"^torchrun .*$", text, re.MULTILINE)[place])
    at = words.index(f"spmdrl.{page}")
    assert words[:at] == ["torchrun", "--nproc-per-node", "2", "-m"]
    succeed([*words[at + 1 :], *more, "--run.dir", folder], module=f"spmdrl.{page}", ranks=2)
    return [row for row in metrics(folder) if "eval/accuracy" in row]


def test_preference_by_the_command_of_its_page_learns(tmp_path):
    """Pairs that the policy prefers rightly beside its start: 0.977, 0.965 and 0.953 after 60 steps on seeds 0 to 2."""
    rows = by_page("preference", tmp_path / "run")
    assert rows[0]["eval/loss"] == pytest.approx(0.6931, abs=1e-4), "log 2: the policy is the reference"
    assert rows[-1]["eval/accuracy"] > 0.9 and rows[-1]["eval/loss"] < 0.5, rows
    assert rows[-1]["eval/rewards/margin"] > 0.3


@pytest.mark.parametrize("method", ["dpo", "sppo", "raft"])
def test_preference_on_own_samples_by_the_command_of_its_page_learns(method, tmp_path):
    """Exact reversals on seeds 0, 1, 2: dpo 0.977, 0.973, 0.941; sppo 0.949, 0.965, 0.914; raft 0.984, 0.977, 0.973."""
    rows = by_page("online_preference", tmp_path / "run", "--preference.method", method)
    assert 0.25 < rows[0]["eval/accuracy"] < 0.5 and rows[-1]["eval/accuracy"] > 0.85, rows


def test_reward_model_by_the_command_of_its_page_learns(tmp_path):
    """Pairs that are ranked rightly: 0.941, 0.949 and 0.953 after 300 steps on seeds 0 to 2."""
    rows = by_page("reward_model", tmp_path / "run")
    assert rows[0]["eval/accuracy"] == 0.5, "the new head gives 0 to everything"
    assert rows[-1]["eval/accuracy"] > 0.88 and rows[-1]["eval/loss"] < 0.25, rows


def test_process_reward_model_by_the_command_of_its_page_learns(tmp_path):
    """The first wrong step is found in all held-out responses after 60 steps on seeds 0 to 2."""
    rows = by_page("reward_model", tmp_path / "run", place=1)
    assert rows[0]["eval/accuracy"] == 0.5 and rows[0]["eval/accuracy/first_wrong"] == 0
    assert min(rows[-1][f"eval/accuracy/{name}"] for name in ("first_wrong", "no_wrong")) > 0.95, rows
    assert rows[-1]["eval/loss"] < 0.15 and rows[-1]["eval/score/wrong"] < 0.2
