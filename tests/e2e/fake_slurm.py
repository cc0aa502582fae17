"""A fake SLURM for tests: no scheduler runs here, so sbatch, srun, scontrol and sinfo are programs of a few lines.

Every node is this machine under a loopback address of its own, and a process group. The parts of SLURM that the scripts
rely on are kept: the batch script runs as a copy in another folder, with a job's variables and the caller's; a step's
tasks have their node's number and name, in an order that is not the caller's; signals to srun reach every process of
the step; a job is started again after `scontrol requeue`, and by itself after a node failed.

`FAKE_SLURM` names a folder with cluster.json: nodes, states by node, shell commands by node that run before each task
(`before`), the time limit. calls.log there lists every call, pids/ the process group of each node's last task. A file
`node_failed` there says that a node is gone.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

JOB = 40000 + os.getpid() % 20000
STARTS = 3
"""Starts of one job, after which the fake gives up."""


def install(folder: Path, **cluster) -> dict[str, str]:
    """Makes the programs and a cluster in a folder; returns the variables with which a job finds them.

    cluster: `nodes`, `states`, `before`, `time`.
    """
    (folder / "bin").mkdir(parents=True)
    (folder / "pids").mkdir()
    (folder / "cluster.json").write_text(json.dumps(cluster))
    for name in ("sbatch", "srun", "scontrol", "sinfo"):
        path = folder / "bin" / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" {name} "$@"\n')
        path.chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "FAKE_SLURM": str(folder)}


def home() -> Path:
    return Path(os.environ["FAKE_SLURM"])


def cluster() -> dict:
    return json.loads((home() / "cluster.json").read_text())


def options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Flags (`--name=value`, `--name value`) before the first other word, and the words from there on."""
    given, words = {}, list(words)
    alone = ("--overlap", "--requeue", "--exclusive", "--noheader", "--Node")
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).partition("=")
        if not equals and name not in alone:
            value = words.pop(0)
        given[name.lstrip("-")] = value
    return given, words


def sbatch(words: list[str]) -> int:
    """Runs the job here and now, as often as it is requeued; its exit code is the last one's."""
    given, (script, *args) = options(words)
    asked = {}
    for line in Path(script).read_text().splitlines():
        if found := re.match(r"#SBATCH --([\w-]+)(?:=(\S+))?$", line):
            asked[found[1]] = found[2] or ""
    asked |= given
    world = cluster()
    nodes = world["nodes"][: int(asked["nodes"])]
    spool = home() / "spool"
    spool.mkdir(exist_ok=True)
    copy = shutil.copy(script, spool / "slurm_script")
    variables = {
        **{"SLURM_JOB_ID": str(JOB), "SLURM_NNODES": str(len(nodes)), "SLURM_JOB_NUM_NODES": str(len(nodes))},
        **{"SLURM_JOB_NODELIST": f"fake[{','.join(nodes)}]", "SLURM_SUBMIT_DIR": os.getcwd()},
        **{"SLURMD_NODENAME": nodes[0], "SLURM_NODEID": "0", "SLURM_PROCID": "0"},
    }
    (home() / "time").write_text(given.get("time", world.get("time", asked["time"])))
    code = 1
    for start in range(STARTS):
        for name in ("requeue", "node_failed"):
            (home() / name).unlink(missing_ok=True)
        again = {"SLURM_RESTART_COUNT": str(start)} if start else {}
        process = subprocess.Popen(["bash", copy, *args], env=os.environ | variables | again, start_new_session=True)
        (home() / "pids" / "batch").write_text(str(process.pid))
        code = process.wait()
        failed = (home() / "node_failed").exists() and "requeue" in asked
        if not failed and not (home() / "requeue").exists():
            break
        print(f"(fake slurm: job {JOB} starts again: {'a node failed' if failed else 'requeued'})", flush=True)
    return 128 - code if code < 0 else code


def srun(words: list[str]) -> int:
    """Runs a command once on every node of the list."""
    given, command = options(words)
    world, running = cluster(), {}
    nodes = given["nodelist"].split(",") if "nodelist" in given else world["nodes"][: int(given["nodes"])]
    assert len(nodes) == int(given["nodes"]) == int(given["ntasks"]), given
    signals = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    for number in signals:
        signal.signal(number, lambda number, _: threading.Thread(target=tell, args=(running, number)).start())
    for place, node in enumerate(reversed(nodes)):
        before = world.get("before", {}).get(node, ":")
        variables = {"SLURM_NODEID": str(place), "SLURM_PROCID": str(place), "SLURMD_NODENAME": node}
        step = ["bash", "-c", f'{before}\nexec "$@"', "task", *command]
        running[node] = subprocess.Popen(step, env=os.environ | variables, start_new_session=True)
        (home() / "pids" / node).write_text(str(running[node].pid))
    until = float("inf")
    while any(process.poll() is None for process in running.values()) and time.monotonic() < until:
        if "wait" in given and until == float("inf") and any(p.poll() is not None for p in running.values()):
            until = time.monotonic() + float(given["wait"])
        time.sleep(0.05)
    tell(running, signal.SIGKILL)
    codes = [process.wait() for process in running.values()]
    return max(128 - code if code < 0 else code for code in codes)


def tell(running: dict[str, subprocess.Popen], number: int) -> None:
    """Sends a signal to every process of a step, as SLURM does."""
    for process in running.values():
        if process.poll() is None:
            kill(process.pid, number)


def kill(pid: int, number: int) -> None:
    """Sends a signal to a process and all its descendants, the lowest last."""
    with contextlib.suppress(psutil.Error):
        one = psutil.Process(pid)
        for each in [one, *one.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                each.send_signal(number)


def scontrol(words: list[str]) -> int:
    """`show hostnames LIST`, `show job ID`, `requeue ID`."""
    if words[:2] == ["show", "hostnames"]:
        print("\n".join(words[2].removeprefix("fake[").removesuffix("]").split(",")))
    elif words[:2] == ["show", "job"]:
        print(f"JobId={words[2]} JobName=fake\n   RunTime=00:00:01 TimeLimit={(home() / 'time').read_text()}")
    elif words[0] == "requeue":
        (home() / "requeue").touch()
    else:
        raise SystemExit(f"fake scontrol: {words}")
    return 0


def sinfo(words: list[str]) -> int:
    """Name and state of each node that is asked for."""
    given, _ = options(words)
    for node in given["nodes"].split(","):
        print(node, cluster().get("states", {}).get(node, "allocated"))
    return 0


def main() -> int:
    name, *words = sys.argv[1:]
    with open(home() / "calls.log", "a") as log:
        log.write(f"{name} {' '.join(words)}\n")
    return {"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "sinfo": sinfo}[name](words)


if __name__ == "__main__":
    sys.exit(main())
