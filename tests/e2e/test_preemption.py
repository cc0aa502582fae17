"""A request to leave: the step is finished or abandoned, saved, marked, and the same command continues from there."""

import json
import os
import re
import signal
import time

import pytest

from tests.e2e.runner import Job, argv, metrics, succeed

pytestmark = pytest.mark.timeout(300)
FLAGS = argv(
    "--rollout.engine hf --rollout.prompts_per_step 4 --rollout.samples_per_prompt 4 --eval.every 0 "
    "--tracking.trackers jsonl --run.timeout 60 --rollout.assignment static"
)
LONG = argv("--rollout.prompts_per_step 20000 --rollout.max_sequences 16 --rollout.max_new_tokens 60 --run.steps 2")
"""Settings with which a step samples for minutes."""
HANGS = """
import pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    here = pathlib.Path(__file__).parent
    rows = here / "run" / "metrics.jsonl"
    while (here / "slow").exists() and rows.exists() and rows.read_text().count("\\n") >= 2:
        (here / "stamp").touch()
        time.sleep(0.1)
    return float(solution_str == ground_truth)
"""
"""Reward file whose function does not end once two steps are done, as long as there is a file `slow`."""
SLOW = """
import pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    pathlib.Path({stamp!r}).touch()
    time.sleep({seconds})
    return float(solution_str == ground_truth)
"""


def marker(folder) -> dict:
    return json.loads((folder / "PREEMPTED").read_text())


def said(ended) -> list[str]:
    return [line for line in ended.out if line.startswith("preempted (")]


@pytest.mark.parametrize(
    ("number", "target"), [(signal.SIGUSR1, "everyone"), (signal.SIGTERM, "everyone"), (signal.SIGINT, "terminal")]
)
def test_preemption_finishes_the_step_saves_and_resumes(number, target, tmp_path):
    """The signal goes to all processes, also torchrun's and graders', or as Ctrl-C to the group of the terminal, which
    torchrun passes on once more."""
    reward, folder = tmp_path / "reward.py", tmp_path / "run"
    reward.write_text(SLOW.format(stamp=str(tmp_path / "stamp"), seconds=0.1))
    flags = [*FLAGS, "--reward.function", reward, "--run.dir", folder]
    # This acts as `trap '' USR1` does: an ignored signal stays ignored in torchrun, and not in the ranks.
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    job = Job([*flags, "--run.steps", "200"], ranks=2)
    signal.signal(signal.SIGUSR1, before)
    try:
        job.wait_for(lambda: len(metrics(folder)) >= 1, 120, "step 1")
        told = time.time()
        if target == "terminal":
            os.killpg(job.process.pid, number)
        for process in job.family() if target == "everyone" else []:
            process.send_signal(number)
        ended = job.wait(90)
    finally:
        job.kill()
    # torchrun itself ends with its own exit code where it was told to end.
    assert not ended.timed_out and not ended.left and (ended.rc == 0) == (number == signal.SIGUSR1), ended.show()
    print(f"left {ended.ended - told:.1f} s after {number.name}")
    done, mark = metrics(folder)[-1]["step"], marker(folder)
    assert mark["step"] == done and mark["checkpoint"] == f"checkpoints/step_{done}" and mark["signal"] == number.name
    assert (folder / mark["checkpoint"] / "MANIFEST.json").is_file()
    (line,) = said(ended)
    assert re.match(rf"preempted \({number.name} at rank \d\): step {done} was finished; step {done} is in ", line), (
        line
    )
    assert ended.messages == [], ended.show()
    told = [line for line in ended.err if line.startswith("SIGINT: ")]
    said_once = ["SIGINT: this step is finished or abandoned within 25 s, and saved; Ctrl-C again ends the job at once"]
    assert told == (said_once if number == signal.SIGINT else []), ended.show()
    if number == signal.SIGUSR1:
        assert "Traceback" not in ended.ours, ended.show()
    if target == "everyone":
        resumed = succeed([*flags, "--run.steps", done + 1], 120, ranks=2)
        assert f"resumed from {folder}/checkpoints/step_{done}: step {done}" in resumed.out, resumed.show()
        assert not (folder / "PREEMPTED").exists()
        assert [row["step"] for row in metrics(folder)] == list(range(1, done + 2))


def test_preemption_abandons_a_step_that_would_sample_too_long(tmp_path):
    """Half of the grace goes to sampling, on all ranks or on none; no step was done, so nothing is saved."""
    reward, stamp, folder = tmp_path / "reward.py", tmp_path / "stamp", tmp_path / "run"
    reward.write_text(SLOW.format(stamp=str(stamp), seconds=0))
    job = Job([*FLAGS, *LONG, "--run.grace", "24", "--reward.function", reward, "--run.dir", folder], ranks=2)
    try:
        job.wait_for(stamp.exists, 120, "a first grading")
        told = time.time()
        job.rank(0).send_signal(signal.SIGUSR1)
        ended = job.wait(60)
    finally:
        job.kill()
    assert not ended.timed_out and not ended.left and ended.rc == 0, ended.show()
    assert 11 < ended.ended - told < 24 + 10, ended.show()
    assert metrics(folder) == [] and marker(folder)["step"] == 0 and marker(folder)["checkpoint"] == ""
    assert said(ended) == [
        "preempted (SIGUSR1 at rank 0): step 1 was abandoned while it sampled; no step is finished yet, and the same "
        "command continues from there"
    ], ended.show()


@pytest.mark.parametrize(
    ("every", "what"),
    [(0, "step 3 was abandoned while it sampled"), (2, "the evaluation after step 2 was abandoned")],
    ids=["step", "evaluation"],
)
def test_preemption_saves_what_was_learnt_before_what_is_abandoned(every, what, tmp_path):
    """A grading that would outlast the grace is not awaited, in a step and in an evaluation."""
    reward, slow, folder = tmp_path / "reward.py", tmp_path / "slow", tmp_path / "run"
    reward.write_text(HANGS)
    slow.touch()
    flags = [*FLAGS, "--run.steps", 4, "--eval.every", every, "--run.grace", 16]
    flags += ["--eval.prompts", 8] if every else []
    flags += ["--reward.function", reward, "--reward.timeout", 100, "--run.dir", folder]
    job = Job(flags, ranks=2)
    try:
        job.wait_for((tmp_path / "stamp").exists, 120, "a grading that does not end")
        told = time.time()
        job.rank(1).send_signal(signal.SIGUSR1)
        ended = job.wait(60)
    finally:
        job.kill()
    assert not ended.timed_out and not ended.left and ended.rc == 0 and ended.messages == [], ended.show()
    assert ended.ended - told < 16 + 10, ended.show()
    assert said(ended) == [
        f"preempted (SIGUSR1 at rank 1): {what}; step 2 is in {folder}/checkpoints/step_2, and the same command "
        "continues from there"
    ], ended.show()
    assert marker(folder)["step"] == 2 and len(metrics(folder)) == 2
    slow.unlink()
    resumed = succeed(flags, 120, ranks=2)
    assert f"resumed from {folder}/checkpoints/step_2: step 2" in resumed.out, resumed.show()
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and ("eval/accuracy" in rows[2]) == (every > 0)


def test_preemption_second_signal_ends_the_job_at_once(tmp_path):
    reward, stamp, folder = tmp_path / "reward.py", tmp_path / "stamp", tmp_path / "run"
    reward.write_text(SLOW.format(stamp=str(stamp), seconds=0))
    job = Job([*FLAGS, *LONG, "--reward.function", reward, "--run.dir", folder])
    try:
        job.wait_for(stamp.exists, 120, "a first grading")
        job.process.send_signal(signal.SIGINT)
        time.sleep(1.5)
        assert job.process.poll() is None, "the step goes on"
        told = time.time()
        job.process.send_signal(signal.SIGINT)
        ended = job.wait(30)
    finally:
        job.kill()
    assert not ended.timed_out and not ended.left and ended.rc == 128 + signal.SIGINT, ended.show()
    assert ended.ended - told < 5, ended.show()
    (message,) = ended.messages
    assert "was ended by a second signal, SIGINT, in phase rollout" in message
    assert any(line.startswith("SIGINT: this step is finished or abandoned within") for line in ended.err)
    assert not (folder / "PREEMPTED").exists()
