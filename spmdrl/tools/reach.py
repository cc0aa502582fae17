"""Checks that the first node of a job is reachable from this one: `python -m spmdrl.tools.reach ADDRESS PORT`.

Prints the network interface to the first node, for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME. An empty line leaves the
choice to gloo and NCCL.
"""

import os
import socket
import sys
import time

from spmdrl.spmd.network import NAMES, choose_interface


def problem(address: str, port: int, wait: float = 3.0, tries: int = 3) -> str:
    """Return the reason why a host is unreachable, or "" if it is reachable. wait: timeout per attempt, in seconds.

    A host that refuses the connection is reachable; its torchrun has not started yet.
    """
    why = ""
    for attempt in range(tries):
        try:
            with socket.create_connection((address, port), timeout=wait):
                return ""
        except ConnectionRefusedError:
            return ""
        except socket.gaierror as error:
            why = f"the name has no address ({error.strerror})"
        except OSError as error:
            why = f"no answer within {wait:.0f} s" if isinstance(error, TimeoutError) else str(error.strerror or error)
        if attempt + 1 < tries:
            time.sleep(0.5)
    return why


def main(argv: list[str] | None = None) -> int:
    """Print the network interface; return 1 if the first node is unreachable. PREFLIGHT=0 skips the check."""
    address, port = (sys.argv[1:] if argv is None else argv)[:2]
    why = "" if os.environ.get("PREFLIGHT") == "0" else problem(address, int(port))
    if why:
        print(
            f"[node] error: {os.uname().nodename} cannot reach the first node, {address} port {port}: {why}. Give "
            "another MASTER_ADDR, leave that node out, or open the port; PREFLIGHT=0 starts without this check",
            file=sys.stderr,
        )
        return 1
    # `choose_interface` reads a rank's variables; any values that describe several nodes work here.
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
