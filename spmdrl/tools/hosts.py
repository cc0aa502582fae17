"""Runs launch/node.sh on several hosts, for the preflight and the start by ssh.

In a SLURM job srun does it; else ssh, with a process at the far end, `python -m spmdrl.tools.hosts`, that reads its
orders from the connection: the variables and the command first, then signals. Where the connection ends, the command is
ended. Standard library only.
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
"""Beginnings of variables that other hosts get; they travel in the connection and stand on no command line."""
SETTINGS = ("NPROC", "MASTER_PORT", "GRACE", "PREFLIGHT", "PATH")
REACH = 8.0
"""Seconds in which a host must answer to ssh."""
OTHERS = 15.0
"""Seconds that the other hosts have to end by themselves, with a message, once one has failed."""
ENDING = 10.0
"""Seconds between SIGTERM and SIGKILL at the far end."""
SSH = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={REACH / 2:.0f}", "-o", "ServerAliveInterval=5"]


class Hosts:
    """Runs launch/node.sh on hosts by srun, or by ssh where that is empty."""

    def __init__(self, srun: Sequence[str] = (), inside: Sequence[str] = ()):
        """Takes srun with the flags of every call, and the command that starts another one inside a container."""
        self.srun, self.inside = list(srun), list(inside)

    def start(self, hosts: Sequence[str], words: Sequence[str], **streams: Any) -> list[subprocess.Popen]:
        """Starts `launch/node.sh WORDS` on all hosts; a process for all under SLURM, for each by ssh."""
        if self.srun:
            number = str(len(hosts))
            flags = ["--nodes", number, "--ntasks", number, "--nodelist", ",".join(hosts), "--kill-on-bad-exit=0"]
            return [subprocess.Popen([*self.srun, *flags, *self.inside, NODE, *words], cwd=ROOT, **streams)]
        return [far(host, {"NODE_NAME": host}, [NODE, *words], **streams) for host in hosts]

    def on(self, hosts: Sequence[str], words: Sequence[str], seconds: float, output: Path) -> None:
        """Runs it on all hosts and waits; ends what is left after so many seconds. output: file for all they say."""
        with open(output, "wb") as file:
            running = self.start(hosts, words, stdout=file, stderr=subprocess.STDOUT)
            until = time.monotonic() + seconds
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
            end(running)


def end(running: Sequence[subprocess.Popen]) -> None:
    """Ends processes that still run: by their connection or SIGTERM, then by SIGKILL."""
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
    """Returns the variables that a host gets."""
    return {name: value for name, value in environment.items() if name.startswith(CARRIED) or name in SETTINGS}


def far(host: str, variables: dict[str, str], words: Sequence[str], **streams: Any) -> subprocess.Popen:
    """Starts a command on another host. `tell` sends signals; a closed stdin ends it."""
    python = ".venv/bin/python" if (ROOT / ".venv" / "bin" / "python").exists() else "python3"
    line = f"cd {shlex.quote(str(ROOT))} && exec {python} -m spmdrl.tools.hosts"
    process = subprocess.Popen([*SSH, host, line], stdin=subprocess.PIPE, **streams)
    order = {"variables": carried() | variables, "words": list(words)}
    tell(process, json.dumps(order))
    return process


def tell(process: subprocess.Popen, line: str) -> None:
    """Sends a line to the far end; nothing happens where it is gone."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()


def far_end() -> int:
    """Runs the command of the first line on stdin, passes on signals from later ones, ends it at the end of stdin."""
    order = json.loads(sys.stdin.readline())
    # Without HOSTS, this host does not start the job on the others again.
    variables = {name: value for name, value in os.environ.items() if name not in ("HOSTS", "NODE_RANK")}
    child = subprocess.Popen(
        order["words"], env=variables | order["variables"], stdin=subprocess.DEVNULL, start_new_session=True
    )

    def listen() -> None:
        for line in sys.stdin:
            with contextlib.suppress(OSError, ValueError):
                child.send_signal(int(line))
        with contextlib.suppress(OSError):
            child.terminate()
        time.sleep(ENDING)
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)

    threading.Thread(target=listen, daemon=True).start()
    return code_of(child.wait())


def code_of(returned: int) -> int:
    """Returns the exit code for what `Popen.wait` returned, by the shell's rule for signals."""
    return 128 - returned if returned < 0 else returned


def unreachable(hosts: Sequence[str]) -> dict[str, str]:
    """Returns hosts that do not answer to ssh within seconds, each with the reason. All are asked at once."""
    line = f"test -x {shlex.quote(str(ROOT / 'launch' / 'node.sh'))} || echo no folder {shlex.quote(str(ROOT))} >&2"
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    asked = {host: subprocess.Popen([*SSH, host, line], text=True, **streams) for host in hosts}
    until, dead = time.monotonic() + REACH, {}
    for host, process in asked.items():
        try:
            _, said = process.communicate(timeout=max(0.1, until - time.monotonic()))
            if process.returncode or said.startswith("no folder"):
                dead[host] = (said.strip().splitlines() or [f"ssh ended with {process.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            process.kill()
            dead[host] = f"no answer to ssh within {REACH:.0f} s"
    return dead


if __name__ == "__main__":
    sys.exit(far_end())
