"""Python sources of packages that cannot be installed here: their wheels are downloaded, read, and not run."""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "launch" / "locks"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "spmdrl" / "sources"
"""A folder for each package and version, with its Python files alone."""
PLATFORMS = ["manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (17, 28, 31, 34, 35, 39))]


class UnreachableError(RuntimeError):
    """No package index, or not this package in it."""


def locked(lock: str) -> dict[str, str]:
    """Versions that a lock in launch/locks pins exactly."""
    lines = (LOCKS / lock).read_text().splitlines()
    found = (re.match(r"([A-Za-z0-9_.-]+)(?:\[\w+\])?==([^\s;#]+)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def sources(package: str, version: str) -> Path:
    """Folder with the Python files of a package as it is published for Linux on x86_64 with CUDA.

    Raises:
        UnreachableError: it is not in the cache and cannot be downloaded; the message gives pip's last line.
    """
    folder = CACHE / f"{package}-{version}"
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        archive = _download(package, version, Path(work))
        out = Path(work) / "out"
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(out, [name for name in wheel.namelist() if name.endswith(".py")])
        else:
            with tarfile.open(archive) as source:
                members = [m for m in source.getmembers() if m.isfile() and m.name.endswith(".py")]
                source.extractall(out, members, filter="data")
            # An archive of sources has one folder around everything.
            out = next(out.iterdir())
        # By rename, so that a test beside this one finds all of it or nothing.
        try:
            out.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    return folder


def _download(package: str, version: str, work: Path) -> Path:
    wheels = [f"--platform={name}" for name in PLATFORMS]
    wheel = ["--only-binary=:all:", "--python-version=3.11", *wheels]
    # For a package without wheels; what it says of itself must not need a compiler.
    source = ["--no-binary", package, "--no-build-isolation"]
    environment = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    last = ""
    for how in (wheel, source):
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-input"]
        command += ["--no-deps", *how, "-d", str(work), f"{package}=={version}"]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
        files = [path for path in work.iterdir() if path.name.endswith((".whl", ".tar.gz"))]
        if ended.returncode == 0 and files:
            return files[0]
        last = (ended.stderr.strip() or "pip said nothing").splitlines()[-1]
    raise UnreachableError(f"{package}=={version} could not be downloaded: {last}")
