"""Law 6 and the user's mistakes: one clear message from one rank, a non-zero exit, the whole job gone, nothing left.

Import time is not the job's fault: for mistakes found at the start, what is measured runs from the message to the end
of the last process; the whole must end within twice START seconds. Faults in the middle stamp their own moment.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.runner import GONE_WITHIN, Ended, argv
from tests.e2e.warm import run, succeed

pytestmark = pytest.mark.timeout(240)
START = 60.0
"""Generous limit: seconds to import torch and transformers on a loaded machine and find the mistake."""
TINY = Path(__file__).resolve().parents[2] / "spmdrl" / "assets" / "tiny"
QUICK = argv(
    "--rollout.engine hf --run.steps 2 --rollout.prompts_per_step 4 --rollout.samples_per_prompt 4 --eval.every 0 "
    "--tracking.trackers jsonl --run.timeout 30"
)


def refused(ended: Ended, *words: str) -> str:
    """Checks the form that every mistake must have; returns the one message."""
    assert ended.rc != 0, ended.show()
    assert len(ended.messages) == 1, ended.show()
    assert "Traceback" not in ended.ours, ended.show()
    message = ended.ours[ended.ours.index(ended.messages[0]) :]
    for word in words:
        assert word in message, f"{word!r} is not in the message\n{ended.show()}"
    assert not ended.left, ended.show()
    assert ended.seconds < 2 * START, ended.show()
    assert ended.ended - ended.stamp(ended.messages[0]) < GONE_WITHIN, ended.show()
    return message


def rows(path: Path, table: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    return path


# ── before anything is built ─────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--run.stepz", "3"], ["unknown flag --run.stepz", "did you mean --run.steps"]),
        (["--rollout.samples_per_promt", "3"], ["did you mean --rollout.samples-per-prompt"]),
        (["--algo.updates_per_step", "5"], ["--algo.updates-per-step 5", "must divide prompts_per_step 32", "4"]),
        (["--rollout.samples_per_prompt", "1"], ["--rollout.samples-per-prompt 1", "at least 2"]),
        (["--rollout.engine", "vlm"], ["--rollout.engine", "vllm", "hf"]),
        (["--config", "no/such.yaml"], ["--config no/such.yaml", "No such file"]),
        (["--policy.max_tokens_per_microbatch", "100"], ["--policy.max-tokens-per-microbatch 100", "at least 520"]),
        (["--data.train", "no/such.jsonl"], ["no data file 'no/such.jsonl'", "--data.train"]),
        (["--reward.function", "no/such.py"], ["--reward.function no/such.py", "no file"]),
    ],
    ids=lambda value: value[0].lstrip("-") if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_bad_flag_is_one_message(flags, words, tmp_path):
    refused(run([*flags, "--run.dir", tmp_path / "run"], START), *words)


def test_bad_yaml_key_names_the_line_and_the_nearest(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("run:\n  steps: 2\nrollout:\n  samples_per_promt: 4\n")
    refused(
        run(["--config", file, "--run.dir", tmp_path / "run"], START),
        f"{file}:4",
        "unknown key rollout.samples_per_promt",
        "did you mean rollout.samples_per_prompt",
    )


def test_bad_rollout_tp_does_not_divide_the_world(tmp_path):
    ended = run(["--rollout.tp", "3", "--rollout.engine", "vllm", "--run.dir", tmp_path / "run"], START, ranks=2)
    refused(ended, "--rollout.tp 3", "must divide the 2 ranks")
    assert not (tmp_path / "run").exists()


# ── data, model, checkpoint: found while the run is built ────────────────────


def test_bad_column_is_named_on_one_of_two_ranks(tmp_path):
    """Both ranks meet the bad column; the first one reports it, the log of each keeps the traceback."""
    data = rows(tmp_path / "data.jsonl", [{"question": "abcde=", "answer": "edcba"}])
    ended = run([*QUICK, "--data.train", data, "--run.dir", tmp_path / "run"], START, ranks=2)
    refused(ended, "no column 'prompt'", "question, answer", "--data.prompt-column")
    assert any("Traceback" in log.read_text() for log in (tmp_path / "run" / "logs").glob("rank_*.log"))


@pytest.mark.parametrize(
    ("table", "flags", "words"),
    [
        ([], [], ["holds no rows", "--data.train"]),
        (
            [{"prompt": "abcde=", "answer": "x"}],
            ["--data.answer_column", "truth"],
            ["no column 'truth'", "--data.answer-column"],
        ),
        (
            [{"prompt": "a" * 60, "answer": "x"}],
            ["--rollout.max_prompt_tokens", "32"],
            ["every prompt is longer than", "--rollout.max-prompt-tokens"],
        ),
    ],
    ids=["empty dataset", "no such answer column", "all prompts too long"],
)
def test_bad_data_is_refused(table, flags, words, tmp_path):
    data = rows(tmp_path / "data.jsonl", table)
    refused(run([*QUICK, *flags, "--data.train", data, "--run.dir", tmp_path / "run"], START), *words)


def test_bad_prompts_that_are_too_long_are_counted_and_dropped(tmp_path):
    table = [{"prompt": "abcde=", "answer": "edcba"}, {"prompt": "a" * 60, "answer": "x"}] * 6
    data = rows(tmp_path / "data.jsonl", table)
    ended = succeed(
        [*QUICK, "--data.train", data, "--rollout.max_prompt_tokens", "32", "--run.dir", tmp_path / "run"], START
    )
    assert f"6 prompts from {data}, 6 longer than 32 tokens dropped" in ended.out, ended.show()


@pytest.mark.parametrize(
    ("leave_out", "words"),
    [
        ("model.safetensors", ["no weights", "model.safetensors", "--model.path"]),
        ("config.json", ["no config.json", "--model.path"]),
        ("tokenizer.json", ["no tokenizer"]),
    ],
)
def test_bad_model_folder_is_refused(leave_out, words, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns(leave_out))
    refused(run([*QUICK, "--model.path", folder, "--run.dir", tmp_path / "run"], START), str(folder), *words)


def test_bad_only_checkpoint_is_refused_and_kept(tmp_path):
    folder = tmp_path / "run"
    succeed([*QUICK, "--run.steps", "1", "--run.dir", folder], START)
    weights = folder / "checkpoints" / "step_1" / "model" / "model.safetensors"
    half = weights.read_bytes()[: weights.stat().st_size // 2]
    weights.write_bytes(half)
    lines = (folder / "metrics.jsonl").read_text()
    ended = run([*QUICK, "--run.steps", "2", "--run.dir", folder], START)
    refused(ended, "step_1 is damaged", "model/model.safetensors", "--run.dir")
    assert weights.read_bytes() == half, "a refused checkpoint must stay as it was"
    assert (folder / "metrics.jsonl").read_text() == lines, "what was logged must stay"


# ── rewards: faults in the middle of a step ──────────────────────────────────

REWARD = """
import pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    stamp = pathlib.Path({stamp!r})
    if not stamp.exists():
        stamp.write_text(repr(time.time()))
    {body}
"""


@pytest.mark.parametrize(
    ("body", "ranks", "engine", "grace", "words"),
    [
        ("raise KeyError('boom')", 2, "hf", 0.0, ["KeyError: 'boom'", "prompt ", "--reward.function"]),
        ("time.sleep(1000)", 2, "auto", 1.0, ["took longer than 1 s", "--reward.timeout", "--reward.on-timeout zero"]),
        ("return float('nan')", 0, "hf", 0.0, ["nan", "not finite", "--reward.function"]),
        ("import os; os._exit(3)", 0, "hf", 0.0, ["exit code 3", "must return, not exit"]),
    ],
    ids=["raises on two ranks", "hangs on two ranks beside vllm", "returns nan", "exits"],
)
def test_bad_reward_ends_the_job(body, ranks, engine, grace, words, tmp_path):
    """grace: seconds that a hanging reward may take (--reward.timeout) before it is a fault."""
    stamp, file = tmp_path / "stamp", tmp_path / "reward.py"
    file.write_text(REWARD.format(stamp=str(stamp), body=body))
    ended = run(
        [
            *QUICK,
            "--rollout.engine",
            engine,
            "--reward.function",
            file,
            "--reward.timeout",
            "1",
            "--run.dir",
            tmp_path / "run",
        ],
        120,
        ranks=ranks,
    )
    refused(ended, str(file), "phase r", *words)
    assert ended.ended - float(stamp.read_text()) - grace < GONE_WITHIN, ended.show()
