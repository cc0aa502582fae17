"""Starts a job on hosts over ssh: `python -m spmdrl.tools.ssh_start`, run by launch/node.sh if HOSTS is set.

The preflight chooses the hosts. This module and its imports need no installed packages, so that it runs with any
Python.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from spmdrl.tools.hosts import NODE, OTHERS, ROOT, Hosts, code_of, end, send, start_on, unreachable
from spmdrl.tools.preflight import choose, look_at


def _chosen(hosts: list[str], port: int) -> list[str]:
    """Choose the first NODES good hosts.

    Raises:
        ValueError: too few hosts answer or are good, or NODES is not between 1 and the number of hosts.
    """
    need = int(os.environ.get("NODES") or len(hosts))
    if not 0 < need <= len(hosts):
        raise ValueError(f"NODES={need}: must be from 1 to {len(hosts)}, the number of hosts in HOSTS")
    if os.environ.get("PREFLIGHT") == "0":
        return hosts[:need]
    floors = float(os.environ.get("FLOOR_ALL_REDUCE") or 0), float(os.environ.get("FLOOR_ALL_TO_ALL") or 0)
    folder = Path(os.environ.get("RUN_DIR") or ROOT / "runs" / "preflight") / "logs" / "preflight"
    look = look_at(Hosts(), folder.absolute(), port, _say)
    return choose(hosts, need, look, floors, _say, unreachable(hosts), slurm=False)


def _say(line: str) -> None:
    print(f"[hosts] {line}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Start `launch/node.sh ARGV` on the hosts in HOSTS; return the exit code of the first host that failed, or 0."""
    words = list(sys.argv[1:] if argv is None else argv)
    hosts = list(dict.fromkeys(os.environ["HOSTS"].replace(",", " ").split()))
    port = int(os.environ.get("MASTER_PORT") or 29500)
    try:
        hosts = _chosen(hosts, port)
    except (ValueError, OSError) as error:
        _say(f"error: {error}")
        return 1
    _say(f"nodes: {' '.join(hosts)}")
    variables = {"NODE_NAMES": " ".join(hosts), "MASTER_PORT": str(port)}
    running = {host: start_on(host, variables | {"NODE_NAME": host}, [NODE, *words]) for host in hosts}

    def pass_on(number: int, _) -> None:
        for process in running.values():
            send(process, str(number))

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    code, until = 0, float("inf")
    while any(process.poll() is None for process in running.values()) and time.monotonic() < until:
        for host, process in running.items():
            if process.poll() and not code:
                code, until = code_of(process.returncode), time.monotonic() + OTHERS
                _say(f"{host} ended with exit code {code}")
        time.sleep(0.2)
    end(list(running.values()))
    return code or next((code_of(p.returncode) for p in running.values() if p.returncode), 0)


if __name__ == "__main__":
    sys.exit(main())
