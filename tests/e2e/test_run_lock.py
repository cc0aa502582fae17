"""Two jobs on one run folder, and one job that is started again with `--run.fresh`."""

import json
import os
import socket
import time

import pytest

from spmdrl.checkpoint.manifest import problems
from spmdrl.checkpoint.published import steps_saved
from tests.e2e.runner import Job, argv, metrics, run, succeed

pytestmark = pytest.mark.timeout(300)
FLAGS = argv(
    "--rollout.engine hf --rollout.assignment static --rollout.prompts_per_step 4 --rollout.samples_per_prompt 4 "
    "--eval.every 0 --checkpoint.every 1 --checkpoint.keep 50 --tracking.trackers jsonl --run.timeout 12"
)


def test_second_job_is_refused_by_name_and_the_folder_is_free_once_the_first_was_killed(tmp_path):
    folder = tmp_path / "run"
    flags = [*FLAGS, "--run.dir", folder, "--reward.workers", 1]
    first = Job([*flags, "--run.steps", 5000], ranks=2)
    try:
        first.wait_for(lambda: steps_saved(folder / "checkpoints"), 120, "a checkpoint")
        holder, log = first.rank(0), folder / "logs" / "rank_0.log"
        ended = run([*flags, "--run.steps", 5000, "--run.fresh"])
        assert ended.rc == 1 and len(ended.messages) == 1 and "Traceback" not in ended.ours, ended.show()
        said = ended.messages[0]
        assert f"{folder} is in use by process {holder.pid} on {socket.gethostname()}" in said, ended.show()
        assert "--run.dir" in said
        assert "is in use by" not in log.read_text(), "the second one leaves nothing in the folder"
        assert not os.path.lexists(f"{folder}.old-1")
        at = len(metrics(folder))
        first.wait_for(lambda: len(metrics(folder)) > at, 60, "the first one goes on")
        holder.kill()
        # These are found at once: the other rank, torchrun and the reward's process are still there.
        ended = succeed([*flags, "--run.steps", len(metrics(folder)) + 2], 120)
        assert any(line.startswith("resumed from") for line in ended.out), ended.show()
    finally:
        first.kill()
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert problems(folder / "checkpoints" / f"step_{len(rows)}") == []


def test_restart_with_fresh_starts_over_once_for_all_nodes(tmp_path):
    """Two agents run; one loses its rank, the other starts its own again and counts that as no restart."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "mark").touch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"--nnodes 2 --max-restarts 3 --rdzv-endpoint 127.0.0.1:{port} --rdzv-id 1 --local-addr 127.0.0.1"
    args = [*FLAGS, "--run.steps", 30, "--run.dir", folder, "--run.fresh"]
    jobs = []
    try:
        for _ in range(2):
            env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            jobs.append(Job(args, ranks=1, launch=argv(words), env=env))
            time.sleep(2)
        jobs[0].wait_for(lambda: len(steps_saved(folder / "checkpoints")) > 3, 120, "checkpoints")
        lost = next(j for j in jobs if any(p.environ().get("RANK") == "1" for p in j.family()))
        lost.rank(1).kill()
        ends = [job.wait(180) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for ended in ends:
        assert ended.rc == 0 and not ended.timed_out, ends[0].show() + ends[1].show()
    out = [line for ended in ends for line in ended.out]
    assert sum(line.startswith("--run.fresh: ") for line in out) == 1, out
    assert sum(line.startswith("resumed from") for line in out) == 1, out
    assert (tmp_path / "run.old-1" / "mark").exists() and not (tmp_path / "run.old-2").exists()
    assert [row["step"] for row in metrics(folder)] == list(range(1, 31))
    told = json.loads((folder / ".lock").read_text())
    assert len(told["agents"]) == 2
