"""Starts a job on hosts by ssh: `python -m spmdrl.tools.ssh_start`, which launch/node.sh becomes where HOSTS is set.

The preflight chooses the hosts. Standard library only.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from spmdrl.tools.hosts import NODE, OTHERS, ROOT, Hosts, code_of, end, far, tell, unreachable
from spmdrl.tools.preflight import choose, look_at


def chosen(hosts: list[str], port: int) -> list[str]:
    """Chooses the hosts that the job takes: the first NODES good ones.

    Raises:
        ValueError: too few answer or are good, or NODES is no such number.
    """
    need = int(os.environ.get("NODES") or len(hosts))
    if not 0 < need <= len(hosts):
        raise ValueError(f"NODES={need}: HOSTS names {len(hosts)}")
    if os.environ.get("PREFLIGHT") == "0":
        return hosts[:need]
    floors = tuple(float(os.environ.get(name) or 0) for name in ("FLOOR_ALL_REDUCE", "FLOOR_ALL_TO_ALL"))
    folder = Path(os.environ.get("RUN_DIR") or ROOT / "runs" / "preflight") / "logs" / "preflight"
    look = look_at(Hosts(), folder.absolute(), port, say)
    return choose(hosts, need, look, (floors[0], floors[1]), say, unreachable(hosts), slurm=False)


def say(line: str) -> None:
    """Prints a line of the start."""
    print(f"[hosts] {line}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Starts `launch/node.sh WORDS` on the hosts of HOSTS; returns the exit code of the one that failed first."""
    words = list(sys.argv[1:] if argv is None else argv)
    hosts = list(dict.fromkeys(os.environ["HOSTS"].replace(",", " ").split()))
    port = int(os.environ.get("MASTER_PORT") or 29500)
    try:
        hosts = chosen(hosts, port)
    except (ValueError, OSError) as error:
        say(f"error: {error}")
        return 1
    say(f"nodes: {' '.join(hosts)}")
    variables = {"NODE_NAMES": " ".join(hosts), "MASTER_PORT": str(port)}
    running = {host: far(host, variables | {"NODE_NAME": host}, [NODE, *words]) for host in hosts}

    def pass_on(number: int, _) -> None:
        for process in running.values():
            tell(process, str(number))

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    code, until = 0, float("inf")
    while any(process.poll() is None for process in running.values()) and time.monotonic() < until:
        for host, process in running.items():
            if process.poll() and not code:
                code, until = code_of(process.returncode), time.monotonic() + OTHERS
                say(f"{host} ended with exit code {code}")
        time.sleep(0.2)
    end(list(running.values()))
    return code or next((code_of(p.returncode) for p in running.values() if p.returncode), 0)


if __name__ == "__main__":
    sys.exit(main())
