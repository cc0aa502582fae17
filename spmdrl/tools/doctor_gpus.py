"""Checks that the torch build has NCCL and matches the GPUs and their driver, and that the GPUs are idle."""

import os
import subprocess
from collections import Counter
from pathlib import Path

from spmdrl.tools.doctor_findings import Finding, either, fail, ok, warn
from spmdrl.tools.doctor_software import ROOT

BUSY = 0.05
"""If more than this fraction of a GPU's memory is in use, another program is assumed to be running on the GPU."""


def torch_imports() -> bool:
    """Return True if torch can be imported; otherwise `doctor_software.torch_version` reports why not."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


def count() -> int:
    """Return the number of GPUs that torch finds, or 0 without torch. Does not create a CUDA context."""
    if not torch_imports():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def build(nvidia: bool | None = None, amd: bool | None = None, side: str | None = None) -> Finding:
    """Check that torch was built for the machine's devices and driver.

    nvidia, amd: whether the machine has GPUs of this vendor, or None to detect them. side: `gpu` or `cpu`, the device
    type that `launch/install.sh` installed packages for, or None to read it from .venv.
    """
    import torch

    from spmdrl.spmd.devices import without_gpu

    nvidia = Path("/dev/nvidiactl").exists() if nvidia is None else nvidia
    amd = Path("/dev/kfd").exists() if amd is None else amd
    stamp = ROOT / ".venv" / ".spmdrl" / "side"
    side = (stamp.read_text().strip() if stamp.is_file() else "") if side is None else side
    if torch.version.cuda is None and torch.version.hip is None:
        state = "torch is built for CPUs" + (" on a machine with GPUs" if nvidia or amd else "")
        return either(nvidia or amd, False, "build", state, "remove .venv, then ./launch/install.sh --gpu")
    built = f"torch for CUDA {torch.version.cuda}" if torch.version.cuda else f"torch for ROCm {torch.version.hip}"
    if found := count():
        names = Counter(torch.cuda.get_device_name(index) for index in range(found)) if amd else {}
        kinds = "".join(f", {number} x {name}" for name, number in names.items())
        many = "1 GPU" if found == 1 else f"{found} GPUs"
        return ok("build", f"{built}, {_driver() or 'driver unknown'}, {many}{kinds}")
    if (nvidia and torch.version.hip) or (amd and torch.version.cuda and not nvidia):
        other = "NVIDIA's" if nvidia else "AMD's"
        return fail("build", f"{built} on {other} GPUs", "install the build of torch for these GPUs")
    if nvidia or amd:
        state = f"{without_gpu()} ({_driver() or 'driver unknown'})"
        return fail("build", state, "update the driver, or unset the limit")
    fix = "start on a node with GPUs; inside a container pass --nv or --gpus"
    return either(True, side == "gpu", "build", f"{built}, but this machine has no GPU", fix)


def _driver() -> str:
    """Return the name and version of the loaded GPU driver, or "" if none is loaded."""
    for place, name in (("/proc/driver/nvidia/version", "NVIDIA driver"), ("/sys/module/amdgpu/version", "AMD driver")):
        try:
            words = Path(place).read_text().split()
        except OSError:
            continue
        number = next((word for word in words if word[0].isdigit() and "." in word), "")
        return f"{name} {number}".strip()
    return ""


def listed(text: str) -> list[Finding]:
    """Check GPU models and free GPU memory. text: nvidia-smi's rows of index, name, total MiB and used MiB."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 3]
    names = Counter(row[1] for row in rows)
    state = ", ".join(f"{number} x {name}" for name, number in names.items())
    found = [either(len(names) > 1, False, "GPUs", state or "none listed", "start on nodes with one kind of GPU")]
    used = [(row[0], int(row[3]), int(row[2])) for row in rows if row[2].isdigit() and row[3].isdigit()]
    busy = [f"GPU {index}: {mine} of {total} MiB" for index, mine, total in used if mine > BUSY * total]
    fix = "`nvidia-smi` lists the programs on them: end those of earlier jobs"
    if rows:
        found.append(either(bool(busy), False, "GPU memory", f"in use on {'; '.join(busy)}" if busy else "free", fix))
    return found


def gpus(found: int) -> list[Finding]:
    """Check the GPUs listed by nvidia-smi, and that torch has NCCL. found: number of GPUs that torch finds."""
    import torch
    import torch.distributed as dist

    if not found:
        return [ok("GPUs", "torch finds none; ranks run on the CPU and communicate by gloo")]
    out = []
    if torch.version.cuda:
        words = ["nvidia-smi", "--query-gpu=index,name,memory.total,memory.used", "--format=csv,noheader,nounits"]
        try:
            out += listed(subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout)
        except (OSError, subprocess.SubprocessError) as error:
            out.append(warn("GPUs", f"nvidia-smi: {error}", "install the driver's tools, or start with them on PATH"))
    if not dist.is_nccl_available():
        return [*out, fail("NCCL", "this build of torch has no NCCL", "./launch/install.sh --gpu")]
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[attr-defined]
    off = [name for name in ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if os.environ.get(name) == "1"]
    fix = f"`unset {' '.join(off)}` unless this is intended"
    return [*out, either(bool(off), False, "NCCL", ", ".join([version, *off]), fix)]
