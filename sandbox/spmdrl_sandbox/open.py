"""Opens a sandbox that works on this machine, and checks with a small program that the sandbox isolates programs."""

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
"""A program that tries to read a file, to connect to a port and a socket, and to see a process of this machine."""


def open_sandbox(provider: str = "auto", image: str = containers.IMAGE) -> Warm:
    """Return an open sandbox that has passed the probe; `none` is not probed.

    Args:
        provider: `auto` uses the first of `AUTO` that works. Another name selects that sandbox. `none` runs programs
            without a sandbox and is meant for trusted programs.
        image: container image, for a container engine.

    Raises:
        SandboxError: no sandbox works; the message has the reason and advice.
    """
    if provider != "auto":
        if provider not in PROVIDERS:
            raise SandboxError(f"no sandbox is called {provider!r}", f"use one of auto, {', '.join(PROVIDERS)}")
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
    """Return an open sandbox for `--sandbox.provider`: `NAME`, or `NAME:IMAGE` for a container engine.

    Raises:
        SandboxError: the sandbox does not work.
    """
    name, _, image = provider.partition(":")
    return open_sandbox(name, image or containers.IMAGE)


def plain() -> Start:
    """Return the command that starts a zygote without a sandbox, with only per-process limits."""
    words = ["env", f"PYTHONPATH={HERE.parent}", sys.executable, *FLAGS, "-m", ZYGOTE, "plain", "0"]
    return Start(words, "none (no sandbox, only limits of single processes)")


PROVIDERS: dict[str, Callable[[str], Start]] = {
    "bubblewrap": lambda _: bubblewrap.start(),
    "sandlock": lambda _: sandlock.start(),
    "apptainer": containers.apptainer,
    "docker": containers.docker,
    "none": lambda _: plain(),
}
"""Functions by sandbox name. Each takes a container image and returns the command that starts the sandbox."""
AUTO = ("bubblewrap", "sandlock")
"""Names of the sandboxes that `auto` tries, in this order."""


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
        raise SandboxError(f"{start.name} did not pass the test of its isolation: {reached}")
    return warm


def probe(warm: Warm) -> str:
    """Run the probe in a sandbox. Return an error text if it failed or reached anything, otherwise an empty text."""
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
