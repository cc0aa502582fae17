"""Chooses the network interface that ranks on several nodes talk over.

Without a choice gloo takes the address that the host's own name resolves to. On Debian and Ubuntu /etc/hosts gives that
name 127.0.1.1, so each node waits for the others at itself.
"""

import os
import socket
from collections.abc import Callable

import psutil

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
OUTSIDE = "192.0.2.1"
"""An address of no machine (RFC 5737): the route to it is the route out of this one."""


def source_of(address: str) -> str:
    """This node's own IPv4 address on the route to another; nothing is sent. Raises OSError: there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


def interface_with(address: str) -> str | None:
    """Name of the interface that has an IPv4 address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == address for a in addresses):
            return name
    return None


def choose_interface(
    source: Callable[[str], str] = source_of, named: Callable[[str], str | None] = interface_with
) -> str:
    """Set NAMES for a job on several nodes, where a user has not, to the interface towards the first node.

    Returns one line for the log; empty on a single node, and where no route is IPv4.

    Raises:
        ValueError: every route leads to this node itself.
    """
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        return ""
    if given := os.environ.get(NAMES[0]):
        os.environ.setdefault(NAMES[1], given)
        return f"network: {given} (GLOO_SOCKET_IFNAME)"
    first = os.environ.get("MASTER_ADDR", "")
    ways = 0
    # On the first node its own name may be a loopback address; the others reach it by the route out.
    for towards in (first, OUTSIDE):
        try:
            own = source(towards)
        except OSError:
            continue
        ways += 1
        name = None if own.startswith("127.") else named(own)
        if name:
            for variable in NAMES:
                os.environ.setdefault(variable, name)
            return f"network: {name} ({own}), towards {first}"
    if not ways:
        return ""
    raise ValueError(
        f"no network interface leads from {os.uname().nodename} to {first or 'the first node'} (MASTER_ADDR): set "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the one between the nodes (`ip addr` lists them)"
    )
