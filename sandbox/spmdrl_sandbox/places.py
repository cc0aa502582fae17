"""Places, environment and user of programs, whatever keeps them in."""

import os
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
"""Places that every program needs to start."""
HERE = Path(__file__).parent
"""This package, which is all that zygotes need."""
ZYGOTE = "spmdrl_sandbox.inside.zygote"
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
FLAGS = ["-P", "-s", "-B"]
"""Flags of Python: no folder of a caller or a user on its path, and no bytecode written."""
BARE = ["-S", *FLAGS]
"""And no `.pth` files of packages, which `inside/modules.py` makes up for."""


def python() -> str:
    """Return this interpreter without its virtual environment."""
    return os.path.realpath(sys.executable)


def cache() -> None:
    """Have Python keep the bytecode of what runs inside, as an import would: a sandbox may read it, not write it."""
    for file in sorted((HERE / "inside").glob("*.py")):
        name = f"spmdrl_sandbox.inside.{file.stem}".removesuffix(".__init__")
        cast(Any, find_spec(name)).loader.get_code(name)


def packages() -> str:
    """Return the folder of this interpreter's packages."""
    return sysconfig.get_paths()["purelib"]


def home() -> str:
    """Return the folder of this interpreter and its library."""
    return str(Path(python()).parent.parent)


def system() -> list[str]:
    """Return the places of the system and of this interpreter that programs may read."""
    shown = [place for place in SYSTEM if os.path.exists(place)]
    if not f"{home()}/".startswith(tuple(f"{place}/" for place in SYSTEM)):
        shown.append(home())
    return shown
