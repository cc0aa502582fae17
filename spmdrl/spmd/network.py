"""Chooses the network interface for multi-node communication.

By default gloo uses the address that the host name resolves to. On Debian and Ubuntu, /etc/hosts maps the host name to
127.0.1.1, so each node would wait for the other nodes on its loopback interface.
"""

import os
import socket
from collections.abc import Callable

import psutil

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
OUTSIDE = "192.0.2.1"
"""Address reserved for documentation (RFC 5737), which is reached by the default route."""


def source_of(address: str) -> str:
    """Return this node's IPv4 address on the route to `address`, without sending anything. Raises OSError without a
    route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


def interface_with(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address, or None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == address for a in addresses):
            return name
    return None


def choose_interface(
    source: Callable[[str], str] = source_of, named: Callable[[str], str | None] = interface_with
) -> str:
    """Set the environment variables in NAMES to the interface that reaches a multi-node job's first node.

    Variables that are already set keep their values. If GLOO_SOCKET_IFNAME is set, NCCL_SOCKET_IFNAME defaults to its
    value.

    Returns a log line, or an empty string on a single node or if there is no IPv4 route.
    Raises ValueError if there are routes, but none uses an interface that reaches another node.
    """
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        return ""
    if chosen := os.environ.get(NAMES[0]):
        os.environ.setdefault(NAMES[1], chosen)
        return f"network: {chosen} (GLOO_SOCKET_IFNAME)"
    first = os.environ.get("MASTER_ADDR", "")
    routes = 0
    # The first node's own name may resolve to a loopback address, so the default route is tried as well.
    for towards in (first, OUTSIDE):
        try:
            own = source(towards)
        except OSError:
            continue
        routes += 1
        name = None if own.startswith("127.") else named(own)
        if name:
            for variable in NAMES:
                os.environ.setdefault(variable, name)
            return f"network: {name} ({own}), towards {first}"
    if not routes:
        return ""
    raise ValueError(
        f"no network interface leads from {os.uname().nodename} to {first or 'the first node'} (MASTER_ADDR): set "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between the nodes (`ip addr` lists them)"
    )
