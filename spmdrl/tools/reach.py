"""Reaches for the first node of a job from another: `python -m spmdrl.tools.reach ADDRESS PORT`.

Prints the network interface towards it, for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; an empty line leaves the choice
to the libraries.
"""

import os
import socket
import sys
import time

from spmdrl.spmd.network import NAMES, choose_interface

WAIT = 3.0
"""Seconds for one try."""
TRIES = 3


def problem(address: str, port: int, wait: float = WAIT, tries: int = TRIES) -> str:
    """Returns why a host cannot be reached, empty where it can.

    A host that refuses the connection is alive: its torchrun has yet to start.
    """
    why = ""
    for attempt in range(tries):
        try:
            with socket.create_connection((address, port), timeout=wait):
                return ""
        except ConnectionRefusedError:
            return ""
        except socket.gaierror as error:
            why = f"no address has that name ({error.strerror})"
        except OSError as error:
            why = f"no answer within {wait:.0f} s" if isinstance(error, TimeoutError) else str(error.strerror or error)
        if attempt + 1 < tries:
            time.sleep(0.5)
    return why


def main(argv: list[str] | None = None) -> int:
    """Prints the interface; returns 1 where the first node is not to be reached. PREFLIGHT=0 does not ask."""
    address, port = (sys.argv[1:] if argv is None else argv)[:2]
    why = "" if os.environ.get("PREFLIGHT") == "0" else problem(address, int(port))
    if why:
        print(
            f"[node] error: {os.uname().nodename} does not reach the first node, {address} port {port}: {why}. Give "
            "another MASTER_ADDR, leave that host out, or open the port; PREFLIGHT=0 starts without asking",
            file=sys.stderr,
        )
        return 1
    # `choose_interface` is for ranks: two on as many nodes stand for any number.
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address}
    try:
        choose_interface()
    except ValueError as error:
        print(f"[node] error: {error}", file=sys.stderr)
        return 1
    print(os.environ.get(NAMES[0], ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
