"""Packages that cannot be installed here: their wheels are downloaded, unpacked beside the environment, and read."""

import json
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
"""A folder for each package and version with its Python files alone, or, for one version of Python, with all files."""
PLATFORMS = ["manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (17, 28, 31, 34, 35, 39))]
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


class UnreachableError(RuntimeError):
    """Error for a missing package index, or one that lacks the package."""


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
    return _kept(package, version, whole=False)


def unpacked(package: str, version: str) -> Path:
    """Folder with all of a wheel's files, for PYTHONPATH. Errors as `sources`."""
    return _kept(package, version, whole=True)


def pinned_by(package: str, version: str, name: str) -> str:
    """Version of `name` that a wheel as published for Linux with CUDA asks for exactly. Errors as `sources`."""
    path = CACHE / f"{package}-{version}.json"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            report = Path(work) / "report.json"
            # By === a build such as +cpu, which asks for less, is not taken in its place.
            wanted = ["--dry-run", "--ignore-installed", "--no-deps", f"{package}==={version}"]
            _pip("install", *wanted, "--report", str(report), what=f"{package}=={version}")
            (found,) = json.loads(report.read_text())["install"]
            (Path(work) / "asks.json").write_text(json.dumps(found["metadata"]["requires_dist"]))
            (Path(work) / "asks.json").rename(path)
    (pin,) = {match[1] for line in json.loads(path.read_text()) if (match := re.match(rf"{name}==([^\s;]+)", line))}
    return pin


def _kept(package: str, version: str, whole: bool) -> Path:
    folder = CACHE / f"{package}-{version}{'-' + THIS_PYTHON if whole else ''}"
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        archive = _download(package, version, Path(work), whole)
        out = Path(work) / "out"
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                for member in wheel.infolist():
                    if whole or member.filename.endswith(".py"):
                        # zipfile leaves out the permissions, and a wheel may hold programs.
                        Path(wheel.extract(member, out)).chmod(member.external_attr >> 16 & 0o777 | 0o600)
        else:
            with tarfile.open(archive) as source:
                members = [m for m in source.getmembers() if m.isfile() and m.name.endswith(".py")]
                source.extractall(out, members, filter="data")
            # An archive of sources has one folder around everything.
            out = next(out.iterdir())
        # A rename lets a test beside this one find all of it or nothing.
        try:
            out.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    return folder


def _download(package: str, version: str, work: Path, whole: bool) -> Path:
    """Downloads a wheel, for the running Python if `whole`; otherwise an archive of sources where there is no wheel."""
    python = f"--python-version={THIS_PYTHON if whole else '3.11'}"
    ways = [["--only-binary=:all:", python, *(f"--platform={name}" for name in PLATFORMS)]]
    if not whole:
        # Reading the metadata of such a package must not need a compiler.
        ways.append(["--no-binary", package, "--no-build-isolation"])
    for how in ways:
        try:
            _pip("download", "--no-deps", *how, "-d", str(work), f"{package}=={version}", what=f"{package}=={version}")
            break
        except UnreachableError:
            if how is ways[-1]:
                raise
    return next(path for path in work.iterdir() if path.name.endswith((".whl", ".tar.gz")))


def _pip(*arguments: str, what: str) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "-q", "--disable-pip-version-check", "--no-input"]
    environment = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    ended = subprocess.run(
        [*command, *arguments[1:]], capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    if ended.returncode:
        last = (ended.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise UnreachableError(f"{what} could not be downloaded: {last}")
