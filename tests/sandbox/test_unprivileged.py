"""The table of attacks once more, as a user who is not root: bubblewrap then makes a user namespace first, and programs
below sandlock share the caller's user."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534


def python_of_all() -> str | None:
    """An interpreter that every user may run; None without one."""
    # setpriv itself may still start what the user may not.
    for name in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        able = [
            *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
            *(
                name,
                "-c",
                "import os, sys; sys.exit(sys.version_info < (3, 11) or not os.access(sys.executable, os.X_OK))",
            ),
        ]
        if subprocess.run(able, capture_output=True).returncode == 0:
            return name
    return None


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests of this folder already run as a user who is not root")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv (util-linux) to become another user")
@pytest.mark.timeout(500)
def test_attacks_are_kept_in_for_a_user_who_is_not_root(tmp_path_factory):
    python = python_of_all()
    if python is None:
        pytest.skip("no Python 3.11 or later that every user may run")
    words = [*("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", python, "-m", "pytest", "-q")]
    words += [
        "-c",
        "/dev/null",
        "--rootdir",
        str(ROOT),
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
    ]
    words += ["--basetemp", f"/tmp/attacks-{os.getpid()}", str(ROOT / "tests" / "sandbox" / "test_attacks.py")]
    packages = os.pathsep.join((str(ROOT), str(ROOT / "sandbox"), sysconfig.get_paths()["purelib"]))
    environment = {
        "CI": "true",
        "PYTHONPATH": packages,
        "PATH": os.environ["PATH"],
        "HOME": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=480)
    finally:
        shutil.rmtree(f"/tmp/attacks-{os.getpid()}", ignore_errors=True)
    last = ended.stdout.strip().splitlines()[-1:] or [ended.stderr[-2000:]]
    assert ended.returncode == 0 and "skipped" not in last[0], ended.stdout[-6000:] + ended.stderr[-2000:]
