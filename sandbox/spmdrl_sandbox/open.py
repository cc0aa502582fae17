"""Opens a sandbox that works here, after a small program has tried to get out of it."""

import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from spmdrl_sandbox import bubblewrap, containers, sandlock
from spmdrl_sandbox.base import Limits, Program, SandboxError, Start
from spmdrl_sandbox.places import FLAGS, HERE, ZYGOTE
from spmdrl_sandbox.warm import Warm

PROBE = """
import os, socket
reached = []
try:
    reached.append(open({file!r}).read())
except OSError:
    pass
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=2)
    reached.append("network")
except OSError:
    pass
try:
    os.kill({pid}, 0)
    reached.append("processes")
except OSError:
    pass
try:
    socket.socket(socket.AF_UNIX).connect("\\0" + {name!r})
    reached.append("sockets")
except OSError:
    pass
print(reached)
"""
"""A program that tries to read a file, to reach a port and a socket, and to see a process of this machine."""


def open_sandbox(provider: str = "auto", image: str = containers.IMAGE) -> Warm:
    """Return a sandbox that keeps a probe in. Its `name` is for logs.

    Args:
        provider: `auto` takes the first of `AUTO` that works. Another name takes that one or none; `none` is no
            sandbox, for programs that are trusted.
        image: of the container, for a container engine.

    Raises:
        SandboxError: there is none; the message says why and what to do.
    """
    if provider != "auto":
        if provider not in PROVIDERS:
            raise SandboxError(f"no sandbox is called {provider!r}", f"take one of auto, {', '.join(PROVIDERS)}")
        start = PROVIDERS[provider](image)
        return _opened(start) if provider != "none" else Warm(start.words, start.name)
    refused: list[SandboxError] = []
    for name in AUTO:
        try:
            return _opened(PROVIDERS[name](image))
        except SandboxError as error:
            refused.append(error)
    why = "; ".join(error.why for error in refused)
    fixes = [f"{name}: {error.fix}" for name, error in zip(AUTO, refused, strict=True) if error.fix]
    raise SandboxError(why, ". Or ".join(fixes))


def open_for(provider: str) -> Warm:
    """Return the sandbox that `--sandbox.provider` names: `NAME`, or `NAME:IMAGE` of a container engine.

    Raises:
        SandboxError: see `open_sandbox`.
    """
    name, _, image = provider.partition(":")
    return open_sandbox(name, image or containers.IMAGE)


def plain() -> Start:
    """Return how to start a zygote without any sandbox: limits of single processes are all that holds."""
    words = ["env", f"PYTHONPATH={HERE.parent}", sys.executable, *FLAGS, "-m", ZYGOTE, "plain", "0"]
    return Start(words, "none (no sandbox: limits of single processes are all that holds)")


PROVIDERS: dict[str, Callable[[str], Start]] = {
    "bubblewrap": lambda _: bubblewrap.start(),
    "sandlock": lambda _: sandlock.start(),
    "apptainer": containers.apptainer,
    "docker": containers.docker,
    "none": lambda _: plain(),
}
"""Functions that start a sandbox, by name; each gets the image of the container."""
AUTO = ("bubblewrap", "sandlock")
"""Sandboxes that `auto` tries, the better one first."""


def _opened(start: Start) -> Warm:
    """Start a sandbox and run the probe in it."""
    try:
        warm = Warm(start.words, start.name, start.once)
    except SandboxError as error:
        raise SandboxError(f"{start.name}: {error}", start.fix) from None
    try:
        reached = probe(warm)
    except SandboxError as error:
        warm.close()
        raise SandboxError(f"{start.name}: {error}", start.fix) from None
    if reached:
        warm.close()
        raise SandboxError(f"{start.name} does not keep programs in: {reached}")
    return warm


def probe(warm: Warm) -> str:
    """Return what a harmless program can do although it should not; empty if nothing."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        secret, name = Path(folder, "secret"), f"spmdrl-probe-{secrets.token_hex(8)}"
        secret.write_text("file")
        abstract.bind("\0" + name)
        abstract.listen(1)
        source = PROBE.format(file=str(secret), port=server.getsockname()[1], pid=os.getpid(), name=name)
        ended = warm.run(Program(source), Limits(seconds=10.0))
    if ended.verdict != "ok":
        return f"{ended.verdict} ({ended.why})"
    return "" if ended.stdout == "[]\n" else f"a program reached {ended.stdout.strip()}"
