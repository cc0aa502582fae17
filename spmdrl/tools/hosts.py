"""Runs launch/node.sh on several hosts, for preflight.py and ssh_start.py.

In a SLURM job, srun starts the command. Otherwise ssh starts `python -m spmdrl.tools.hosts` on each host. That process
reads environment variables and a command from stdin (the ssh connection) and runs the command. It then reads signal
numbers and sends these signals to the command. When the connection closes, it terminates the command. This module
imports only the standard library, so that it runs with any host's Python.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NODE = "./launch/node.sh"
CARRIED = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "CUDA_", "HF_", "WANDB_", "VLLM_", "SGLANG_", "SPMDRL_", "PYTHON")
"""Prefixes of the environment variables to send to other hosts, over stdin rather than on the command line."""
SETTINGS = ("NPROC", "MASTER_PORT", "GRACE", "PREFLIGHT", "PATH")
REACH = 8.0
"""Timeout in seconds for a host to answer ssh."""
OTHERS = 15.0
"""Grace period in seconds for the other hosts to exit on their own, with an error message, after one host fails."""
ENDING = 10.0
"""Seconds between SIGTERM and SIGKILL for a command on another host."""
SSH = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={REACH / 2:.0f}", "-o", "ServerAliveInterval=5"]


class Hosts:
    """Runs launch/node.sh on hosts with srun, or with ssh if `srun` is empty."""

    def __init__(self, srun: Sequence[str] = (), inside: Sequence[str] = ()):
        """srun: the srun command with flags, or empty. inside: command prefix that runs a command in a container."""
        self.srun, self.inside = list(srun), list(inside)

    def start(self, hosts: Sequence[str], words: Sequence[str], **streams: Any) -> list[subprocess.Popen]:
        """Start `launch/node.sh WORDS` on all hosts: one srun process in total, or one ssh process per host."""
        if self.srun:
            number = str(len(hosts))
            flags = ["--nodes", number, "--ntasks", number, "--nodelist", ",".join(hosts), "--kill-on-bad-exit=0"]
            return [subprocess.Popen([*self.srun, *flags, *self.inside, NODE, *words], cwd=ROOT, **streams)]
        return [start_on(host, {"NODE_NAME": host}, [NODE, *words], **streams) for host in hosts]

    def on(self, hosts: Sequence[str], words: Sequence[str], seconds: float, output: Path) -> None:
        """Run `launch/node.sh WORDS` on all hosts for at most `seconds`. output: file for stdout and stderr."""
        with open(output, "wb") as file:
            running = self.start(hosts, words, stdout=file, stderr=subprocess.STDOUT)
            until = time.monotonic() + seconds
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
            end(running)


def end(running: Sequence[subprocess.Popen]) -> None:
    """Stop running processes: close their stdin or send SIGTERM, and kill those that do not exit in time."""
    left = [process for process in running if process.poll() is None]
    for process in left:
        if process.stdin:
            with contextlib.suppress(OSError):
                process.stdin.close()
        else:
            process.terminate()
    until = time.monotonic() + ENDING + 2
    for process in left:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def carried(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables to send to other hosts."""
    return {name: value for name, value in environment.items() if name.startswith(CARRIED) or name in SETTINGS}


def start_on(host: str, variables: dict[str, str], words: Sequence[str], **streams: Any) -> subprocess.Popen:
    """Start a command on another host. `send` forwards signals to the command, and closing stdin terminates it."""
    python = ".venv/bin/python" if (ROOT / ".venv" / "bin" / "python").exists() else "python3"
    line = f"cd {shlex.quote(str(ROOT))} && exec {python} -m spmdrl.tools.hosts"
    process = subprocess.Popen([*SSH, host, line], stdin=subprocess.PIPE, **streams)
    send(process, json.dumps({"variables": carried() | variables, "words": list(words)}))
    return process


def send(process: subprocess.Popen, line: str) -> None:
    """Send a line to the process on the other host; no-op if the process has exited."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()


def main() -> int:
    """Run the command in the first line of stdin, forward the signals in later lines, and stop it when stdin closes."""
    order = json.loads(sys.stdin.readline())
    # HOSTS is removed so that this host does not start the job on the other hosts in turn.
    variables = {name: value for name, value in os.environ.items() if name not in ("HOSTS", "NODE_RANK")}
    child = subprocess.Popen(
        order["words"], env=variables | order["variables"], stdin=subprocess.DEVNULL, start_new_session=True
    )

    def pass_on() -> None:
        for line in sys.stdin:
            with contextlib.suppress(OSError, ValueError):
                child.send_signal(int(line))
        with contextlib.suppress(OSError):
            child.terminate()
        time.sleep(ENDING)
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)

    threading.Thread(target=pass_on, daemon=True).start()
    return code_of(child.wait())


def code_of(returned: int) -> int:
    """Return the exit code for a result of `Popen.wait`: 128 + n if killed by signal n, as in a shell."""
    return 128 - returned if returned < 0 else returned


def unreachable(hosts: Sequence[str]) -> dict[str, str]:
    """Return the hosts that do not answer ssh within `REACH` seconds or lack the folder ROOT, with the reasons.

    All hosts are tried in parallel.
    """
    line = f"test -x {shlex.quote(str(ROOT / 'launch' / 'node.sh'))} || echo no folder {shlex.quote(str(ROOT))} >&2"
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    tries = {host: subprocess.Popen([*SSH, host, line], text=True, **streams) for host in hosts}
    until, dead = time.monotonic() + REACH, {}
    for host, process in tries.items():
        try:
            _, errors = process.communicate(timeout=max(0.1, until - time.monotonic()))
            if process.returncode or errors.startswith("no folder"):
                dead[host] = (errors.strip().splitlines() or [f"ssh ended with {process.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            process.kill()
            dead[host] = f"no answer to ssh within {REACH:.0f} s"
    return dead


if __name__ == "__main__":
    sys.exit(main())
