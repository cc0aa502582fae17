"""The real scripts of slurm/ and launch/node.sh, driven by a fake SLURM and a fake ssh: two nodes of two ranks here.

Nodes are loopback addresses. What a real cluster adds (its network, GPUs, containers, SLURM itself) is not tested.
"""

import hashlib
import os
import re
import signal
import subprocess
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
data: {{train: "builtin:reverse", eval: "builtin:reverse:eval", prompt_column: prompt, answer_column: answer,
  template: ""}}
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


def job(folder: Path, allot: int, script: str = "gsm8k_8gpu", flags=(), env=None, options=(), **cluster) -> Job:
    """Submits a script to a fake SLURM of three nodes; what it leaves is in the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    (folder / "tiny.yaml").write_text(TINY.format(steps=STEPS, reward=folder / "reward.py"))
    fake = fake_slurm.install(folder / "slurm", **{"nodes": [A, B, C]} | cluster)
    # Left over from another job; none of it may reach this one.
    leaked = {"HOSTS": "elsewhere", "NODE_RANK": "7", "MASTER_ADDR": "192.0.2.9", "RANK": "3", "WORLD_SIZE": "99"}
    leaked |= {"TORCHELASTIC_RUN_ID": "old", "PET_NNODES": "5", "LOCAL_RANK": "3", "NODE_NAMES": "x y"}
    given = {"NODES": "2", "NPROC": "2", "RUN_DIR": str(folder / "run"), "GLOO_SOCKET_IFNAME": "lo"}
    words = ["sbatch", "--nodes", allot, *options, ROOT / "slurm" / f"{script}.sh"]
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
        assert re.search(r": 2 processes of 1 threads, master 127\.0\.0\.2:\d{5}, network lo$", line), line
    assert any(line.startswith("[preflight] pairs: all-reduce at least ") for line in ended.err), ended.show()
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
    at = [i for i, line in enumerate(ended.out) if line == '[job] saved at "step": 4: requeueing the job']
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


# ── refusals, dry runs, containers ───────────────────────────────────────────


def ends(running: Job, limit: float = 60) -> Ended:
    try:
        ended = running.wait(limit)
    finally:
        running.kill()
    no_process_is_left(ended)
    return ended


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_short_and_start_on_paper(script, tmp_path):
    text = (ROOT / "slurm" / f"{script}.sh").read_text()
    asked = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", text))
    need = int(re.search(r"NODES:-(\d+)", text)[1])
    grace, lead = int(re.search(r"GRACE:-(\d+)", text)[1]), int(asked["signal"].removeprefix("B:USR1@"))
    # SLURM may send the signal up to a minute late or early; torchrun waits for a minute beyond the grace.
    assert grace + 60 < lead and "--requeue" in text and asked["ntasks-per-node"] == "1"
    assert int(asked["nodes"]) >= need
    for path in [*(ROOT / "slurm").glob("*.sh"), ROOT / "launch" / "node.sh", ROOT / "launch" / "checks.sh"]:
        lines = path.read_text().splitlines()
        assert len(lines) < 80 and max(map(len, lines)) <= 120, path
        assert subprocess.run(["bash", "-n", path]).returncode == 0
    env = {"NODES": "", "NPROC": "", "RUN_DIR": ""}
    ended = ends(job(tmp_path, int(asked["nodes"]), script, ["--dry-run"], env, nodes=[A] * int(asked["nodes"])))
    assert ended.rc == 0, ended.show()
    assert any(line.startswith(f"ranks    {8 * need} = ") for line in ended.out), ended.show()
    assert any(line.strip() == f"grace: {grace}.0" for line in ended.out) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "flags", "env", "said"),
    [
        ((), (), {"ROOT": "/"}, "no slurm/job.sh in /: run sbatch in the project's folder, or set ROOT to that folder"),
        (
            ("--time", "00:23:00"),
            (),
            {},
            "a time limit of 23 min is too short for GRACE=240 s: give sbatch --time at least 24 min",
        ),
        ((), (), {"NODES": "3"}, "NODES=3, but SLURM allotted 2: give sbatch --nodes=3, or more for spares"),
        ((), ("--run.dir", "x"), {}, "--run.dir: the scripts need it too; set RUN_DIR before sbatch"),
        ((), ("--run.grace=9",), {}, "--run.grace: torchrun needs it too; set GRACE before sbatch"),
        ((), (), {"NODES": "abc"}, "NODES=abc: must be a whole number of at least 1"),
        ((), (), {"NODES": "0"}, "NODES=0: must be a whole number of at least 1"),
        ((), (), {"NPROC": "0"}, "NPROC=0: must be a whole number of at least 1"),
        ((), (), {"GRACE": "4m"}, "GRACE=4m: must be a whole number of at least 1"),
        ((), (), {"FLOOR_ALL_REDUCE": "abc"}, "FLOOR_ALL_REDUCE=abc: must be a number of at least 0, in GB/s"),
        ((), (), {"PREFLIGHT": "no"}, "PREFLIGHT=no: must be a whole number from 0 to 1"),
    ],
    ids=["root", "limit", "nodes", "dir", "grace", "word", "none", "processes", "unit", "floor", "preflight"],
)
def test_bad_start_is_one_message(options, flags, env, said, tmp_path):
    ended = ends(job(tmp_path, 2, flags=flags, env=env, options=options))
    assert ended.rc == 1 and len(ended.err) == 1 and ended.err[0].startswith(f"[job] error: {said}"), ended.show()
    assert calls(tmp_path, "srun") == []


def test_bad_settings_are_told_before_any_node_is_looked_at(tmp_path):
    """By the exit code of a mistake in settings, for the ranks that there would be: 2 nodes of 2."""
    flags = ["--config", tmp_path / "tiny.yaml", "--rollout.tp", "3", "--run.stepz", "4"]
    ended = ends(job(tmp_path, 2, flags=flags))
    assert ended.rc == 2 and "python -m spmdrl.train: " in ended.err[0], ended.show()
    assert any("--run.stepz" in line for line in ended.err) and calls(tmp_path, "srun") == []
    ended = ends(job(tmp_path / "axes", 2, flags=["--config", tmp_path / "tiny.yaml", "--rollout.tp", "3"]))
    assert ended.rc == 2 and any("--rollout.tp 3: must divide the 4 ranks of the job" in line for line in ended.err)
    assert calls(tmp_path / "axes", "srun") == [] and not (tmp_path / "axes" / "run").exists()


def test_bad_start_without_slurm_says_how():
    ended = subprocess.run(["slurm/gsm8k_8gpu.sh"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1 and "not in SLURM: run sbatch slurm/NAME.sh, or HOSTS=" in ended.stderr


def test_job_that_failed_is_not_requeued_and_keeps_its_exit_code(tmp_path):
    """The file of an earlier request to leave is there, and does not count."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "PREEMPTED").write_text('{"step": 3, "signal": "SIGUSR1"}')
    ended = ends(job(tmp_path, 2, env={"PREFLIGHT": "0"}, before={A: "exit 5", B: "exit 3"}))
    assert ended.rc == 5 and calls(tmp_path, "scontrol requeue") == [], ended.show()


def test_time_limit_without_progress_ends_the_requeues(tmp_path):
    """The step stands in for a run that leaves at step 4 in each start."""
    text = '{\\"step\\": 4, \\"signal\\": \\"SIGUSR1\\", \\"time\\": $RANDOM}'
    leaves = f'echo "{text}" >{tmp_path}/run/PREEMPTED; exit 1'
    ended = ends(job(tmp_path, 1, env={"PREFLIGHT": "0", "NODES": "1"}, before={A: leaves}))
    assert ended.rc == 1 and len(calls(tmp_path, "scontrol requeue")) == 1, ended.show()
    assert any('saved at "step": 4, like the start before' in line for line in ended.err), ended.show()


def test_bad_spares_exhausted_names_every_bad_node_and_the_way_out(tmp_path):
    """SLURM calls one node down; between the other two nothing reaches the floor, twice. No training starts."""
    env = {"FLOOR_ALL_TO_ALL": "1e6", "NPROC": "1"}
    ended = ends(job(tmp_path, 3, env=env, states={C: "down*"}), 150)
    assert ended.rc == 1, ended.show()
    first, again = calls(tmp_path, "srun")
    assert all(" doctor --reports " in call for call in (first, again)) and "--only-pairs" in again, ended.show()
    (line,) = [line for line in ended.err if line.startswith("[preflight] error: ")]
    assert "2 nodes are needed and 0 of 3 are good: " in line
    assert f"{C} (SLURM reports down*)" in line and f"{A} (with {B}: all-to-all " in line
    assert "floor 1e+06" in line and f"sbatch --exclude={C},{A},{B}" in line and "FLOOR_ALL_TO_ALL" in line
    assert ended.err[-1] == "[job] error: the preflight found too few good nodes"


def test_bad_dead_node_without_a_spare_ends_the_job_in_seconds(tmp_path):
    ended = ends(job(tmp_path, 2, states={B: "down*"}))
    assert ended.rc == 1 and calls(tmp_path, "srun") == [] and ended.seconds < GONE_WITHIN, ended.show()
    assert any(f"{B} (SLURM reports down*)" in line for line in ended.err), ended.show()


APPTAINER = """#!/bin/sh
# A fake: no container is made.
while [ "$1" != image.sif ]; do shift; done
shift
exec "$@"
"""


def test_bad_settings_are_looked_for_inside_the_container(tmp_path):
    env = {
        "CONTAINER": "some#image",
        "PATH": f"{tmp_path / 'slurm' / 'bin'}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
    }
    ended = ends(job(tmp_path, 2, flags=["--config", tmp_path / "tiny.yaml", "--rollout.tp", "3"], env=env))
    (call,) = calls(tmp_path, "srun")
    assert ended.rc == 2 and "--container-image=some#image " in call and "load_or_exit()" in call


@pytest.mark.parametrize("image", ["image.sif", "nvcr.io#nvidia/pytorch:26.01-py3"])
def test_container_holds_what_srun_starts(image, tmp_path):
    env = {"CONTAINER": image, "MOUNTS": "/data", "NODES": "", "NPROC": ""}
    tmp_path.joinpath("bin").mkdir()
    (tmp_path / "bin" / "apptainer").write_text(APPTAINER)
    (tmp_path / "bin" / "apptainer").chmod(0o755)
    # Python of "the image".
    path = f"{tmp_path / 'slurm' / 'bin'}:{tmp_path / 'bin'}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    ended = ends(job(tmp_path, 1, flags=["--dry-run"], env=env | {"PATH": path}))
    assert ended.rc == 0 and any(line.startswith("ranks    8 = ") for line in ended.out), ended.show()
    (call,) = calls(tmp_path, "srun")
    if image.endswith(".sif"):
        assert f"apptainer exec --nv --bind {ROOT},/data --pwd {ROOT} image.sif env " in call
    else:
        flags = f"--container-image={image} --container-mounts={ROOT}:{ROOT},/data --container-workdir={ROOT} "
        assert flags in call and call.endswith("--dry-run") and " python3 -m spmdrl.train " in call


# ── without SLURM ────────────────────────────────────────────────────────────

SSH = """#!/bin/bash
# A fake: every host is this machine, except one that never answers.
while [[ $1 == -o ]]; do shift 2; done
[[ $1 != 127.0.0.9 ]] || exec sleep 100
exec setsid --wait bash -c "$2"
"""
WAITS = """
import pathlib, os, signal, sys, time
here = pathlib.Path(sys.argv[1])
def left(*_):
    (here / f"left_{os.environ['RANK']}").touch()
    sys.exit(0)
signal.signal(signal.SIGUSR1, left)
(here / f"up_{os.environ['RANK']}").touch()
time.sleep(100)
"""


def hosts(folder: Path, words, **env) -> Job:
    """Starts launch/node.sh with a fake ssh."""
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(SSH)
    (folder / "bin" / "ssh").chmod(0o755)
    given = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo", "RUN_DIR": str(folder)}
    given |= {"MASTER_PORT": str(33000 + os.getpid() % 9000), "NPROC": "1"}
    return Job([ROOT / "launch" / "node.sh", *words], module="tests.e2e.start", env=given | env)


def test_hosts_without_slurm_leave_a_dead_one_out_and_report_by_node(tmp_path):
    ended = ends(hosts(tmp_path, ["-m", "spmdrl.tools.doctor", "--quick"], HOSTS=f"127.0.0.9,{A} {B}", NODES="2"), 150)
    assert ended.rc == 0, ended.show()
    assert "[hosts] bad node 127.0.0.9: no answer to ssh within 8 s" in ended.err, ended.show()
    assert f"[hosts] nodes: {A} {B}" in ended.err, ended.show()
    reports = [line for line in ended.out if re.match(r"\S+:$", line)]
    assert len(reports) == 2 and sum(line.startswith("ok   all ranks ") for line in ended.out) == 1, ended.show()
    assert sum(line.startswith("ok   clocks ") for line in ended.out) == 1, ended.show()


def test_bad_dead_host_in_the_list_ends_the_start_in_seconds(tmp_path):
    ended = ends(hosts(tmp_path, ["-m", "spmdrl.train"], HOSTS=f"{A} 127.0.0.9"))
    assert ended.rc == 1 and ended.seconds < 8 + GONE_WITHIN, ended.show()
    (line,) = [line for line in ended.err if line.startswith("[hosts] error: ")]
    assert "2 nodes are needed and 1 of 2 are good: 127.0.0.9 (no answer to ssh within 8 s)" in line
    assert "sbatch" not in line and "HOSTS" in line


def test_hosts_get_signals_and_end_together(tmp_path):
    """PREFLIGHT=0 asks no host; SIGUSR1 reaches the ranks through ssh and torchrun, and nothing is left."""
    (tmp_path / "waits.py").write_text(WAITS)
    running = hosts(tmp_path, [tmp_path / "waits.py", tmp_path], HOSTS=f"{A} {B}", PREFLIGHT="0")
    try:
        running.wait_for(lambda: len(list(tmp_path.glob("up_*"))) == 2, 100, "both ranks")
        running.process.send_signal(signal.SIGUSR1)
        ended = running.wait(60)
    finally:
        running.kill()
    no_process_is_left(ended)
    # torchrun's exit code where it was told to end; the ranks' own is 0.
    assert ended.rc == 1, ended.show()
    assert len(list(tmp_path.glob("left_*"))) == 2, ended.show()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ("NNODES=x", "NNODES=x: must be a whole number of at least 1"),
        ("NPROC=two", "NPROC=two: must be a whole number of at least 1"),
        ("NPROC=0", "NPROC=0: must be a whole number of at least 1"),
        ("GRACE=4m", "GRACE=4m: must be a whole number of at least 1"),
        ("GRACE=08", "GRACE=08: must be a whole number of at least 1, without leading zeros"),
        ("NODE_RANK=5 NNODES=2 MASTER_ADDR=a", "NODE_RANK=5: must be below NNODES=2"),
        ("HOSTS=a MASTER_PORT=x", "MASTER_PORT=x: must be a whole number from 1 to 65535"),
        ("HOSTS=a NODES=x", "NODES=x: must be a whole number of at least 1"),
        ("HOSTS=a FLOOR_ALL_TO_ALL=-1", "FLOOR_ALL_TO_ALL=-1: must be a number of at least 0, in GB/s"),
    ],
)
def test_bad_numbers_for_a_node_are_one_message(variables, said):
    env = os.environ | dict(word.split("=") for word in variables.split())
    command = [ROOT / "launch" / "node.sh", "-m", "spmdrl.train"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 1 and line.startswith(f"[node] error: {said}"), ended.stderr


def test_numbers_as_bash_and_python_read_them_pass():
    """Such as a floor of 1e6; an empty variable is one that is not set."""
    script = "label=x; source launch/checks.sh; check_numbers; echo all"
    for given in ({"NPROC": "", "FLOOR_ALL_REDUCE": "1e6", "FLOOR_ALL_TO_ALL": ".5"}, {"MASTER_PORT": "65535"}):
        ended = subprocess.run(
            ["bash", "-euc", script], cwd=ROOT, env=os.environ | given, capture_output=True, text=True
        )
        assert ended.stdout == "all\n", ended.stderr


def test_bad_first_node_that_cannot_be_reached_is_named_in_seconds(tmp_path):
    env = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "no-such-host.invalid"}
    ended = ends(hosts(tmp_path, ["-m", "spmdrl.train"], **env))
    assert ended.rc == 1 and len(ended.err) == 1, ended.show()
    assert "cannot reach the first node, no-such-host.invalid port" in ended.err[0]
    assert "PREFLIGHT=0 starts without this check" in ended.err[0]
