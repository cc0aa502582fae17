"""Paths, environment variables and user of sandboxed programs, for all types of sandboxes."""

import os
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
"""Paths that every program needs to start."""
HERE = Path(__file__).parent
"""Folder of the package `spmdrl_sandbox`, the only package outside the standard library that zygotes import."""
ZYGOTE = "spmdrl_sandbox.inside.zygote"
USER = 64321
"""User id of programs if this process runs as root, because the kernel's process limits do not apply to root."""
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
"""Python flags that keep the folders of the caller and user out of `sys.path`, and prevent writing bytecode."""
BARE = ["-S", *FLAGS]
"""FLAGS, and a flag that prevents the import of `site`, which `inside/modules.py` replaces in part."""


def python() -> str:
    """Return the path of this Python interpreter outside of its virtual environment."""
    return os.path.realpath(sys.executable)


def cache() -> None:
    """Write the bytecode of the package `inside` to its cache, which a sandbox may read but not write."""
    for file in sorted((HERE / "inside").glob("*.py")):
        name = f"spmdrl_sandbox.inside.{file.stem}".removesuffix(".__init__")
        cast(Any, find_spec(name)).loader.get_code(name)


def packages() -> str:
    """Return the folder of this interpreter's packages."""
    return sysconfig.get_paths()["purelib"]


def home() -> str:
    """Return the installation folder of this interpreter, which contains its library."""
    return str(Path(python()).parent.parent)


def system() -> list[str]:
    """Return the paths of the system and of this interpreter that programs may read."""
    shown = [place for place in SYSTEM if os.path.exists(place)]
    if not f"{home()}/".startswith(tuple(f"{place}/" for place in SYSTEM)):
        shown.append(home())
    return shown
