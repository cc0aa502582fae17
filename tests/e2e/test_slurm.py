"""The real scripts of slurm/ and launch/node.sh, driven by a fake SLURM and a fake ssh: two nodes of two ranks here.

Nodes are loopback addresses. What a real cluster adds (its network, GPUs, containers, SLURM itself) is not tested.
"""

import hashlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.e2e import fake_slurm
from tests.e2e.runner import GONE_WITHIN, ROOT, Ended, Job, metrics

pytestmark = pytest.mark.timeout(400)
SCRIPTS = ("dapo_671b", "grpo_qwen3_235b", "gsm8k_8gpu")
A, B, C = "127.0.0.2", "127.0.0.3", "127.0.0.4"
STEPS = 5
TINY = """
run: {{device: cpu, timeout: 60, steps: {steps}}}
model: {{path: tiny, dtype: float32}}
policy: {{max_tokens_per_microbatch: 2048}}
rollout: {{engine: hf, assignment: static, prompts_per_step: 4, samples_per_prompt: 4, max_sequences: 16,
  max_prompt_tokens: 64, max_new_tokens: 8}}
data: {{train: "builtin:reverse", eval: "builtin:reverse:eval", prompt_column: prompt, answer_column: answer, template: ""}}
reward: {{function: {reward}, timeout: 100, workers: 1}}
eval: {{every: 1000, prompts: 8}}
checkpoint: {{every: 2, keep: 10}}
tracking: {{trackers: [jsonl]}}
"""
REWARD = """
import pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    here = pathlib.Path(__file__).parent
    rows = here / "run" / "metrics.jsonl"
    while (here / "hold").exists() and rows.exists() and rows.read_text().count("\\n") >= 3:
        (here / "held").touch()
        time.sleep(0.05)
    return float(sum(a == b for a, b in zip(solution_str, ground_truth)))
"""
"""Reward whose gradings stand still in the fourth step as long as there is a file `hold`."""


def job(folder: Path, nodes: int, script: str = "gsm8k_8gpu", flags=(), env=None, options=(), **cluster) -> Job:
    """Submits a script to a fake SLURM of three nodes; what it leaves is in the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    (folder / "tiny.yaml").write_text(TINY.format(steps=STEPS, reward=folder / "reward.py"))
    fake = fake_slurm.install(folder / "slurm", **{"nodes": [A, B, C]} | cluster)
    # Left over from another job; none of it may reach this one.
    leaked = {"HOSTS": "elsewhere", "NODE_RANK": "7", "MASTER_ADDR": "192.0.2.9", "RANK": "3", "WORLD_SIZE": "99"}
    leaked |= {"TORCHELASTIC_RUN_ID": "old", "PET_NNODES": "5", "LOCAL_RANK": "3", "NODE_NAMES": "x y"}
    given = {"NODES": "2", "NPROC": "2", "RUN_DIR": str(folder / "run"), "GLOO_SOCKET_IFNAME": "lo"}
    words = ["sbatch", "--nodes", nodes, *options, ROOT / "slurm" / f"{script}.sh"]
    words += flags or ["--config", folder / "tiny.yaml"]
    return Job(words, module="tests.e2e.fake_slurm", env=leaked | given | fake | (env or {}))


def calls(folder: Path, start: str) -> list[str]:
    return [line for line in (folder / "slurm" / "calls.log").read_text().splitlines() if line.startswith(start)]


def digests(folder: Path, step: int = STEPS) -> dict[str, str]:
    """The weights of a checkpoint, and its optimizer's state."""
    place = folder / "run" / "checkpoints" / f"step_{step}"
    files = [*place.glob("model/*.safetensors"), *place.glob("state/**/*.distcp")]
    assert len(files) > 1, files
    return {str(file.relative_to(place)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def numbers(folder: Path) -> list[dict]:
    """The metrics of all steps without times and memory."""
    clock = re.compile("time|second|tokens/s|memory|gib|/s$", re.IGNORECASE)
    return [{k: v for k, v in row.items() if not clock.search(k)} for row in metrics(folder / "run")]


def no_process_is_left(ended: Ended) -> None:
    assert not ended.timed_out and not ended.left, ended.show()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, Ended]:
    """A run from the first step to the last; of its three nodes the second one allows 64 open files."""
    folder = tmp_path_factory.mktemp("undisturbed") / "job"
    running = job(folder, 3, before={B: "ulimit -n 64"})
    try:
        return folder, running.wait(240)
    finally:
        running.kill()


def test_a_bad_node_is_named_and_a_spare_takes_its_place(undisturbed):
    folder, ended = undisturbed
    no_process_is_left(ended)
    assert ended.rc == 0, ended.show()
    (bad,) = [line for line in ended.err if "bad node" in line]
    assert bad.startswith(f"[preflight] bad node {B}: open files: ulimit -n 64 (fix: raise the hard limit"), bad
    assert f"[job] nodes: {A} {C}" in ended.out, ended.show()
    for rank, node in enumerate((A, C)):
        line = next(line for line in ended.out if line.startswith(f"[node] rank {rank} of 2 on {node} "))
        assert "2 processes of 1 threads, meeting at 127.0.0.2:2" in line and line.endswith("network lo")
    assert any(line.startswith("[preflight] pairs: all-reduce from ") for line in ended.err), ended.show()
    assert len(metrics(folder / "run")) == STEPS and not (folder / "run" / "PREEMPTED").exists()
    assert sorted(p.name for p in (folder / "run" / "logs").glob("rank_*.log")) == [f"rank_{r}.log" for r in range(4)]
    assert calls(folder, "scontrol requeue") == []


def test_resume_after_a_signal_is_requeued_and_bit_equal(undisturbed, tmp_path):
    (tmp_path / "hold").touch()
    # The preflight is the other test's.
    running = job(tmp_path, 2, env={"PREFLIGHT": "0"})
    try:
        running.wait_for((tmp_path / "held").exists, 150, "the fourth step")
        os.kill(int((tmp_path / "slurm" / "pids" / "batch").read_text()), signal.SIGUSR1)
        # The request travels from the script over srun, torchrun and one rank to all.
        log = tmp_path / "run" / "logs"
        running.wait_for(lambda: all("SIGUSR1" in p.read_text() for p in log.glob("rank_*.log")), 30, "the request")
        (tmp_path / "hold").unlink()
        ended = running.wait(200)
    finally:
        running.kill()
    no_process_is_left(ended)
    assert ended.rc == 0 and len(calls(tmp_path, "scontrol requeue")) == 1, ended.show()
    at = [i for i, line in enumerate(ended.out) if line == '[job] saved at "step": 4: back into the queue']
    resumed = [i for i, line in enumerate(ended.out) if line.startswith("resumed from") and "step_4: step 4" in line]
    assert len(at) == len(resumed) == 1 and at[0] < resumed[0], ended.show()
    assert any("start 2: 2 nodes, 2 needed" in line for line in ended.out), ended.show()
    assert digests(tmp_path) == digests(undisturbed[0]) and numbers(tmp_path) == numbers(undisturbed[0])
    assert not (tmp_path / "run" / "PREEMPTED").exists()


def test_resume_after_the_death_of_a_node_is_bit_equal(undisturbed, tmp_path):
    (tmp_path / "hold").touch()
    running = job(tmp_path, 2, env={"PREFLIGHT": "0"})
    again = "(fake slurm: job"
    try:
        running.wait_for((tmp_path / "held").exists, 150, "the fourth step")
        (tmp_path / "slurm" / "node_failed").touch()
        fake_slurm.kill(int((tmp_path / "slurm" / "pids" / B).read_text()), signal.SIGKILL)
        # Those that are left notice in the next collective, behind their gradings.
        (tmp_path / "hold").unlink()
        killed = time.time()
        running.wait_for(lambda: any(line.startswith(again) for line in running.out), 60, "the end of the step")
        took = time.time() - killed
        ended = running.wait(200)
    finally:
        running.kill()
    no_process_is_left(ended)
    assert ended.rc == 0 and took < GONE_WITHIN, (took, ended.show())
    assert calls(tmp_path, "scontrol requeue") == [], "SLURM itself starts a job again when a node failed"
    assert any(line.startswith("resumed from") and "step_2: step 2" in line for line in ended.out), ended.show()
    assert len([line for line in ended.err if line.startswith("spmdrl: rank ")]) >= 1, ended.show()
    assert digests(tmp_path) == digests(undisturbed[0]) and numbers(tmp_path) == numbers(undisturbed[0])
