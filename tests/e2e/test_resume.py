"""A rank is killed, a file is cut short: the same command goes on, and nothing that was saved is lost."""

import json
import re
import shutil
import time

import pytest

from tests.e2e.runner import GONE_WITHIN, Job, argv, metrics
from tests.e2e.warm import succeed

pytestmark = pytest.mark.timeout(300)
STEPS = 8
FLAGS = argv(
    "--rollout.engine hf --rollout.assignment static --rollout.prompts_per_step 8 --eval.every 4 --eval.prompts 16 "
    "--checkpoint.every 2 --checkpoint.keep 10 --tracking.trackers jsonl --run.timeout 30"
)
CURVE = ("reward/mean", "eval/accuracy", "entropy/mean", "grad_norm", "lr", "version", "logp_diff/max")
SLOW = """
import pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if pathlib.Path({flag!r}).exists():
        time.sleep(0.05)
    return float(solution_str == ground_truth)
"""


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> dict:
    """Runs a job that is killed in the middle and started again, beside one that was left alone."""
    root = tmp_path_factory.mktemp("resume")
    reward, slow = root / "reward.py", root / "slow"
    reward.write_text(SLOW.format(flag=str(slow)))
    slow.touch()
    flags = [*FLAGS, "--run.steps", STEPS, "--reward.function", reward]
    job = Job([*flags, "--run.dir", root / "run"], ranks=2)
    try:
        job.wait_for(lambda: len(metrics(root / "run")) >= 5, 120, "step 5")
        killed_at = time.time()
        job.rank(1).kill()
        killed = job.wait(60)
    finally:
        job.kill()
    before = metrics(root / "run")
    saved = sorted(p.name for p in (root / "run" / "checkpoints").glob("step_*"))
    # A kill in the middle of a save leaves these.
    half = root / "run" / "checkpoints" / ".incomplete-step_6"
    if not half.exists():
        shutil.copytree(root / "run" / "checkpoints" / "step_4", half)
        (half / "MANIFEST.json").unlink()
    slow.unlink()
    resumed = succeed([*flags, "--run.dir", root / "run"], 120, ranks=2)
    whole = succeed([*flags, "--run.dir", root / "whole"], 120, ranks=2)
    return {
        "root": root,
        "flags": flags,
        "killed": killed,
        "killed_at": killed_at,
        "before": before,
        "saved": saved,
        "resumed": resumed,
        "whole": whole,
    }


def test_resume_killed_rank_ends_the_whole_job(story):
    killed = story["killed"]
    assert not killed.timed_out and killed.rc != 0 and not killed.left, killed.show()
    assert killed.ended - story["killed_at"] < GONE_WITHIN, killed.show()
    assert len(killed.messages) <= 1, killed.show()
    assert any("Signal 9" in line or "SIGKILL" in line for line in killed.err), killed.show()


def test_resume_by_the_same_command_goes_on_to_the_end(story):
    resumed = story["resumed"]
    newest = story["saved"][-1]
    step = int(newest.removeprefix("step_"))
    assert step >= 4
    said = [line for line in resumed.out if line.startswith("resumed from")]
    assert said == [f"resumed from {story['root'] / 'run' / 'checkpoints' / newest}: step {step}"], resumed.show()
    shown = [int(re.match(r"step +(\d+)/", line)[1]) for line in resumed.out if re.match(r"step +\d+/", line)]
    assert shown == list(range(step + 1, STEPS + 1))
    rows = metrics(story["root"] / "run")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "no step missing, none twice"
    assert rows[:step] == story["before"][:step], "what was logged before stays as it was"


def test_resume_continues_the_same_curve(story):
    """The resumed run has the same samples, optimizer state and numbers as the run without a break."""
    for one, other in zip(metrics(story["root"] / "whole"), metrics(story["root"] / "run"), strict=True):
        assert ("eval/accuracy" in one) == (one["step"] in (1, 5, 8))
        for name in set(CURVE) & set(one):
            assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-6), (name, one["step"])


def test_resume_loses_no_checkpoint(story):
    folder = story["root"] / "run" / "checkpoints"
    assert {p.name for p in folder.glob("step_*")} == {"step_2", "step_4", "step_6", "step_8"}
    assert set(story["saved"]) <= {p.name for p in folder.glob("step_*")}
    assert (folder / "latest").resolve().name == "step_8"
    assert not list(folder.glob(".incomplete*")), "the half-written one was replaced by a whole one"


def test_resume_falls_back_to_the_older_valid_checkpoint(story, tmp_path):
    """The newest is cut short, the one before it lost its manifest: both are named, and the next older one is taken."""
    folder = tmp_path / "run"
    shutil.copytree(story["root"] / "run", folder, symlinks=True)
    saves = folder / "checkpoints"
    weights = saves / "step_8" / "model" / "model.safetensors"
    whole = weights.stat().st_size
    with open(weights, "r+b") as file:
        file.truncate(whole // 2)
    (saves / "step_6" / "MANIFEST.json").unlink()
    intact = (saves / "step_4" / "MANIFEST.json").read_text()
    ended = succeed([*story["flags"], "--run.steps", "9", "--run.dir", folder], 120)
    told = "\n".join(ended.err)
    assert "step_8 is damaged (model/model.safetensors" in told and f"{whole // 2} bytes" in told, ended.show()
    assert "step_6 is damaged (MANIFEST.json" in told and "resuming from step_4" in told, ended.show()
    assert f"resumed from {saves / 'step_4'}: step 4" in ended.out, "two ranks saved it, one takes it up"
    assert (saves / "step_4" / "MANIFEST.json").read_text() == intact
    assert [row["step"] for row in metrics(folder)] == list(range(1, 10))
    manifest = json.loads((saves / "step_8" / "MANIFEST.json").read_text())
    assert manifest["world_size"] == 1, "the damaged one was replaced when the run came by again"
    assert (saves / "step_8" / "model" / "model.safetensors").stat().st_size == whole
    assert (saves / "latest").resolve().name == "step_9"


def test_resume_of_a_finished_run_changes_nothing(story, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(story["root"] / "run", folder, symlinks=True)
    before = metrics(folder)
    ended = succeed([*story["flags"], "--run.dir", folder], 120)
    assert metrics(folder) == before, ended.show()
    assert (folder / "checkpoints" / "latest").resolve().name == "step_8"
